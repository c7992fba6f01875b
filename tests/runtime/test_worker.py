"""The worker: every plan ends in a report, whatever the copier does."""

from __future__ import annotations

import pytest

from kvbm.plans import AdapterUse, Copy, LoadPlan, MovePlan, MoveResult, StepPlan, StorePlan
from kvbm.runtime import loads
from kvbm.runtime.worker import Worker
from kvbm.tiers.base import Operation, Store
from kvbm.tiers.staged_read import StagedStore
from kvbm.transfer.base import Copier, Ticket, When
from tiernames import DISK, HOST, OBJECT


class FakeTicket(Ticket):
    def __init__(self, over=True, bad=(), reason="", seconds=0.0):
        self.over = over
        self._bad, self._reason, self._seconds = bad, reason, seconds
        self.waited = False

    def done(self):
        return self.over

    def wait(self):
        self.waited = self.over = True

    @property
    def bad(self):
        return self._bad

    @property
    def reason(self):
        return self._reason

    @property
    def seconds(self):
        return self._seconds


class FakeCopier(Copier):
    name = "fake"

    def __init__(self):
        self.calls = []
        self.ticket = FakeTicket()
        self.awaited = True
        self.fails = set()

    def _call(self, what, *details):
        self.calls.append((what, *details))
        if what in self.fails:
            raise OSError(f"{what} broke")

    def begin_step(self, tickets):
        self._call("begin_step", list(tickets))

    def prefetch(self, slots, tokens=0):
        self._call("prefetch", list(slots), tokens)
        return True

    def end_prefetch(self):
        self._call("end_prefetch")

    def load(self, slots, blocks, after, when, tokens=0):
        self._call("load", list(slots), list(blocks), list(after), when)
        return self.ticket

    def wait_layer(self, layer):
        self._call("wait_layer", layer)

    def end_load(self, ticket):
        self._call("end_load")
        return self.awaited

    def store(self, blocks, slots):
        self._call("store", list(blocks), list(slots))
        return self.ticket

    def scribble(self, blocks):
        self._call("scribble", blocks)

    def close(self):
        self._call("close")


@pytest.fixture
def copier():
    return FakeCopier()


class Clock:
    now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("kvbm.runtime.loads.time", clock)
    return clock


@pytest.fixture
def worker(copier, clock):
    return Worker(0, copier, HOST, 100, num_blocks=50)


def load(id=1, slots=(5, 6), blocks=(7, 8), in_step=False, layered=False, after=()):
    return LoadPlan(id, f"request-{id}", [Copy(HOST, list(slots), list(blocks))], in_step, list(after), layered)


def store(id=9, slots=(1,), blocks=(2,)):
    return StorePlan(id, Copy(HOST, list(slots), list(blocks)))


def step(worker, *loads, stores=(), fences=()):
    plan = StepPlan(list(loads), list(stores), list(fences))
    worker.begin(plan)
    worker.start_loads(plan)
    worker.start_stores(plan)
    return worker.poll()


def test_a_load_outside_the_step_is_reported_when_it_is_over(worker, copier):
    copier.ticket = FakeTicket(over=False)
    assert not step(worker, load()).report
    copier.ticket.over = True
    outcome = worker.poll()
    assert outcome.arrived == {"request-1"}
    assert outcome.report.loads[0].bad == []
    assert not worker.poll().report


def test_a_load_outside_the_step_begins_when_the_step_has_been_submitted(worker, copier):
    plan = StepPlan([load(id=1), load(id=2, in_step=True)], [store()])
    worker.begin(plan)
    worker.start_loads(plan)
    worker.start_stores(plan)
    assert [call[0] for call in copier.calls].count("load") == 1  # what the step itself waits for
    worker.poll()
    assert [call[0] for call in copier.calls].count("load") == 2
    worker.poll()
    assert [call[0] for call in copier.calls].count("load") == 2


def test_blocks_that_did_not_arrive_are_named_to_engine_and_leader(worker, copier):
    copier.ticket = FakeTicket(bad=[1], reason="disk on fire")
    outcome = step(worker, load())
    assert outcome.bad_blocks == {8}
    assert outcome.arrived == {"request-1"}
    assert outcome.report.loads[0].bad == [1]
    assert outcome.report.faults == {"load: disk on fire": 1}


