"""Stores take longer than the steps that began them: nothing is lost, and nothing waits for them."""

from __future__ import annotations

import pytest
from engines import do, generate, prompt

pytestmark = pytest.mark.engine

CACHE = {"cpu_cache_override_num_blocks": 512, "inject_faults": "slow-store"}  # a second late, or when a test says so
PROMPT, OTHER = prompt(1, 400), prompt(2, 400)


@pytest.fixture(scope="module")
def story(run_scenario):
    steps = [
        do("hold_stores"),
        generate(PROMPT, name="first"),
        do("state", "under way"),
        do("reset", "reset at once"),
        do("step", times=3),  # as vLLM's loop does when the connector says that there is work
        do("state", "idle"),
        do("mend"),
        do("drain"),
        do("state", "drained"),
        do("reset"),
        generate(PROMPT, name="host hit"),
        do("drain"),
        # Everything is forgotten while stores are under way.
        do("hold_stores"),
        generate(OTHER, name="other"),
        do("state", "before"),
        do("reset", "reset all", connector=True),
        do("state", "reset"),
        do("mend"),
        do("drain"),
        do("state", "after"),
        generate(OTHER, name="computed again"),
        do("drain"),
        do("reset"),
        generate(OTHER, name="other host hit"),
        do("drain"),
        do("state", "end"),
    ]
    return run_scenario(steps, CACHE)


def test_stores_finish_although_the_engine_has_nothing_to_do(story):
    for when in ("under way", "idle"):
        assert (story[when]["published"], story[when]["writing"], story[when]["busy"]) == (0, 12, True)
    assert (story["drained"]["published"], story["drained"]["writing"], story["drained"]["busy"]) == (12, 0, False)


def test_the_engine_gets_its_blocks_back_at_once(story, baseline):
    """A store holds none of them, so vLLM's prefix cache can be reset right after the last token."""
    assert story["under way"]["engine_blocks_free"] == 255
    assert story["reset at once"] is True
    assert story.tokens("first") == story.tokens("host hit") == baseline([PROMPT])
    assert story["host hit"]["cached"] == [384]


def test_a_reset_forgets_the_stores_that_are_under_way(story, baseline):
    """They may hold the KV of weights that are gone."""
    assert (story["before"]["published"], story["before"]["writing"]) == (12, 12)
    assert story["reset all"] is True
    assert (story["reset"]["published"], story["reset"]["pinned"]) == (0, 0)
    assert (story["after"]["published"], story["after"]["writing"], story["after"]["busy"]) == (0, 0, False)
    assert story["computed again"]["cached"] == [0]
    assert story["other host hit"]["cached"] == [384]
    for name in ("other", "computed again", "other host hit"):
        assert story.tokens(name) == baseline([OTHER])
    assert story["end"]["free"] + story["end"]["published"] == story["end"]["size"]


def test_blocks_that_change_hands_are_read_before_they_are_overwritten(run_scenario, baseline):
    """An engine so small that every request needs the blocks of the one before, whose stores have not begun."""
    small = {"num_gpu_blocks_override": 18, "max_model_len": 512}
    prompts = [prompt(20 + i, 400) for i in range(4)]
    wanted = baseline(prompts, 16, small)
    steps = [generate(tokens, name=f"cold {i}") for i, tokens in enumerate(prompts)]
    steps += [do("drain"), do("held", "held", prompts=prompts)]
    steps += [generate(tokens, name=f"host hit {i}") for i, tokens in enumerate(prompts)]
    steps += [do("drain"), do("state", "end")]
    for mode in ("sync", "async"):
        story = run_scenario(steps, {**CACHE, "onboard": mode}, small)
        assert [story.tokens(f"cold {i}")[0] for i in range(4)] == wanted
        assert all(all(blocks) for blocks in story["held"])
        assert [story.tokens(f"host hit {i}")[0] for i in range(4)] == wanted
        assert story["end"]["onboarded"] == 4 * 12


def test_a_request_waits_a_moment_for_blocks_that_are_being_stored(run_scenario, baseline):
    """And no longer: a store that does not end costs the request a quarter of a second, not its answer."""
    steps = [
        do("hold_stores"),
        generate(PROMPT),
        do("reset"),
        generate(PROMPT, name="impatient"),
        do("state", "after"),
        do("mend"),
        do("drain"),
    ]
    story = run_scenario(steps, CACHE)
    assert story.tokens("impatient") == baseline([PROMPT])
    assert story["impatient"]["cached"] == [0]
    assert story["after"]["onboarded"] == 0
