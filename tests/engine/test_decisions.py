"""Load or recompute, in vLLM's scheduler: what is decided is done, counted and learned from. See clockwork.py."""

from __future__ import annotations

import pytest
from engines import numbers

from kvbm.core.cost import NEVER, RECOMPUTE
from kvbm.plans import Tier

pytestmark = pytest.mark.engine

PROMPT = numbers(1, 42)


@pytest.fixture
def make_engine(make_clockwork):
    return make_clockwork


def ask_twice(engine):
    engine.add("first", PROMPT)
    engine.run()
    engine.forget()
    engine.add("second", PROMPT)
    engine.run()
    engine.check()
    engine.check_idle()


def believe(engine, load_seconds, token_seconds=None):
    """Teach it that host memory takes so long to bring anything, and the engine so long to compute a token."""
    for _ in range(60):
        engine.half._cost.observe_load(Tier.HOST, 1, load_seconds)
        if token_seconds is not None:
            engine.half._cost.observe_prefill(1000, 1000 * token_seconds)


@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "overlapping"])
def test_what_recomputing_beats_is_computed_and_counted_once(overlap, make_engine):
    engine = make_engine({"load": "auto"}, overlap=overlap)
    believe(engine, load_seconds=30.0)
    ask_twice(engine)
    assert engine.onboarded == 0
    assert engine.counts.refused_load_blocks == {RECOMPUTE: 10}
    assert engine.counts.matched_tokens == 0


def test_what_beats_recomputing_is_loaded(make_engine):
    engine = make_engine({"load": "auto"})
    believe(engine, load_seconds=1e-6)
    ask_twice(engine)
    assert engine.onboarded == 10
    assert engine.counts.refused_load_blocks == {}


def test_never_means_never(make_engine):
    engine = make_engine({"load": "never"})
    believe(engine, load_seconds=1e-6)
    ask_twice(engine)
    assert engine.onboarded == 0
    assert engine.counts.refused_load_blocks == {NEVER: 10}


def test_always_means_always(make_engine):
    engine = make_engine({"load": "always"})
    believe(engine, load_seconds=30.0)
    ask_twice(engine)
    assert engine.onboarded == 10


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "overlapping"])
def test_loads_and_steps_teach_what_they_took(overlap, ranks, make_engine):
    engine = make_engine({"load": "always"}, overlap=overlap, ranks=ranks)
    cost = engine.half._cost
    ask_twice(engine)
    assert cost._step.count > 10
    assert cost._tiers[Tier.HOST].fixed.count + cost._tiers[Tier.HOST].byte.count == 3  # the priors and one load
    assert 0 < engine.counts.loaded_seconds[Tier.HOST] < 30
    block_bytes = 3 * 4 * 8 * ranks
    assert engine.counts.loaded_bytes == {Tier.HOST: 10 * block_bytes}
    assert engine.counts.stored_bytes[Tier.HOST] == engine.counts.offloaded_blocks * block_bytes
    assert not engine.half._steps._under_way


# -- several prompts at once ------------------------------------------------------------------------------------------

PROMPTS = {name: numbers(i, 42) for i, name in enumerate("abc")}


def ask_together(engine, max_tokens, load_seconds):
    """The loads of each step, (request, whether the step waits for it), when prompts come back all at once."""
    for name, prompt in PROMPTS.items():
        engine.add(name, prompt)
    engine.run()
    engine.forget()
    believe(engine, load_seconds, token_seconds=10.0)
    for name, prompt in PROMPTS.items():
        engine.add(f"{name} again", prompt, max_tokens)
    seen = []
    while engine.scheduler.has_requests():
        steps = engine.steps
        engine.turn()
        if engine.steps > steps and engine.ranks[0].plan.loads:
            seen.append([(load.request[0], load.in_step) for load in engine.ranks[0].plan.loads])
    engine.run()
    engine.check()
    engine.check_idle()
    assert engine.onboarded == 30
    return seen


@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "overlapping"])
def test_long_loads_of_prompts_that_end_with_their_step_have_a_step_each(overlap, make_engine):
    """The first prompt is answered while the second is on its way, and nobody who decodes is held up."""
    seen = ask_together(make_engine(overlap=overlap), max_tokens=1, load_seconds=30.0)
    assert seen == [[("a", True)], [("b", True)], [("c", True)]]


@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "overlapping"])
def test_beside_a_prompt_that_goes_on_long_loads_stay_outside_of_the_step(overlap, make_engine):
    seen = ask_together(make_engine(overlap=overlap), max_tokens=8, load_seconds=30.0)
    assert seen == [[("a", True), ("b", False), ("c", False)]]


@pytest.mark.parametrize("max_tokens", [1, 8])
def test_short_loads_share_a_step(max_tokens, make_engine):
    assert ask_together(make_engine(), max_tokens, load_seconds=1e-6) == [[("a", True), ("b", True), ("c", True)]]