def test_loads_of_one_step_go_as_one_transfer_and_fail_one_by_one(worker, copier):
    copier.ticket = FakeTicket(bad=[2])
    outcome = step(worker, load(1, (1, 2), (11, 12), True, True), load(2, (3, 4), (13, 14), True, True))
    loads = [call for call in copier.calls if call[0] == "load"]
    assert loads == [("load", [1, 2, 3, 4], [11, 12, 13, 14], [], When.BY_LAYER)]
    assert {result.id: result.bad for result in outcome.report.loads} == {1: [], 2: [0]}
    assert outcome.bad_blocks == {13}
    assert not outcome.arrived  # the engine did not wait for them


def test_loads_that_go_as_one_transfer_share_its_time(worker, copier):
    copier.ticket = FakeTicket(seconds=4.0)
    outcome = step(worker, load(1, (1, 2, 5), (11, 12, 15), True), load(2, (3,), (13,), True))
    assert {result.id: result.seconds for result in outcome.report.loads} == {1: 3.0, 2: 1.0}
    (result,) = step(worker, stores=[store()]).report.stores
    assert result.seconds == 4.0


def test_a_layer_that_never_waited_spoils_the_load_in_that_very_step(worker, copier):
    copier.awaited = False
    copier.ticket = FakeTicket(over=False)
    outcome = step(worker, load(in_step=True, layered=True))
    assert copier.ticket.waited  # nothing may still be written to blocks the engine is told to recompute
    assert outcome.bad_blocks == {7, 8}
    assert outcome.report.faults == {"load: a layer was computed without waiting for its blocks": 1}


def test_a_load_that_cannot_be_started_has_failed(worker, copier):
    copier.fails = {"load"}
    outcome = step(worker, load(1), load(2, (3,), (4,), in_step=True))
    assert outcome.bad_blocks == {7, 8, 4}
    assert outcome.arrived == {"request-1"}


def test_a_load_under_way_fails_when_the_weights_change(worker, copier):
    copier.ticket = FakeTicket(over=False)
    step(worker, load())
    worker.weights_changed()
    copier.ticket.over = True
    outcome = worker.poll()
    assert (outcome.arrived, outcome.failed, outcome.bad_blocks) == ({"request-1"}, {"request-1"}, {7, 8})


def test_nothing_that_was_fetched_ahead_outlives_a_refused_load(worker, copier):
    """Its slots may hold other blocks when a later load names them."""
    worker.prefetch([5, 6], 0)
    worker.refuse([1])
    step(worker, load())
    assert [call[0] for call in copier.calls] == ["prefetch", "begin_step", "end_prefetch"]


def test_nothing_that_was_fetched_ahead_outlives_the_weights(worker, copier):
    worker.prefetch([5, 6], 0)
    worker.weights_changed()
    assert copier.calls[-1][0] == "end_prefetch"
    copier.fails = {"end_prefetch"}
    worker.weights_changed()
    assert any("end_prefetch broke" in fault for fault in worker.poll().report.faults)


@pytest.mark.parametrize("in_step", [True, False])
def test_a_load_and_a_store_that_are_refused_move_nothing(in_step, worker, copier):
    """Nothing is known against the blocks that were to be loaded: they may be found again."""
    worker.refuse([1, 9], blocks=[30])
    outcome = step(worker, load(1, in_step=in_step), stores=[store(9)])
    assert not [call for call in copier.calls if call[0] in ("load", "store")]
    assert outcome.bad_blocks == {7, 8, 30}
    assert [(result.bad, result.missed) for result in outcome.report.loads] == [([], [0, 1])]
    assert [(result.id, result.ok) for result in outcome.report.stores] == [(9, False)]
    assert outcome.failed == (set() if in_step else {"request-1"})
    assert step(worker, load(2, in_step=True), stores=[store(10)]).bad_blocks == set()


def test_a_fence_that_fails_spoils_what_it_protected(worker, copier):
    copier.ticket = FakeTicket(over=False)
    step(worker, stores=[store()])
    copier.fails = {"begin_step"}
    outcome = step(worker, load(), fences=[9])
    assert outcome.bad_blocks == {7, 8}
    copier.ticket.over = True
    (result,) = worker.poll().report.stores
    assert (result.id, result.ok) == (9, False)


