"""Two ranks, each with its half of every block: a block counts only when both have it."""

from __future__ import annotations

import pytest
from engines import do, generate, prompt

pytestmark = pytest.mark.engine

CACHE = {"cpu_cache_override_num_blocks": 512}
PROMPT, SECOND, THIRD = prompt(1, 400), prompt(2, 200), prompt(3, 200)
ENGINE = {"tensor_parallel_size": 2}
ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
# On rank 1 only. The second store is that of SECOND; the first load brings 12 blocks, the next one loses its third.
FAULTS = "store:rank=1:every=2,load:rank=1:every=15"


@pytest.fixture(scope="module")
def story(run_scenario):
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
    ]
    kvbm = {**CACHE, "onboard": "sync", "inject_faults": FAULTS}
    return run_scenario(steps, kvbm, ENGINE, ENVIRONMENT)


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
    assert story["metrics"]["kvbm_load_failures"] == story["end"]["failed_load_blocks"] == 1
    assert story["metrics"]["kvbm_store_failures"] >= 6
    assert len(story.said("rank 1: load: injected load fault")) == 1
    assert len(story.said("rank 1: store: injected store fault")) == 1
    assert not story.said("rank 0: ")


def test_two_ranks_leave_nothing_behind(story):
    end = story["end"]
    assert (end["requests"], end["pinned"], end["writing"], end["busy"]) == (0, 0, 0, False)
