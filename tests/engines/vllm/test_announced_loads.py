"""Steps that overlap: how many pass until a request that waits outside of the step is answered, and that none of them
computes on blocks which have not come. In counts of steps, with a copier that brings blocks as late as it may."""

from __future__ import annotations

import random
from collections import defaultdict
from types import SimpleNamespace

import pytest
from engines import numbers

from kvbm.plans import StepPlan, encode
from kvbm.transfer.base import Ticket, When
from kvbm.transfer.cpu import CpuCopier

pytestmark = pytest.mark.engine

STEP = 0.04
PROMPT = numbers(1, 41)


class Coming(Ticket):
    """As on a GPU: the blocks come in time, or before work that the device holds back for them, and not before those of
    earlier loads. The engine's thread sees the end in time, or if it waits itself."""

    def __init__(self, bus, line, steps, copy):
        self._bus, self._line, self._copy = bus, line, copy
        self.due = max([bus.now, *(ticket.due for ticket in line)]) + steps
        self._steps = steps
        self.has_come = self._is_over = False
        line.append(self)

    @property
    def seconds(self):
        return self._steps * STEP

    def come(self):
        while not self.has_come:
            first = self._line.pop(0)
            first.has_come = True
            first._copy()

    def wait(self):
        self.come()
        self._is_over = True

    def done(self):
        if self._bus.now >= self.due:
            self.wait()
        return self._is_over


@pytest.fixture
def bus(monkeypatch):
    """Brings a block in ``steps`` of a step. ``now`` counts steps."""
    bus = SimpleNamespace(now=0.0, steps=0.0, delay=lambda: 1.0, holds=True, held=0)
    lines = defaultdict(list)  # by copier: loads on their way
    load = CpuCopier.load

    def begin(copier, slots, blocks, after, when, tokens=0):
        line = lines[copier]
        if when is not When.LATER or not bus.steps:
            if line:
                line[-1].come()
            return load(copier, slots, blocks, after, when, tokens)
        steps = bus.steps * len(blocks) * bus.delay()
        return Coming(bus, line, steps, lambda: load(copier, slots, blocks, after, When.NOW))

    def hold(copier, tickets):
        for ticket in tickets:
            if isinstance(ticket, Coming):
                bus.held += not ticket.has_come
                if bus.holds:
                    ticket.come()
            else:
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


def announced(engine, name="returns", count=4, late=20):
    """An engine with a load that vLLM has heard of, and that is later than it was announced."""
    engine.add(name, PROMPT, count)
    worker = engine.ranks[0].connector._adapter._worker
    while not worker.announcements._announced:
        engine.turn()
    for load in worker._loads.values():
        for part in load.parts:
            part.ticket.due += late


def test_a_request_may_be_answered_before_its_load_is_seen_to_end(make, bus):
    """vLLM goes on stepping until its slots are free."""
    engine = make()
    announced(engine, count=1)
    engine.abort("others")
    engine.run()
    engine.check()
    engine.check_idle()


@pytest.mark.parametrize("what", ["a garbled plan", "an adapter that cannot be loaded"])
def test_a_step_waits_whatever_is_wrong_with_its_plan(what, make, bus, monkeypatch):
    from kvbm.engines.vllm.connector import DynamoConnectorMetadata

    engine = make()
    announced(engine)
    connector = engine.ranks[0].connector
    metadata = DynamoConnectorMetadata(b"\xc1")
    if what != "a garbled plan":
        metadata = DynamoConnectorMetadata(encode(StepPlan(wanted=[b"\xc1"])))
        monkeypatch.setattr(connector._adapter, "load_adapters", lambda wanted: 1 / 0)
    assert not bus.held
    connector.handle_preemptions(metadata)
    assert bus.held
    connector.bind_connector_metadata(metadata)
    connector.clear_connector_metadata()
    assert sum(connector._faults.counts.values()) == 1
    engine.run()
    engine.check()


@pytest.mark.parametrize("second_runner", [False, True], ids=["runner1", "runner2"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_no_answer_is_wrong_and_no_request_waits_for_ever(seed, ranks, second_runner, make_clockwork, bus):
    """Every load is announced as soon as it may be, on each rank in its own time, and comes late or never begins. vLLM
    has too little room, requests are aborted, and both caches are emptied meanwhile."""
    chance = random.Random(seed)
    engine = make_clockwork({"onboard": "async"}, blocks=40, ranks=ranks, second_runner=second_runner)
    workers = [rank.connector._adapter._worker for rank in engine.ranks]
    made = []
    for worker in workers:
        worker.announcements.steps_ahead, worker.announcements._block_seconds = 1000.0, 1e-6
        make = worker.announcements.make
        worker.announcements.make = lambda *what, make=make: made.append(make(*what)) or made[-1]
    poll = workers[0].poll

    def tick():
        bus.now += 1
        return poll()

    workers[0].poll = tick
    bus.delay = lambda: chance.choice([0.1, 1.0, 1.0, 10.0])
    submit = CpuCopier.load

    def load(copier, slots, blocks, after, when, tokens=0):
        if when is When.LATER and chance.random() < 0.05:
            raise OSError("no load")
        return submit(copier, slots, blocks, after, when, tokens)

    CpuCopier.load = load  # the bus takes it back
    bus.steps = 0.3
    prompts = [numbers(i, 37 + i) for i in range(4)]
    for turn in range(500):
        what, names = chance.random(), list(engine._wanted)
        if what < 0.2 and len(engine.scheduler.requests) < 7:
            prompt = chance.choice(prompts)
            prompt = prompt[: chance.choice([20, len(prompt)])] + numbers(turn, chance.choice([0, 5]))
            engine.add(f"r{turn}", prompt, chance.choice([1, 2, 8, 20]))
        elif what < 0.24 and names and names[-1] in engine.scheduler.requests:
            engine.abort(names[-1])
        elif what < 0.4:
            engine.scheduler.reset_prefix_cache(reset_connector=what < 0.25)
        engine.turn()
    engine.run()
    engine.check()
    engine.check_idle()
    assert sum(map(len, made)) > 5
    assert bus.held
    assert not engine.adapter.unheard
    assert not any(worker.announcements._announced for worker in workers)


@pytest.mark.parametrize("why", ["steps do not overlap", "several groups"])
def test_where_a_step_could_come_too_early_nothing_is_announced(why, make_clockwork):
    options = {"overlap": False} if why == "steps do not overlap" else {"windows": (0, 8)}
    engine = make_clockwork({}, **options)
    assert engine.ranks[0].connector._adapter._worker.announcements.steps_ahead == 0.0


def test_beside_another_connector_nothing_is_announced(model):
    """It may write to blocks that vLLM has taken back, without regard to the order of steps."""
    import torch
    from clockwork import BLOCK, LAYERS, make_cache, make_config, meet
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    config = make_config(model, {})
    config.scheduler_config.async_scheduling = True
    ours = {
        "kv_connector": "DynamoConnector",
        "kv_connector_module_path": "kvbm.vllm_integration.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_cache_override_num_blocks": 8},
    }
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": [ours, ours]}
    )
    wrapper = MultiConnector(config, KVConnectorRole.WORKER, make_cache([0], 8))
    try:
        wrapper.register_kv_caches({f"{name}.0": torch.zeros((8, BLOCK), dtype=torch.int64) for name in LAYERS})
        meet(wrapper)
        assert wrapper._connectors[0]._adapter._worker.announcements.steps_ahead == 0.0
    finally:
        wrapper.shutdown()