@pytest.mark.parametrize(
    ("slots", "blocks"),
    [((100, 1), (1, 2)), ((-1, 1), (1, 2)), ((1, 2), (50, 1)), ((1, 2), (1, -1)), ((1,), (1, 2)), ((), ())],
    ids=["slot too high", "negative slot", "block too high", "negative block", "unequal", "empty"],
)
def test_a_plan_outside_of_the_cache_moves_nothing(worker, copier, slots, blocks):
    outcome = step(worker, load(1, slots, blocks), stores=[store(9, slots, blocks)])
    assert not [call for call in copier.calls if call[0] in ("load", "store")]
    assert outcome.bad_blocks == set(blocks)
    assert [(result.id, result.ok) for result in outcome.report.stores] == [(9, False)]


def test_stores_are_reported_with_what_became_of_them(worker, copier):
    copier.ticket = FakeTicket(bad=[0], reason="no")
    (result,) = step(worker, stores=[store()]).report.stores
    assert not result.ok
    copier.ticket = FakeTicket()
    (result,) = step(worker, stores=[store(10)]).report.stores
    assert result.ok


def test_a_store_whose_blocks_somebody_else_will_write_is_waited_for(worker, copier):
    """A fence holds back the engine's stream only; a transport of another connector heeds none."""
    copier.ticket = reading = FakeTicket(over=False)
    step(worker, stores=[store()])
    copier.ticket = FakeTicket()
    worker.begin(StepPlan(drain_stores=[78]))
    assert not reading.waited
    worker.begin(StepPlan(drain_stores=[9, 78]))
    assert reading.waited


def test_fences_and_orders_reach_the_copier_as_tickets(worker, copier):
    copier.ticket = reading = FakeTicket(over=False)
    step(worker, stores=[store()])
    copier.ticket = FakeTicket()
    step(worker, load(after=[9, 77]), fences=[9, 78])
    assert ("begin_step", [reading]) in copier.calls
    assert ("load", [5, 6], [7, 8], [reading], When.LATER) in copier.calls


def test_layers_are_waited_for_only_while_a_load_needs_it(worker, copier):
    plan = StepPlan([load(in_step=True, layered=True)])
    worker.wait_layer("a")
    worker.begin(plan)
    worker.start_loads(plan)
    worker.wait_layer("b")
    worker.start_stores(plan)
    worker.wait_layer("c")
    assert [call for call in copier.calls if call[0] == "wait_layer"] == [("wait_layer", "b")]


def test_a_load_started_early_is_not_started_again_and_ends_with_its_step(worker, copier):
    early = load(in_step=True, layered=True)
    worker.start_early(early)
    worker.start_stores(StepPlan())  # the step before ends first: not this load's business
    assert not worker.poll().report
    outcome = step(worker, early)
    assert len([call for call in copier.calls if call[0] == "load"]) == 1
    assert len([call for call in copier.calls if call[0] == "end_load"]) == 1
    assert [result.bad for result in outcome.report.loads] == [[]]


def test_a_load_outside_the_step_may_be_started_early_too(worker, copier):
    early = load(in_step=False)
    worker.start_early(early)
    assert copier.calls[-1] == ("load", [5, 6], [7, 8], [], When.LATER)
    outcome = step(worker, early)
    assert [call[0] for call in copier.calls].count("load") == 1
    assert outcome.arrived == {"request-1"}


def test_a_load_outside_the_step_begins_before_the_forward_pass_of_a_long_step(worker, copier):
    plan = StepPlan([load(in_step=False)])
    worker.begin(plan)
    assert copier.calls == [("begin_step", []), ("load", [5, 6], [7, 8], [], When.LATER)]
    worker.start_loads(plan)
    worker.start_stores(plan)
    assert worker.poll().arrived == {"request-1"}
    assert len(copier.calls) == 2


@pytest.mark.parametrize(("took", "ahead"), [(0.006, 0), (0.04, 1)])
def test_beside_short_steps_it_does_not_keep_the_forward_pass_waiting(took, ahead, worker, copier, clock):
    worker.poll()
    clock.now += took
    worker.poll()
    worker.begin(StepPlan([load(in_step=False)]))
    assert [call[0] for call in copier.calls].count("load") == ahead


def test_what_a_step_waits_for_comes_before_what_it_does_not(worker, copier):
    outside, inside = load(in_step=False), load(id=2, in_step=True, layered=True)
    worker.begin(StepPlan([outside, inside]))
    assert copier.calls == [("begin_step", [])]
    worker.start_early(inside)
    worker.begin(StepPlan([outside, inside]))
    assert [call[-1] for call in copier.calls if call[0] == "load"] == [When.BY_LAYER, When.LATER]


