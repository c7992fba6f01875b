"""A transfer that fails costs time, never a token: the engine computes again, and what was bad is not found again."""

from __future__ import annotations

import pytest
from engines import do, generate, prompt

pytestmark = pytest.mark.engine

CACHE = {"cpu_cache_override_num_blocks": 512}
PROMPT = prompt(1, 400)  # 12 full blocks
BAD = [4, 9]  # blocks of it that a load loses when every fifth is lost


@pytest.fixture(scope="module", params=["sync", "async"])
def lost_load(request, run_scenario):
    steps = [
        generate(PROMPT, name="cold"),
        do("drain"),
        do("reset"),
        do("held", "held before", prompts=[PROMPT]),
        do("add", names=["a"], prompts=[PROMPT]),
        do("drain_loads"),
        do("held", "held after the load", prompts=[PROMPT]),
        do("state", "after the load"),
        do("finish", "answer"),
        do("drain"),
        do("held", "held at the end", prompts=[PROMPT]),
        do("reset"),
        generate(PROMPT, name="again"),
        do("drain"),
        do("state", "end"),
        do("metrics", "metrics"),
    ]
    return run_scenario(steps, {**CACHE, "onboard": request.param, "inject_faults": "load:every=5"})


def test_a_lost_load_is_computed_again(lost_load, baseline):
    (wanted,) = baseline([PROMPT])
    assert lost_load["answer"] == {"a": wanted}
    assert lost_load.tokens("again") == [wanted]
    assert lost_load["again"]["finish"] == ["length"]


def test_a_block_that_did_not_arrive_is_not_found_again(lost_load):
    assert all(lost_load["held before"][0])
    assert [i for i, held in enumerate(lost_load["held after the load"][0]) if not held] == BAD


def test_a_lost_block_is_kept_again_once_it_has_been_computed(lost_load):
    assert all(lost_load["held at the end"][0])


def test_lost_loads_are_counted_and_told_once(lost_load):
    # Blocks number 5 and 10 of the first load, 15 and 20 of the second.
    assert lost_load["after the load"]["failed_load_blocks"] == 2
    end, metrics = lost_load["end"], lost_load["metrics"]
    assert end["failed_load_blocks"] == metrics["kvbm_transfer_failed_blocks host device"] == 4
    assert metrics["kvbm_failures"] == sum(end["faults"].values()) == 2
    assert len(lost_load.said("injected load fault")) == 1


def test_a_lost_load_leaves_nothing_pinned(lost_load):
    end = lost_load["end"]
    assert (end["requests"], end["pinned"], end["writing"], end["busy"]) == (0, 0, 0, False)


def test_a_lost_store_is_not_found_and_can_be_kept_later(run_scenario, baseline):
    first, second = prompt(5, 200), prompt(6, 200)
    wanted = baseline([PROMPT, first, second], 1)
    steps = [
        generate(PROMPT, name="one", max_tokens=1),
        generate(first, name="two", max_tokens=1),
        generate(second, name="three", max_tokens=1),  # its store is the third
        do("drain"),
        do("held", "held", prompts=[PROMPT, first, second]),
        do("state", "state"),
        do("metrics", "metrics"),
        do("reset"),
        generate(second, name="recomputed", max_tokens=1),
        do("drain"),
        do("held", "held later", prompts=[second]),
        do("reset"),
        generate(second, name="host hit", max_tokens=1),
        do("state", "end"),
    ]
    story = run_scenario(steps, {**CACHE, "inject_faults": "store:every=3"})
    assert [story.tokens(name)[0] for name in ("one", "two", "three")] == wanted
    assert [all(blocks) for blocks in story["held"]] == [True, True, False]
    assert not any(story["held"][2])
    assert story["state"]["failed_store_blocks"] == story["metrics"]["kvbm_transfer_failed_blocks device host"] == 6
    assert len(story.said("injected store fault")) == 1
    assert story.tokens("recomputed") == story.tokens("host hit") == wanted[2:]
    assert story["recomputed"]["cached"] == [0]
    assert all(story["held later"][0])
    assert story["host hit"]["cached"] == [192]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_requests_that_share_a_lost_block_all_recover(mode, run_scenario, baseline):
    """Three requests in one step with the same prefix: all of them build on what did not arrive."""
    prompts = [PROMPT, PROMPT + prompt(7, 50), PROMPT[:330]]
    wanted = baseline(prompts)
    steps = [
        generate(PROMPT),
        do("drain"),
        do("reset"),
        generate(*prompts, name="together"),
        do("drain"),
        do("state", "after"),
        do("reset"),
        generate(*prompts, name="again"),
        do("drain"),
        do("state", "end"),
    ]
    story = run_scenario(steps, {**CACHE, "onboard": mode, "inject_faults": "load:every=3"})
    assert story.tokens("together") == story.tokens("again") == wanted
    assert story["after"]["failed_load_blocks"] > 0
    end = story["end"]
    assert (end["requests"], end["pinned"], end["writing"], end["busy"]) == (0, 0, 0, False)


def test_faults_under_preemption_change_no_token(run_scenario, baseline):
    """Everything at once: an engine too small, loads and stores that fail, transfers that come late."""
    small = {"num_gpu_blocks_override": 36, "max_model_len": 512}
    prompts = [prompt(10 + i, 220 + 10 * i) for i in range(8)]
    wanted = baseline(prompts, 64, small)
    faults = "load:every=7,store:every=5,slow:every=3,slow-store:every=4"
    steps = [
        generate(*prompts, name="cold", max_tokens=64),
        generate(*prompts, name="again", max_tokens=64),
        do("reset"),
        generate(*reversed(prompts), name="backwards", max_tokens=64),
        do("drain"),
        do("state", "end"),
    ]
    story = run_scenario(steps, {**CACHE, "inject_faults": faults}, small)
    assert story.tokens("cold") == story.tokens("again") == wanted
    assert story.tokens("backwards") == wanted[::-1]
    end = story["end"]
    assert end["failed_load_blocks"] > 0
    assert end["failed_store_blocks"] > 0
    assert (end["requests"], end["pinned"], end["writing"], end["busy"]) == (0, 0, 0, False)
    assert end["engine_blocks_free"] == 35


def test_faults_begin_and_end_in_the_middle_of_a_story(run_scenario):
    """As the stories of tests/gpu count on: each of them takes an engine that cannot be started for every fault."""
    load = [do("reset"), generate(PROMPT, max_tokens=1), do("drain")]
    steps = [generate(PROMPT, max_tokens=1), do("drain"), do("faults", rules="load:every=5"), *load]
    steps += [do("state", "faulty"), do("faults", rules=""), *load, do("state", "mended")]
    story = run_scenario(steps, CACHE)
    assert story["faulty"]["failed_load_blocks"] == story["mended"]["failed_load_blocks"] == len(BAD)
    assert story["mended"]["onboarded"] > story["faulty"]["onboarded"]
