"""Layers with a sliding window beside layers without: vLLM keeps them in groups of blocks, and each comes back."""

from __future__ import annotations

import random
import sys

import pytest
from engines import PROJECT, do, generate

sys.path.insert(0, str(PROJECT / "scripts"))

from random_models import Windowed, model_folder

pytestmark = [pytest.mark.engine, pytest.mark.matrix]

BLOCK, WINDOW = 32, 128
MODEL = Windowed("windowed", 7, 128, 4, 2, 32, 256, 4096, "float32", WINDOW)
CACHE = {"cpu_cache_override_num_blocks": 2048}
GROUPS = 4  # of two layers: one sees everything, and of five with a window one is left over


def tokens(seed, count):
    source = random.Random(seed)
    return [source.randrange(100, MODEL.vocab) for _ in range(count)]


LONG, SHORT = tokens(1, 700), tokens(2, 100)
TURNED_OFF = LONG[:400] + tokens(3, 100)  # another question after the same beginning


def pieces(*prompts):
    """Blocks that come back for these: of every group what its layers see from the last whole block on."""
    count = 0
    for prompt in prompts:
        end = (len(prompt) - 1) // BLOCK
        first = max(0, end * BLOCK - WINDOW + 1) // BLOCK
        count += end + (GROUPS - 1) * (end - first)
    return count


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return {
        "model": str(model_folder(MODEL, tmp_path_factory.mktemp("models"))),
        "skip_tokenizer_init": True,
        "block_size": BLOCK,
        "max_num_batched_tokens": 256,  # a long prompt comes in parts, and leaves blocks behind while it does
    }


@pytest.fixture(scope="module")
def apart():
    """Whether this release of vLLM keeps the groups apart with a connector."""
    compat = pytest.importorskip("kvbm.engines.vllm.compat")
    return compat.fails_whole_requests()


@pytest.fixture(scope="module")
def story(run_scenario, engine):
    steps = [
        generate(LONG, name="cold long"),
        generate(SHORT, name="cold short"),
        do("drain"),
        do("state", "kept"),
        do("reset", "reset"),
        generate(LONG, name="long"),
        do("drain"),
        do("state", "after long"),
        do("reset"),
        generate(LONG, SHORT, TURNED_OFF, name="at once"),
        do("drain"),
        do("state", "after all"),
        do("reset"),
        do("faults", rules="zeros"),
        generate(LONG, name="zeros"),
        do("drain"),
        do("faults", rules=""),
        do("reset", "forgotten", connector=True),
        do("state", "end"),
        do("metrics", "metrics"),
    ]
    return run_scenario(steps, dict(CACHE), engine)


def test_what_the_engine_has_forgotten_comes_back(story, baseline, engine):
    long, short, turned_off = baseline([LONG, SHORT, TURNED_OFF], engine=engine)
    assert story["reset"] is True
    assert (story.tokens("cold long"), story.tokens("cold short"), story.tokens("long")) == ([long], [short], [long])
    assert story.tokens("at once") == [long, short, turned_off]
    assert story["long"]["cached"] == [21 * BLOCK]
    assert story["at once"]["cached"] == [21 * BLOCK, 3 * BLOCK, 12 * BLOCK]