def test_a_load_that_the_step_may_refuse_does_not_begin_before_it(worker, copier):
    worker.begin(StepPlan([load()], adapters=[AdapterUse(1, 1, loads=[1])]))
    assert copier.calls == [("begin_step", [])]


@pytest.mark.parametrize("slots", [[-1, -1], [5, 100]])
def test_slots_that_are_none_are_not_fetched(slots, worker, copier):
    outcome = step(worker, load(slots=slots))
    assert not [call for call in copier.calls if call[0] == "prefetch"]
    assert outcome.bad_blocks == {7, 8}


class NoReads(Store):
    """A store that must not be asked for anything."""

    slots = 100

    def read(self, slots, addresses, tags):
        raise AssertionError("read")

    def write(self, slots, addresses, tags):
        raise AssertionError("written")

    def close(self):
        return True


class OnlyReads(NoReads):
    """A store whose reads end at once, and whose writes raise."""

    def read(self, slots, addresses, tags):
        operation = Operation("read", slots, addresses, tags, 64)
        operation.parts_left = 1
        operation.end_part([], "")
        return operation


def test_a_staged_move_that_cannot_be_written_costs_no_other_report(copier, clock):
    stores = [StagedStore(DISK, OnlyReads(), 0, 64), StagedStore(OBJECT, NoReads(), 0, 64)]
    worker = Worker(0, copier, HOST, 100, num_blocks=50, stores=stores)
    plan = StepPlan([load()], [store()], moves=[MovePlan(3, DISK, OBJECT, [1, 2], [3, 4], [b"a", b"b"], via=[8, 9])])
    worker.begin(plan)
    worker.start_loads(plan)
    worker.start_stores(plan)
    report = worker.poll().report
    assert report.moves == [MoveResult(3, [0, 1])]
    assert [ended.id for ended in (*report.loads, *report.stores)] == [1, 9]
    assert not worker.keeping


def test_slots_of_the_disk_are_never_prefetched_as_host_slots(copier):
    disk = StagedStore(DISK, NoReads(), 0, 64)
    worker = Worker(0, copier, HOST, 100, num_blocks=50, stores=[disk])
    worker.begin(StepPlan([LoadPlan(1, "request-1", [Copy(DISK, [5, 6], [7, 8])], in_step=False)]))
    assert copier.calls == [("begin_step", [])]


def test_nothing_is_loaded_over_blocks_that_a_store_may_still_read(worker, copier):
    copier.fails = {"begin_step"}
    outcome = step(worker, load())
    assert outcome.bad_blocks == {7, 8}
    assert not [call for call in copier.calls if call[0] in ("prefetch", "load")]


def test_a_load_that_cannot_be_asked_whether_it_is_over_is_waited_for(worker, copier):
    """Its blocks and slots are given to others as soon as it is said to have failed."""

    class Dumb(FakeTicket):
        def done(self):
            raise OSError("who knows")

    copier.ticket = Dumb(over=False)
    outcome = step(worker, load())
    assert copier.ticket.waited
    assert outcome.bad_blocks == {7, 8}


@pytest.fixture
def slow_copier(copier, monkeypatch):
    """Takes five blocks at a time, and each time hands out a ticket of its own."""
    copier.portion = 5
    copier.tickets = []

    def begin(slots, blocks, after, when, tokens=0):
        copier._call("load", list(slots), list(blocks), list(after), when)
        copier.tickets.append(FakeTicket(over=False, seconds=0.25))
        return copier.tickets[-1]

    monkeypatch.setattr(copier, "load", begin)
    return copier


def submitted(copier):
    return [call[1:3] for call in copier.calls if call[0] == "load"]


def a_long_load(count=23, **options):
    return load(slots=range(40, 40 + count), blocks=range(count), **options)


def test_a_long_load_outside_the_step_is_submitted_part_by_part(worker, slow_copier):
    step(worker, a_long_load())
    assert len(submitted(slow_copier)) == 2
    assert not worker.poll().report
    assert len(submitted(slow_copier)) == 2  # the bus is busy
    slow_copier.tickets[0].over = True
    worker.poll()
    assert len(submitted(slow_copier)) == 3
    while len(submitted(slow_copier)) < 5:
        slow_copier.tickets[-2].over = True
        assert not worker.poll().report
    for ticket in slow_copier.tickets:
        ticket.over = True
    outcome = worker.poll()
    assert outcome.arrived == {"request-1"}
    assert outcome.report.loads[0].seconds == 5 * 0.25
    pairs = [pair for part in submitted(slow_copier) for pair in zip(*part, strict=True)]
    assert pairs == list(zip(range(40, 63), range(23), strict=True))


