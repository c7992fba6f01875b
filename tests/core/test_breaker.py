"""A tier that is late or keeps failing gets no work until it answers again."""

from types import SimpleNamespace

import pytest

from kvbm.core.breaker import FIRST_PAUSE_SECONDS, MAX_FAILURES, MAX_PAUSE_SECONDS, Breaker
from kvbm.core.manager import BlockManager
from kvbm.core.pool import Pool
from kvbm.plans import LoadResult, MoveResult, Report, StoreResult
from kvbm.runtime.leader import Leader
from kvbm.tiers.base import Route
from tiernames import DISK, HOST


def fail(breaker, now, times=MAX_FAILURES):
    for _ in range(times):
        breaker.failed(now)


def test_a_breaker_opens_after_failures_in_a_row_and_closes_after_a_pause():
    breaker = Breaker()
    fail(breaker, 100.0, MAX_FAILURES - 1)
    assert not breaker.is_open(100.0)
    breaker.failed(100.0)
    assert breaker.is_open(100.0)
    assert breaker.is_open(99.9 + FIRST_PAUSE_SECONDS)
    assert not breaker.is_open(100.0 + FIRST_PAUSE_SECONDS)
    assert breaker.opened == 1


def test_a_success_between_failures_keeps_the_breaker_closed():
    breaker = Breaker()
    for _ in range(5):
        fail(breaker, 100.0, MAX_FAILURES - 1)
        breaker.succeeded()
    assert not breaker.is_open(100.0)
    assert breaker.opened == 0


def test_every_failed_probe_doubles_the_pause_up_to_a_limit():
    breaker, now, pauses = Breaker(), 0.0, []
    fail(breaker, now, MAX_FAILURES - 1)
    for _ in range(9):
        breaker.failed(now)  # one is enough
        pause = FIRST_PAUSE_SECONDS
        while breaker.is_open(now + pause):
            pause += FIRST_PAUSE_SECONDS
        pauses.append(pause)
        now += pause
    assert pauses == [1, 2, 4, 8, 16, 32, MAX_PAUSE_SECONDS, MAX_PAUSE_SECONDS, MAX_PAUSE_SECONDS]
    assert breaker.opened == 9


def test_a_probe_that_succeeds_makes_the_next_pause_short_again():
    breaker = Breaker()
    fail(breaker, 0.0, MAX_FAILURES + 4)
    assert breaker.is_open(FIRST_PAUSE_SECONDS)
    breaker.succeeded()
    assert not breaker.is_open(0.0)
    fail(breaker, 0.0)
    assert breaker.is_open(0.0)
    assert not breaker.is_open(FIRST_PAUSE_SECONDS)


def test_a_tier_that_owes_a_read_is_open_until_that_read_has_ended():
    breaker = Breaker()
    breaker.late = 1
    assert breaker.is_open(1e9)
    breaker.late = 0
    assert not breaker.is_open(0.0)


# -- in the leader ----------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    stopped = SimpleNamespace(monotonic=lambda: clock.now)
    for module in ("kvbm.runtime.leader", "kvbm.tiers.edges"):
        monkeypatch.setattr(f"{module}.time", stopped)
    return clock


@pytest.fixture
def leader(clock):
    manager = BlockManager({HOST: Pool(16), DISK: Pool(16)})
    leader = Leader(manager, 1)
    leader.add_edge(Route(DISK, max_pending_blocks=8))
    return leader


def store(leader, text):
    plan = leader.offload([letter.encode() for letter in text], range(len(text)))
    leader.apply([Report(0, stores=[StoreResult(plan.id)])])


def move(leader, text, bad):
    store(leader, text)
    (plan,) = leader.plan_moves()
    assert len(plan.slots) == len(text)
    leader.apply([Report(0, moves=[MoveResult(plan.id, list(bad))])])


