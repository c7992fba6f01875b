"""Steps that overlap: how many pass until a request that waits outside of the step is answered, and that none of them
computes on blocks which have not come. In counts of steps, with a copier that brings blocks when it is waited for, or
after so many steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from engines import numbers

from kvbm.engines.vllm import compat
from kvbm.transfer.base import Ticket, When
from kvbm.transfer.cpu import CpuCopier

pytestmark = pytest.mark.engine

STEP = 0.04
PROMPT = numbers(1, 41)


class Coming(Ticket):
    """Comes with the end of a step, or when it is waited for."""

    def __init__(self, bus, steps, copy):
        self._bus, self._copy = bus, copy
        self.due = max(bus.now, bus.free) + steps
        bus.free = self.due
        self._steps = steps
        self.has_come = False

    @property
    def seconds(self):
        return self._steps * STEP

    def wait(self):
        if not self.has_come:
            self._copy()
            self.has_come = True

    def done(self):
        if self._bus.now >= self.due:
            self.wait()
        return self.has_come


@pytest.fixture
def bus(monkeypatch):
    """Brings a block in ``steps`` of a step. ``now`` counts steps."""
    bus = SimpleNamespace(now=0.0, free=0.0, steps=0.0, holds=True, held=0)
    load = CpuCopier.load

    def begin(copier, slots, blocks, after, when, tokens=0):
        if when is not When.LATER or not bus.steps:
            return load(copier, slots, blocks, after, when, tokens)
        return Coming(bus, bus.steps * len(blocks), lambda: load(copier, slots, blocks, after, When.NOW))

    def hold(copier, tickets):
        bus.held += sum(not ticket.has_come for ticket in tickets)
        if bus.holds:
            for ticket in tickets:
                ticket.wait()

    monkeypatch.setattr(CpuCopier, "load", begin)
    monkeypatch.setattr(CpuCopier, "hold_step", hold)
    monkeypatch.setattr(CpuCopier, "can_hold_steps", True)
    monkeypatch.setattr(CpuCopier, "portion", 3)
    monkeypatch.setattr("kvbm.runtime.loads.time", SimpleNamespace(monotonic=lambda: bus.now * STEP))
    return bus


@pytest.fixture
def make(make_clockwork, bus, monkeypatch):
    """An engine whose clock is its count of steps, with others that decode all the while."""

    def make(ahead=0.9, holds=True):
        engine = make_clockwork({"onboard": "async"})
        worker = engine.ranks[0].connector._adapter._worker
        assert worker.announcements.steps_ahead == 0.9  # as vLLM's configuration has it
        worker.announcements.steps_ahead = ahead
        poll = worker.poll

        def tick():
            bus.now += 1  # the end of a step
            return poll()

        monkeypatch.setattr(worker, "poll", tick)
        engine.add("first", PROMPT, 4)
        engine.run()
        engine.forget()
        bus.steps, bus.holds = 0.15, holds  # a step and a half for ten blocks
        engine.add("others", numbers(2, 20), 150)
        for _ in range(12):
            engine.turn()
        return engine

    return make


def steps_to_first_token(engine, name):
    engine.add(name, PROMPT, 4)
    before = engine.steps
    while not engine.answers.get(name):
        engine.turn()
    return engine.steps - before


def test_an_announced_load_saves_its_request_a_step(make, bus):
    counts = {}
    for ahead in (0.0, 0.9):
        engine = make(ahead)
        counts[ahead] = steps_to_first_token(engine, "returns")
        engine.run()
        engine.check()
        assert engine.onboarded == 10
        engine.check_idle()
        bus.steps = 0.0
    assert counts[0.9] == counts[0.0] - 1


def test_a_step_waits_for_a_load_that_is_later_than_announced(make, bus):
    engine = make()
    engine.add("returns", PROMPT, 4)
    worker = engine.ranks[0].connector._adapter._worker
    while not worker.announcements._announced:
        engine.turn()
    for load in worker._loads.values():
        for part in load.parts:
            part.ticket.due += 100  # the bus has stopped
    engine.run()
    assert bus.held
    engine.check()
    engine.check_idle()


def test_the_check_sees_a_step_that_does_not_wait(make, bus):
    """The control."""
    engine = make(holds=False)
    engine.add("returns", PROMPT, 4)
    worker = engine.ranks[0].connector._adapter._worker
    while not worker.announcements._announced:
        engine.turn()
    for load in worker._loads.values():
        for part in load.parts:
            part.ticket.due += 20
    engine.run()
    with pytest.raises(AssertionError):
        engine.check()


def test_a_request_that_is_aborted_after_its_load_was_announced_leaves_nothing(make, bus):
    """vLLM gives its blocks to others as soon as it hears; their step waits for the load."""
    engine = make()
    engine.add("returns", PROMPT, 4)
    worker = engine.ranks[0].connector._adapter._worker
    while not worker.announcements._announced:
        engine.turn()
    for load in worker._loads.values():
        for part in load.parts:
            part.ticket.due += 20
    engine.abort("returns")
    for i in range(5):
        engine.add(f"new{i}", numbers(30 + i, 37), 4)
    engine.run()
    engine.check()
    engine.check_idle()
    assert not engine.adapter.unheard


@pytest.mark.parametrize("why", ["steps do not overlap", "several groups", "another connector beside it"])
def test_where_a_step_could_come_too_early_nothing_is_announced(why, make_clockwork):
    options = {"overlap": False} if why == "steps do not overlap" else {}
    options |= {"windows": (0, 8)} if why == "several groups" else {}
    engine = make_clockwork({}, **options)
    adapter = engine.ranks[0].connector._adapter
    if why != "another connector beside it":
        assert adapter._worker.announcements.steps_ahead == 0.0
        return
    beside = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector="PdConnector"),
        scheduler_config=SimpleNamespace(async_scheduling=True),
    )
    assert compat.steps_ahead(adapter._vllm_config, adapter._kv_cache_config) == 0.9
    assert compat.steps_ahead(beside, adapter._kv_cache_config) == 0.0