def test_beside_short_steps_a_long_load_begins_with_the_next_one_a_part_at_a_time(worker, slow_copier):
    """In the step before, the engine has made room for all of its blocks."""
    step(worker)
    step(worker, a_long_load())
    assert submitted(slow_copier) == []
    for parts in (1, 2, 2):  # the bus is busy then
        step(worker)
        assert len(submitted(slow_copier)) == parts
    end_parts(slow_copier, 1)
    step(worker)
    assert len(submitted(slow_copier)) == 3


def test_beside_short_steps_a_short_load_begins_at_once(worker, slow_copier):
    step(worker)
    step(worker, a_long_load(count=5))
    assert len(submitted(slow_copier)) == 1


def test_beside_long_steps_a_long_load_begins_at_once(worker, slow_copier, monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(loads.time, "monotonic", lambda: next(now))
    step(worker)
    step(worker, a_long_load())
    assert submitted(slow_copier)


def test_a_load_that_a_step_waits_for_is_submitted_at_once(worker, slow_copier):
    step(worker, a_long_load(in_step=True))
    assert len(submitted(slow_copier)) == 1


def test_when_steps_are_long_more_of_a_load_is_submitted_at_a_time(worker, slow_copier):
    step(worker, a_long_load(count=50))
    counts = []
    while len(submitted(slow_copier)) < 10:
        for ticket in slow_copier.tickets:
            ticket.over = True  # the bus had nothing to do for a while
        worker.poll()
        counts.append(len(submitted(slow_copier)))
    assert counts == [6, 10]


def test_blocks_of_a_later_part_that_did_not_arrive_are_named(worker, slow_copier):
    step(worker, a_long_load(count=12))
    slow_copier.tickets[1]._bad = [1]
    for _ in range(3):
        for ticket in slow_copier.tickets:
            ticket.over = True
        outcome = worker.poll()
        if outcome.arrived:
            break
    assert outcome.report.loads[0].bad == [5]
    assert outcome.bad_blocks == {5}


def test_a_part_that_cannot_be_submitted_spoils_the_load_when_the_others_are_over(worker, slow_copier):
    step(worker, a_long_load())
    slow_copier.fails.add("load")
    slow_copier.tickets[0].over = True
    assert not worker.poll().arrived  # the second part still writes to its blocks
    assert len(submitted(slow_copier)) == 3
    slow_copier.tickets[1].over = True
    outcome = worker.poll()
    assert outcome.arrived == {"request-1"}
    assert outcome.bad_blocks == set(range(23))
    assert len(submitted(slow_copier)) == 3


def test_every_part_of_a_load_comes_after_what_still_reads_its_blocks(worker, slow_copier):
    slow_copier.ticket = FakeTicket(over=False)
    step(worker, stores=[store(id=9)])
    step(worker, a_long_load(after=[9]))
    for _ in range(5):
        worker.poll()
        end_parts(slow_copier)
    orders = [call[3] for call in slow_copier.calls if call[0] == "load"]
    assert orders == [[slow_copier.ticket]] * 5


def end_parts(copier, count=None):
    for ticket in copier.tickets[:count]:
        ticket.over = True


def long_loads(*ids, count=12):
    return [load(id=i, slots=range(15 * i, 15 * i + count), blocks=range(15 * i, 15 * i + count)) for i in ids]


def test_long_loads_come_one_after_the_other_and_two_parts_at_a_time_in_all(worker, slow_copier):
    """Side by side all of them would arrive as late as the last."""
    step(worker, *long_loads(0, 1, 2))
    assert len(submitted(slow_copier)) == 2
    arrived = []
    for turn in range(1, 10):
        end_parts(slow_copier, turn)
        outcome = worker.poll()
        arrived += [(request, turn) for request in outcome.arrived]
        assert len(submitted(slow_copier)) == min(turn + 2, 9)
    assert arrived == [("request-0", 3), ("request-1", 6), ("request-2", 9)]
    assert [slots[0] // 15 for slots, _ in submitted(slow_copier)] == [0] * 3 + [1] * 3 + [2] * 3


def test_a_short_load_does_not_wait_for_a_long_one(worker, slow_copier):
    step(worker, *long_loads(0), load(id=7, slots=[90, 91], blocks=[40, 41]))
    assert submitted(slow_copier)[1] == ([90, 91], [40, 41])
    slow_copier.tickets[1].over = True
    assert worker.poll().arrived == {"request-7"}
    assert len(submitted(slow_copier)) == 3


def test_nothing_is_fetched_ahead_that_the_next_part_would_end(worker, slow_copier):
    step(worker, *long_loads(0))
    assert worker.prefetch([90, 91], 1) is False


def test_what_was_fetched_as_one_is_not_fetched_again_in_parts(worker, slow_copier):
    plan = a_long_load()
    assert worker.prefetch(plan.copies[0].slots, 1)
    worker.start_early(plan)
    assert submitted(slow_copier) == [(list(range(40, 63)), list(range(23)))]
    slow_copier.tickets[0].over = True
    assert step(worker, plan).arrived == {"request-1"}


def test_what_comes_after_the_fetched_slots_follows_them(worker, slow_copier):
    """As the last block of a prompt does, which is not brought back in every case."""
    plan = a_long_load()
    assert worker.prefetch(plan.copies[0].slots[:-1], 1)
    worker.start_early(plan)
    assert submitted(slow_copier) == [(list(range(40, 62)), list(range(22))), ([62], [22])]
    end_parts(slow_copier)
    assert step(worker, plan).arrived == {"request-1"}


@pytest.mark.parametrize("how", ["the end of it", "another load"])
def test_what_is_no_longer_near_comes_in_parts(how, worker, slow_copier):
    plan = a_long_load()
    worker.prefetch(plan.copies[0].slots, 1)
    if how == "another load":
        worker.start_early(load(id=2))
    else:
        worker.end_prefetch()
    worker.start_early(plan)
    assert submitted(slow_copier)[-1] == (list(range(40, 44)), list(range(4)))


def test_a_load_that_cannot_be_asked_whether_it_is_over_holds_up_nobody_else(worker, slow_copier, monkeypatch):
    step(worker, *long_loads(0, 1))

    def broken():
        raise OSError("broken")

    monkeypatch.setattr(slow_copier.tickets[0], "done", broken)
    arrived, bad = {}, set()
    for _ in range(5):
        end_parts(slow_copier)
        outcome = worker.poll()
        arrived |= dict.fromkeys(outcome.arrived)
        bad |= outcome.bad_blocks
    assert list(arrived) == ["request-0", "request-1"]
    assert bad == set(range(12))


def test_beside_long_steps_a_load_is_submitted_at_once(worker, slow_copier, clock):
    """There it arrives within the step. In parts it would take several, each of which it is nothing beside."""
    clock.now += 0.2
    step(worker, a_long_load())
    assert len(submitted(slow_copier)) == 5


def test_no_more_of_a_step_goes_into_submitting_than_nobody_notices(worker, slow_copier, clock, monkeypatch):
    begin = slow_copier.load

    def take_a_while(*what):
        clock.now += 0.004
        return begin(*what)

    monkeypatch.setattr(slow_copier, "load", take_a_while)
    worker.poll()
    clock.now += 0.1
    worker.poll()
    step(worker, a_long_load(count=50))
    assert len(submitted(slow_copier)) == 3  # a tenth of it
    clock.now += 0.005
    worker.poll()
    assert len(submitted(slow_copier)) == 3


# -- loads that the engine hears of before they are over ---------------------------------------------------------------


@pytest.fixture
def turn(worker, slow_copier, clock, monkeypatch):
    """A step of 40 ms with such a plan. A part of five blocks takes 10 ms; the engine may hear of it 36 ms early."""
    slow_copier.can_hold_steps = True
    slow_copier.held = []
    monkeypatch.setattr(slow_copier, "hold_step", lambda tickets: slow_copier.held.append(list(tickets)))
    worker.announcements.steps_ahead = 0.9

    def turn(*loads, **options):
        clock.now += 0.04
        plan = StepPlan(list(loads), **options)
        worker.begin(plan)
        worker.start_loads(plan)
        worker.start_stores(plan)
        return worker.poll()

    for _ in range(3):
        turn()
    return turn


def parts_come(copier, *parts):
    for part in parts:
        copier.tickets[part]._seconds = 0.01
        copier.tickets[part].over = True


def test_a_load_is_announced_when_it_should_be_over_before_the_engine_plans_with_it(turn, slow_copier):
    assert not turn(a_long_load(count=30), unheard=[1]).arrived
    assert len(slow_copier.tickets) == 6
    for part in (0, 1):
        parts_come(slow_copier, part)
        assert not turn(unheard=[1]).arrived  # 50 ms to go, then 40
    parts_come(slow_copier, 2)
    assert turn(unheard=[1]).arrived == {"request-1"}
    assert not turn(unheard=[1]).arrived  # once
    assert slow_copier.held == []  # the step was planned without it
    assert not turn().arrived
    assert slow_copier.held == [slow_copier.tickets]
    parts_come(slow_copier, 3, 4, 5)
    outcome = turn()
    assert not outcome.arrived
    assert [result.id for result in outcome.report.loads] == [1]
    slow_copier.held.clear()
    turn()
    assert slow_copier.held == []


def announce(turn, slow_copier):
    """A load whose second half is still under way."""
    turn(a_long_load(count=10), unheard=[1])
    parts_come(slow_copier, 0)
    return turn(unheard=[1]).arrived


def test_a_load_of_one_part_is_judged_by_the_load_before(turn, slow_copier):
    assert not turn(load(id=1), unheard=[1]).arrived
    parts_come(slow_copier, 0)
    assert turn(unheard=[1]).arrived == {"request-1"}
    assert turn(load(id=2), unheard=[2]).arrived == {"request-2"}


def test_a_load_behind_others_waits_for_them(turn, slow_copier):
    """The bus brings one after the other, however little is left of the last."""
    turn(load(id=7, slots=range(5), blocks=range(5)))
    parts_come(slow_copier, 0)
    assert turn().arrived == {"request-7"}
    assert not turn(a_long_load(count=20), load(id=2, slots=[90, 91], blocks=[40, 41]), unheard=[1, 2]).arrived
    parts_come(slow_copier, 1)
    assert turn(unheard=[1, 2]).arrived == {"request-1", "request-2"}


def test_a_load_is_not_announced_before_all_of_it_is_with_the_copier(turn, worker, slow_copier, clock):
    worker.poll()  # a short step
    worker.start_early(a_long_load(count=50))
    clock.now += 0.006
    worker.poll()  # and another: the first part
    assert len(slow_copier.tickets) == 1
    parts_come(slow_copier, 0)
    assert worker.announcements.make(worker._loads.values(), 1.0) == set()


def test_without_steps_that_overlap_nothing_is_announced(turn, worker, slow_copier):
    worker.announcements.steps_ahead = 0.0
    assert not announce(turn, slow_copier)


def test_what_a_copier_cannot_order_on_the_device_is_not_announced(turn, slow_copier):
    slow_copier.can_hold_steps = False
    assert not announce(turn, slow_copier)


def test_a_load_that_has_lost_a_block_is_not_announced(turn, slow_copier):
    copies = [Copy(HOST, [*range(10)], [*range(10)]), Copy(DISK, [1], [11])]
    turn(LoadPlan(1, "request-1", copies, in_step=False), unheard=[1])
    parts_come(slow_copier, 0)
    assert not turn(unheard=[1]).arrived


def test_a_step_waits_for_an_announced_load_if_its_plan_says_nothing(turn, slow_copier, worker):
    """A plan that got lost, for example."""
    assert announce(turn, slow_copier)
    worker.begin(StepPlan())
    assert slow_copier.held == [slow_copier.tickets]


def test_a_step_that_cannot_wait_on_the_device_waits_here(turn, worker, slow_copier, monkeypatch):
    def broken(tickets):
        raise OSError("no stream")

    assert announce(turn, slow_copier)
    monkeypatch.setattr(slow_copier, "hold_step", broken)
    worker.begin(StepPlan())
    assert slow_copier.tickets[1].waited
    assert any("no stream" in fault for fault in worker.poll().report.faults)


@pytest.mark.parametrize("what", ["weights_changed", "drain"])
def test_an_announced_load_has_arrived_whatever_happens_then(what, turn, worker, slow_copier):
    """The engine no longer waits for it, and takes no failure of it."""
    assert announce(turn, slow_copier)
    getattr(worker, what)()
    parts_come(slow_copier, 1)
    outcome = turn()
    assert (outcome.arrived, outcome.failed, outcome.bad_blocks) == (set(), set(), set())
    assert [result.bad for result in outcome.report.loads] == [[]]
