"""Layers that keep a state beside attention: a prefix comes back with the KV of the one and the state of the other."""

from __future__ import annotations

import pytest
from engines import do, generate
from states import BLOCK, GDN, MAMBA, STATES, model_folder, tokens

pytestmark = [pytest.mark.engine, pytest.mark.matrix]

CACHE = {"cpu_cache_override_num_blocks": 2048}
LONG, SHORT, EXACT = tokens(1, 700), tokens(2, 100), tokens(4, 8 * BLOCK)
TURNED_OFF = LONG[:400] + tokens(3, 100)  # another question after the same beginning


@pytest.fixture(scope="module", params=[GDN, MAMBA], ids=lambda shape: shape.name)
def shape(request):
    return request.param


@pytest.fixture(scope="module")
def engine(shape, tmp_path_factory):
    return {
        "model": str(model_folder(shape, tmp_path_factory.mktemp("models"))),
        "dtype": shape.dtype,
        "skip_tokenizer_init": True,
        "block_size": BLOCK,
        "max_num_batched_tokens": 256,  # a long prompt comes in parts; vLLM saves the state at the end of each
    }


@pytest.fixture(scope="module", autouse=True)
def offered():
    """States are offered since vLLM 0.30."""
    compat = pytest.importorskip("kvbm.engines.vllm.compat")
    if not compat.fails_whole_requests():
        pytest.skip("this release of vLLM offers no states to connectors")


def blank(prompt, states, name=None):
    return do("call", name, target="states:blank", prompt=prompt, states=states)


def held(prompt, states, name):
    return do("call", name, target="states:held", prompt=prompt, states=states)


@pytest.fixture(scope="module")
def story(run_scenario, engine):
    steps = [
        generate(LONG, name="cold long"),
        generate(SHORT, name="cold short"),
        generate(EXACT, name="cold exact"),
        do("drain"),
        held(LONG, True, "states"),
        held(LONG, False, "kv"),
        do("reset", "reset"),
        generate(LONG, name="long"),
        do("drain"),
        do("state", "after long"),
        do("reset"),
        generate(LONG, SHORT, TURNED_OFF, EXACT, name="at once"),
        do("drain"),
        do("reset"),
        blank(LONG, True, "blank states"),
        generate(LONG, name="without state"),
        do("drain"),
        do("reset", connector=True),
        generate(LONG),
        do("drain"),
        do("reset"),
        blank(LONG, False, "blank kv"),
        generate(LONG, name="without kv"),
        do("drain"),
        do("reset", "forgotten", connector=True),
        do("state", "end"),
    ]
    return run_scenario(steps, dict(CACHE), engine)


def test_what_the_engine_has_forgotten_comes_back(story, baseline, engine):
    long, short, turned_off, exact = baseline([LONG, SHORT, TURNED_OFF, EXACT], engine=engine)
    assert story["reset"] is True
    assert [*story.tokens("cold long"), *story.tokens("cold short"), *story.tokens("cold exact")] == [long, short, exact]
    assert story.tokens("long") == [long]
    assert story.tokens("at once") == [long, short, turned_off, exact]
    assert story["long"]["cached"] == [21 * BLOCK]
    print(story["at once"]["cached"], story["states"], story["kv"], story["after long"])


def test_a_prefix_needs_one_state_of_each_group(story, shape):
    assert story["after long"]["onboarded"] == 21 + STATES[shape.name]


def test_a_lost_state_and_lost_kv_would_be_seen(story):
    assert story["blank states"] > 0
    assert story["blank kv"] > 0
    assert story.tokens("without state") != story.tokens("long")
    assert story.tokens("without kv") != story.tokens("long")


def test_nothing_is_left_under_way(story):
    end = story["end"]
    assert story["forgotten"] is True
    assert (end["published"], end["requests"], end["pinned"], end["writing"], end["busy"]) == (0, 0, 0, 0, False)
    assert end["faults"] == {}
    assert not [message for level, message in story.log if level != "INFO"]
