"""Load or recompute, in vLLM's scheduler: what is decided is done, counted and learned from. See clockwork.py."""

from __future__ import annotations

import random

import pytest

from kvbm.core.cost import NEVER, RECOMPUTE
from kvbm.plans import Tier

pytestmark = pytest.mark.engine

PROMPT = [random.Random(1).randrange(1000, 9000) for _ in range(42)]


@pytest.fixture
def make_engine(model, monkeypatch):
    pytest.importorskip("vllm")
    from clockwork import Clockwork  # imports vLLM, which takes seconds

    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    made = []

    def make(kvbm=None, **options):
        made.append(Clockwork(model, kvbm or {}, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def ask_twice(engine):
    engine.add("first", PROMPT)
    engine.run()
    engine.forget()
    engine.add("second", PROMPT)
    engine.run()
    engine.check()
    engine.check_idle()


def believe(engine, load_seconds):
    """Teach it that host memory takes so long to bring anything."""
    for _ in range(60):
        engine.half._cost.observe_load(Tier.HOST, 1, load_seconds)


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