def test_of_layers_with_a_window_only_the_window_comes_back(story, apart):
    if not apart:
        pytest.skip("with a connector this release makes one group of all layers")
    assert story["kept"]["published"] == GROUPS * ((700 + 15) // BLOCK + (100 + 15) // BLOCK)
    assert story["after long"]["onboarded"] == pieces(LONG) == 21 + 3 * 4
    again = story["after all"]["onboarded"] - story["after long"]["onboarded"]
    assert again == pieces(LONG, SHORT, TURNED_OFF[: 12 * BLOCK + 1])


def test_wrong_blocks_would_be_seen(story):
    assert story.tokens("zeros") != story.tokens("long")


def test_nothing_is_left_under_way(story):
    end = story["end"]
    assert story["forgotten"] is True
    assert (end["published"], end["requests"], end["pinned"], end["writing"], end["busy"]) == (0, 0, 0, 0, False)
    assert end["faults"] == {}
    assert not [message for level, message in story.log if level != "INFO"]


def test_a_lost_load_is_computed_again(run_scenario, baseline, engine):
    steps = [
        generate(LONG),
        generate(SHORT),
        do("drain"),
        do("reset"),
        generate(LONG, SHORT, name="lost"),
        do("drain"),
        do("reset"),
        generate(LONG, SHORT, name="again"),
        do("drain"),
        do("state", "end"),
    ]
    lost = run_scenario(steps, {**CACHE, "inject_faults": "load:every=11"}, engine)
    assert lost.tokens("lost") == lost.tokens("again") == baseline([LONG, SHORT], engine=engine)
    end = lost["end"]
    assert end["failed_load_blocks"] > 1
    assert (end["requests"], end["pinned"], end["writing"], end["busy"]) == (0, 0, 0, False)


def test_a_load_that_cannot_be_planned_is_computed(run_scenario, baseline, engine):
    steps = [
        generate(LONG),
        do("drain"),
        do("reset"),
        do("break_", target="kvbm.runtime.leader:Leader.onboard", times=1),
        generate(LONG, name="unplanned"),
        do("drain"),
        do("mend"),
        do("reset"),
        generate(LONG, name="again"),
        do("drain"),
        do("state", "end"),
    ]
    story = run_scenario(steps, dict(CACHE), engine)
    assert story.tokens("unplanned") == story.tokens("again") == baseline([LONG], engine=engine)
    end = story["end"]
    assert sum(end["faults"].values()) >= 1
    assert (end["requests"], end["pinned"], end["writing"], end["busy"]) == (0, 0, 0, False)


def test_where_blocks_are_short_everybody_gets_his_own(run_scenario, baseline, engine, apart):
    """Requests are preempted and come back, blocks go from group to group and from one request to the next while they
    are still being copied out."""
    if not apart:
        pytest.skip("with a connector this release makes one group of all layers, for which there is room")
    prompts = [LONG[: 100 * i] + tokens(10 + i, 60 + 17 * i) for i in range(1, 7)]
    steps = [generate(*(prompts[i:] + prompts[:i]), name=str(i), max_tokens=24) for i in range(6)]
    story = run_scenario(
        [*steps, do("drain"), do("state", "end")],
        {"cpu_cache_override_num_blocks": 120, "inject_faults": "slow-store:every=2"},
        {**engine, "num_gpu_blocks_override": 120},
    )
    wanted = baseline(prompts, 24, engine)
    for i in range(6):
        assert story.tokens(str(i)) == wanted[i:] + wanted[:i]
    end = story["end"]
    assert end["onboarded"] > 0
    assert end["evictions"] > 0
    assert (end["requests"], end["pinned"], end["writing"], end["busy"], end["faults"]) == (0, 0, 0, False, {})


def test_guessed_tokens_that_were_wrong_are_kept_in_no_group(run_scenario, baseline, engine, apart):
    """Guesses by earlier tokens need no draft model. Blocks of wrong ones are filled, and a window may pass over them
    before their tokens are known."""
    if not apart:
        pytest.skip("with a connector this release makes one group of all layers")
    speculation = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    first = tokens(3, 40) * 5
    options = {"allowed_token_ids": first[:40]}  # whatever is said has been said before: there is always a guess
    (said,) = baseline([first], 120, engine, **options)
    turn = first + said + tokens(5, 5)
    (turned,) = baseline([turn], 60, engine, **options)
    steps = [
        generate(first, name="cold", max_tokens=120, **options),
        do("metrics", "metrics"),
        do("drain"),
        do("reset"),
        generate(turn, name="turn", max_tokens=60, **options),
        do("drain"),
        do("state", "end"),
    ]
    story = run_scenario(steps, dict(CACHE), {**engine, "speculative_config": speculation})
    drafted, accepted = (story["metrics"][f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted"))
    assert drafted > accepted > 0
    assert [story.tokens(name) for name in ("cold", "turn")] == [[said], [turned]]
    assert story["turn"]["cached"][0] >= 9 * BLOCK  # the answer's blocks, too
    assert story["end"]["faults"] == {}


def test_the_next_engine_finds_them_on_disk(run_scenario, baseline, engine, tmp_path):
    kvbm = {
        "cpu_cache_override_num_blocks": 100,
        "disk_cache_override_num_blocks": 1024,
        "disk_cache_gb": 1,
        "disk_cache_dir": str(tmp_path),
        "disable_disk_offload_filter": True,
    }
    first = run_scenario(
        [generate(LONG), generate(SHORT), do("drain"), do("state", "end")],
        kvbm,
        engine,
    )
    assert first["end"]["spilled"] > 0
    second = run_scenario(
        [generate(LONG, name="long"), generate(SHORT, name="short"), do("drain"), do("state", "end")], kvbm, engine
    )
    wanted = baseline([LONG, SHORT], engine=engine)
    assert second.tokens("long") + second.tokens("short") == wanted
    assert second["long"]["cached"] == [21 * BLOCK]
    assert second["end"]["from_disk"] > 0
    assert second["end"]["faults"] == {}
