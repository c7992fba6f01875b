"""Snapshots of a leader: what it holds and has done, read from beside."""

from __future__ import annotations

import random
import threading
import time

import pytest

from kvbm.core.cost import CostModel
from kvbm.core.manager import BlockManager
from kvbm.core.pool import Pool
from kvbm.observe.requests import RequestLog
from kvbm.observe.source import LeaderSource, kinds
from kvbm.plans import LoadResult, Report, StoreResult
from kvbm.runtime.leader import Leader
from observed import IDENTITY
from tiernames import HOST, PRIORS

RANKS = 2
BYTES = [600_000, 400_000]  # of a block on each rank


class Setup:
    def __init__(self, slots=50):
        self.log = RequestLog()
        self.cost = CostModel(PRIORS)
        self.leader = Leader(BlockManager({HOST: Pool(slots)}), RANKS, 4096, BYTES, self.cost, self.log)
        self.in_charge = self.leader
        self.failures = {}
        self.source = LeaderSource(IDENTITY, lambda: self.in_charge, self.log, self.cost, self.failures)

    def store(self, keys, ok=(True, True), seconds=0.5):
        plan = self.leader.offload(keys, list(range(len(keys))))
        for rank in range(RANKS):
            self.leader.apply([Report(rank, stores=[StoreResult(plan.id, ok[rank], seconds * (rank + 1))])])
        return plan

    def load(self, keys, bad=(), seconds=0.25):
        match = self.leader.manager.lookup(keys)
        plan = self.leader.onboard(match, "r", list(range(100, 100 + match.blocks)), True)
        for rank in range(RANKS):
            self.leader.apply([Report(rank, loads=[LoadResult(plan.id, list(bad), seconds * (rank + 1))])])

    def flow(self, source, target):
        return next(f for f in self.source.snapshot().flows if (f.source, f.target) == (source, target))


@pytest.fixture
def setup():
    return Setup()


def keys(count, name="k"):
    return [f"{name}{i}".encode().ljust(32, b".") for i in range(count)]


def test_blocks_count_once_bytes_of_all_ranks_and_seconds_of_the_slowest(setup):
    setup.store(keys(10))
    flow = setup.flow("device", "host")
    assert (flow.blocks, flow.bytes, flow.seconds) == (10, 10_000_000, 1.0)
    setup.load(keys(10))
    flow = setup.flow("host", "device")
    assert (flow.blocks, flow.bytes, flow.seconds) == (10, 10_000_000, 0.5)


def test_what_failed_on_one_rank_has_failed(setup):
    setup.store(keys(10), ok=(True, False))
    flow = setup.flow("device", "host")
    assert (flow.blocks, flow.failed_blocks) == (0, 10)
    setup.store(keys(10))
    setup.load(keys(10), bad=[3, 4])
    flow = setup.flow("host", "device")
    assert (flow.blocks, flow.failed_blocks) == (8, 2)


def test_what_is_under_way_is_queued(setup):
    setup.store(keys(10))
    match = setup.leader.manager.lookup(keys(10))
    load = setup.leader.onboard(match, "r", list(range(100, 110)), True)
    store = setup.leader.offload(keys(5, "x"), list(range(20, 25)))
    assert setup.flow("host", "device").queued_blocks == 10
    assert setup.flow("device", "host").queued_blocks == 5
    (tier,) = setup.source.snapshot().tiers
    assert (tier.slots, tier.free, tier.writing, tier.pinned, tier.idle) == (50, 35, 5, 10, 0)
    for rank in range(RANKS):
        setup.leader.apply([Report(rank, [LoadResult(load.id)], [StoreResult(store.id)])])
    assert setup.flow("host", "device").queued_blocks == setup.flow("device", "host").queued_blocks == 0
    (tier,) = setup.source.snapshot().tiers
    assert (tier.writing, tier.pinned, tier.idle) == (0, 0, 15)


def test_evictions_and_refusals_are_counted(setup):
    for part in range(6):
        setup.store(keys(10, f"part{part} "))
    assert setup.source.snapshot().tiers[0].evictions == 10
    setup.leader.fail_rank(1)
    assert setup.leader.offload(keys(3, "y"), [1, 2, 3]) is None
    assert setup.source.snapshot().refused_blocks == {"queue full": 3}


def test_speeds_are_marked_as_guesses_until_measured(setup):
    before = setup.source.snapshot()
    assert not before.tiers[0].measured
    assert not before.saved.measured
    setup.store(keys(10))
    setup.load(keys(10))
    setup.cost.observe_prefill(8192, 0.5)
    after = setup.source.snapshot()
    assert after.tiers[0].measured
    assert after.saved.measured


def test_a_leader_that_was_let_go_of_is_still_counted(setup):
    setup.store(keys(10))
    setup.in_charge = None
    assert setup.flow("device", "host").blocks == 10


def test_failures_are_told_apart_by_kind_and_not_by_what_the_error_said():
    failures = {
        "rank 0: load: OSError: [Errno 5] at 7": 2,
        "rank 0: load: OSError: [Errno 5] at 9": 1,
        "rank 1: store: injected": 4,
        "planning a load: ValueError": 1,
    }
    assert kinds(failures) == {
        "rank 0: load: OSError": 3,
        "rank 1: store: injected": 4,
        "planning a load: ValueError": 1,
    }
    many = kinds({f"{i}: odd": 1 for i in range(1000)})
    assert len(many) == 33
    assert many["other"] == 968


def test_snapshots_can_be_taken_while_the_leader_works(setup):
    """Whatever the engine's thread is just changing, whoever looks gets an answer."""
    stop = threading.Event()
    errors = []
    taken = [0]

    def look():
        while not stop.is_set():
            try:
                snapshot = setup.source.snapshot(100)
                assert all(min(t.free, t.writing, t.idle, t.pinned) >= 0 for t in snapshot.tiers)
                taken[0] += 1
            except Exception as error:
                errors.append(error)
                return

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    source = random.Random(1)
    deadline = time.monotonic() + 120
    number = 0
    while number < 300 or (taken[0] <= 10 and not errors):
        assert time.monotonic() < deadline
        number += 1
        some = keys(source.randrange(1, 12), f"{source.randrange(40)} ")
        plan = setup.leader.offload(some, list(range(len(some))))
        setup.failures[f"{number}: reason"] = 1
        if plan is not None:
            for rank in range(RANKS):
                setup.leader.apply([Report(rank, stores=[StoreResult(plan.id, source.random() > 0.1, 0.1)])])
        if setup.leader.manager.lookup(some).blocks:
            setup.load(some)
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors
