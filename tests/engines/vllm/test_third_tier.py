"""A keyed tier that one folder under tests/ adds, under a real vLLM: whatever it does, no token changes for it."""

from __future__ import annotations

import pytest
from engines import do, generate, prompt

pytestmark = pytest.mark.engine

PROMPTS = [prompt(300 + i, 200) for i in range(6)]
BLOCKS = 6  # of a prompt that a load can bring
ADDED = {"toy_tier.plugin:REGISTERED": True, "toy_tier:SIZE": 200, "toy_tier.catalog:LOOKUP_SECONDS": 60.0}


def toy(what, name=None, **arguments):
    return do("call", name, target=f"toy_tier.plugin:{what}", **arguments)


def test_a_tier_that_a_folder_adds_keeps_every_token(run_scenario, baseline):
    first, corrupt, failing, silent, refused, _ = PROMPTS
    steps = [
        *(step for i, each in enumerate(PROMPTS[:4]) for step in (generate(each, name=f"cold {i}"), do("drain"))),
        toy("state", "stored"),
        # The leader has to ask, and vLLM comes again until it knows.
        toy("forget"),
        generate(first, name="again"),
        do("drain"),
        toy("state", "loaded"),
        do("metrics", "metrics"),
        do("command", "status", command={"do": "status"}),
        # Blocks that arrive corrupt are verified, refused and computed.
        toy("forget"),
        toy("configure", corrupts=True),
        generate(corrupt, name="corrupt"),
        do("drain"),
        toy("state", "refused"),
        toy("configure", corrupts=False, fails=["read", "write"]),
        # A server that fails.
        toy("forget"),
        generate(failing, refused, name="failing"),
        do("drain"),
        toy("state", "failed"),
        # A server that never answers: the deadline of a lookup passes.
        toy("configure", fails=[], silent=True),
        toy("set_patience", seconds=0.2),
        toy("forget"),
        generate(silent, name="silent"),
        do("drain"),
        toy("state", "end"),
        do("state", "leader"),
    ]
    story = run_scenario(steps, {"cpu_cache_override_num_blocks": 100}, patch=ADDED)
    wanted = baseline(PROMPTS[:5])
    assert [story.tokens(f"cold {i}")[0] for i in range(4)] == wanted[:4]
    assert [story.tokens(name)[0] for name in ("again", "corrupt")] == wanted[:2]
    assert story.tokens("failing") == [wanted[2], wanted[4]]
    assert story.tokens("silent") == [wanted[3]]

    stored, loaded, rejected, failed, end = (story[name] for name in ("stored", "loaded", "refused", "failed", "end"))
    assert stored["stored"] == stored["moved"] >= 4 * BLOCKS
    assert stored["loaded"] == 0
    assert loaded["loaded"] == BLOCKS
    assert loaded["pending"] > 0
    assert loaded["failed_loads"] == 0
    assert (rejected["loaded"], rejected["failed_loads"]) == (BLOCKS, BLOCKS)
    assert (failed["loaded"], failed["failed_loads"]) == (BLOCKS, 2 * BLOCKS)
    assert failed["failed_moves"] >= BLOCKS
    assert end["loaded"] == BLOCKS
    assert end["pending"] > failed["pending"]
    assert story["leader"]["requests"] == story["leader"]["pinned"] == story["leader"]["writing"] == 0
    assert not story["leader"]["busy"]
    # Seen from outside by its name, without a line of code for it.
    assert story["metrics"]["kvbm_transfer_blocks toy device"] == BLOCKS
    assert story["metrics"]["kvbm_transfer_blocks host toy"] == stored["moved"]
    assert "toy" in story["status"]["pools"]
    assert story.said("toy blocks")