def test_a_disk_that_cannot_be_written_gets_a_pause_and_then_the_blocks_that_waited(leader, clock):
    for text in ("ab", "cd", "ef"):
        move(leader, text, [0, 1])
    store(leader, "gh")
    assert leader.plan_moves() == []
    assert leader.edges[0].is_suspended
    assert leader.counts.failed_move_blocks == {DISK: 6}
    clock.now += FIRST_PAUSE_SECONDS
    (plan,) = leader.plan_moves()
    assert plan.tags == [b"g", b"h"]
    leader.apply([Report(0, moves=[MoveResult(plan.id)])])
    move(leader, "ij", [0, 1])
    assert not leader.edges[0].is_suspended


def test_moves_under_way_are_waited_for_while_the_disk_has_a_pause(leader, clock):
    """Their source slots stay pinned until the ranks have answered."""
    edge = leader.edges[0]
    plans = []
    for text in ("ab", "cd", "ef", "gh"):
        store(leader, text)
        plans += leader.plan_moves()
    for plan in plans[:3]:
        leader.apply([Report(0, moves=[MoveResult(plan.id, [0, 1])])])
    assert edge.is_suspended
    assert edge.can_progress
    leader.apply([Report(0, moves=[MoveResult(plans[3].id, [0, 1])])])
    assert leader.manager.near.pinned == 0
    store(leader, "ij")
    assert not edge.can_progress  # until the pause is over, a step changes nothing
    clock.now += 2 * FIRST_PAUSE_SECONDS
    assert edge.can_progress


def test_a_move_that_succeeds_in_part_is_no_failure_of_the_disk(leader):
    for text in ("ab", "cd", "ef", "gh"):
        move(leader, text, [0])
    assert not leader.edges[0].is_suspended


def test_blocks_are_read_from_a_disk_that_cannot_be_written(leader):
    move(leader, "ab", [])
    for text in ("cd", "ef", "gh"):
        move(leader, text, [0, 1])
    assert leader.edges[0].is_suspended
    leader.manager.near.clear()
    assert leader.manager.lookup([b"a", b"b"]).runs[0].tier == DISK


def read(leader, text, bad):
    keys = [letter.encode() for letter in text]
    plan = leader.onboard(leader.manager.lookup(keys), "r", range(len(text)), in_step=False)
    leader.apply([Report(0, loads=[LoadResult(plan.id, list(bad))])])


def test_a_disk_that_cannot_be_read_is_neither_asked_nor_written_until_its_pause_is_over(leader, clock):
    for text in ("ab", "cd", "ef", "gh"):
        move(leader, text, [])
    leader.manager.near.clear()
    for text in ("ab", "cd", "ef"):
        read(leader, text, [0, 1])
    assert leader.manager.suspended == {DISK}
    assert leader.manager.lookup([b"g", b"h"]).blocks == 0
    store(leader, "x")
    assert leader.plan_moves() == []
    clock.now += FIRST_PAUSE_SECONDS
    (plan,) = leader.plan_moves()
    assert plan.tags == [b"x"]
    assert leader.manager.lookup([b"g", b"h"]).blocks == 2


def test_a_pause_ends_where_nothing_moves_to_the_tier(leader, clock):
    for text in ("ab", "cd", "ef", "gh"):
        move(leader, text, [])
    leader.manager.near.clear()
    for text in ("ab", "cd", "ef"):
        read(leader, text, [0, 1])
    leader.edges.clear()
    assert leader.plan_moves() == []
    assert leader.manager.suspended == {DISK}
    clock.now += FIRST_PAUSE_SECONDS
    assert leader.plan_moves() == []
    assert leader.manager.suspended == set()


def test_one_load_is_one_failure_however_often_it_changes_between_tiers(leader):
    move(leader, "abcdef", [])
    leader.manager.near.drop([b"a", b"c", b"e"])
    read(leader, "abcdef", [0, 2, 4])
    assert leader.manager.suspended == set()
    assert leader.breakers[DISK].opened == 0
