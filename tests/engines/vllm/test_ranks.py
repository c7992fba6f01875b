"""Two ranks, each with its half of every block: a block counts only when both have it."""

from __future__ import annotations

import json
import re

import pytest
from engines import do, generate, prompt

from servers import free_port

pytestmark = pytest.mark.engine

CACHE = {"cpu_cache_override_num_blocks": 512}
PROMPT, SECOND, THIRD = prompt(1, 400), prompt(2, 200), prompt(3, 200)
ENGINE = {"tensor_parallel_size": 2}
ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
# On rank 1 only. The second store is that of SECOND; the first load brings 12 blocks, the next one loses its third.
FAULTS = "store:rank=1:every=2,load:rank=1:every=15"


@pytest.fixture(scope="module")
def story(run_scenario, tmp_path_factory):
    """The scheduler, and with it the leader, runs in the engine's process; each rank is a process of its own."""
    steps = [
        generate(PROMPT, name="cold", max_tokens=1),
        do("drain"),
        generate(SECOND, name="lost store", max_tokens=1),
        do("drain"),
        do("held", "held", prompts=[PROMPT, SECOND]),
        do("state", "stored"),
        do("reset"),
        generate(PROMPT, name="host hit"),
        do("drain"),
        do("state", "after host hit"),
        do("reset"),
        do("add", names=["a"], prompts=[PROMPT]),
        do("step"),
        do("held", "held after lost load", prompts=[PROMPT]),
        do("finish", "answer"),
        do("drain"),
        do("held", "held later", prompts=[PROMPT]),
        generate(SECOND, name="recomputed", max_tokens=1),
        do("drain"),
        do("state", "end"),
        do("metrics", "metrics"),
        do("look", "page", path="/"),
        do("look", "port", path="/metrics"),
        do("look", "api", path="/api/state?requests=10"),
    ]
    records = tmp_path_factory.mktemp("records")
    kvbm = {**CACHE, "onboard": "sync", "inject_faults": FAULTS, "metrics": True, "metrics_port": free_port()}
    kvbm |= {"enable_record": True, "record_dir": str(records), "cache_stats_log_interval_secs": 1}
    outcome = run_scenario(steps, kvbm, ENGINE, ENVIRONMENT, spawn=True)
    (record,) = records.glob("*.jsonl")
    outcome.steps["record"] = [json.loads(line) for line in record.read_text().splitlines()]
    return outcome


@pytest.fixture(scope="module")
def wanted(baseline):
    return baseline([PROMPT, SECOND], 16, ENGINE, ENVIRONMENT)


def test_two_ranks_bring_back_what_two_ranks_have_kept(story, wanted):
    assert story.tokens("cold") == [wanted[0][:1]]
    assert story.tokens("host hit") == wanted[:1]
    assert story["after host hit"]["onboarded"] == 12
    assert story["stored"]["offloaded"] == 12


def test_a_store_that_one_rank_has_lost_is_not_found(story, wanted):
    assert story.tokens("lost store") == story.tokens("recomputed") == [wanted[1][:1]]
    assert [all(blocks) for blocks in story["held"]] == [True, False]
    assert not any(story["held"][1])
    assert story["stored"]["failed_store_blocks"] == 6
    assert story["recomputed"]["finish"] == ["length"]


def test_a_load_that_one_rank_has_lost_is_computed_again_by_both(story, wanted):
    assert story["answer"] == {"a": wanted[0]}
    assert [i for i, held in enumerate(story["held after lost load"][0]) if not held] == [2]
    assert all(story["held later"][0])


def test_faults_of_a_rank_are_counted_and_told_with_its_number(story):
    assert story["metrics"]["kvbm_transfer_failed_blocks host device"] == story["end"]["failed_load_blocks"] == 1
    assert story["metrics"]["kvbm_transfer_failed_blocks device host"] >= 6
    assert len(story.said("rank 1: load: injected load fault")) == 1
    assert len(story.said("rank 1: store: injected store fault")) == 1
    assert not story.said("rank 0: ")


def test_two_ranks_leave_nothing_behind(story):
    end = story["end"]
    assert (end["requests"], end["pinned"], end["writing"], end["busy"]) == (0, 0, 0, False)


def test_the_metrics_port_counts_blocks_once_and_bytes_of_both_ranks(story):
    end, text = story["end"], story["port"]

    def value(series):
        return float(re.search(rf"^{re.escape(series)} (\S+)$", text, re.M).group(1))

    assert value("kvbm_offload_blocks_d2h") == end["offloaded"]
    # 12 blocks that came back whole, then 12 of which one rank lost one.
    assert value("kvbm_onboard_blocks_h2d") == 12 + 11
    assert value("kvbm_matched_tokens") == 2 * 12 * 32
    assert value('kvbm_transfer_failed_blocks_total{source="host",target="device"}') == 1
    state = json.loads(story["api"])
    assert state["identity"]["ranks"] == 2
    assert state["identity"]["block_bytes"] == 4 * 32 * 2 * 2 * 32 * 4  # layers, tokens, K and V, heads, size, float32
    way = 'kvbm_transfer_{}_total{{source="host",target="device"}}'
    assert value(way.format("bytes")) == 23 * state["identity"]["block_bytes"]
    assert value(way.format("seconds")) > 0
    assert value('kvbm_slots{tier="host",state="idle"}') == end["published"]
    assert story["metrics"]["kvbm_transfer_blocks host device"] == 23


def test_the_latest_requests_say_what_was_found_and_why_not(story):
    requests = json.loads(story["api"])["requests"]
    assert len(requests) == 5
    newest, lost, hit, _, cold = requests
    assert (cold["found"], cold["loaded_tokens"], cold["why"]) == ({}, 0, "no tier has the next block")
    assert (hit["found"], hit["loaded_tokens"], hit["in_step"]) == ({"host": 384}, 384, True)
    assert hit["load_seconds"] > 0
    assert hit["saved_seconds"] is not None
    assert lost["failed_tokens"] == 32
    assert (newest["prompt_tokens"], newest["loaded_tokens"]) == (200, 0)


def test_the_record_can_be_replayed(story):
    start, *lines, end = story["record"]
    assert (start["event"], start["block_size"], start["slots"]) == ("start", 32, {"host": 512})
    assert (end["event"], end["dropped"]) == ("end", 0)
    requests = [line for line in lines if line["event"] == "request"]
    assert [line["input_length"] for line in requests] == [400, 200, 400, 400, 200]
    # Two of them answered with 16 tokens, which completed a block.
    assert [len(line["hash_ids"]) for line in requests] == [12, 6, 13, 13, 6]
    assert requests[0]["hash_ids"] == requests[2]["hash_ids"][:12] == requests[3]["hash_ids"][:12]
    assert set(requests[0]["hash_ids"]).isdisjoint(requests[1]["hash_ids"])
    assert sum(line["blocks"]["host"] for line in lines if line["event"] == "load") == 24
    assert any(not line["ok"] for line in lines if line["event"] == "store")


def test_hit_rates_are_logged(story):
    assert story.said("blocks found, last ")
