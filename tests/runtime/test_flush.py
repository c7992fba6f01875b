"""The end of an engine: what is on its way to disk is written and confirmed, as far as the deadline allows."""

from __future__ import annotations

import time

import pytest
import torch

from kvbm import config as settings
from kvbm.plans import StepPlan
from kvbm.runtime import flush as module
from kvbm.runtime.flush import flush, unwritten
from kvbm.runtime.leader import Leader
from kvbm.runtime.rank import Rank
from kvbm.runtime.tiers import connect, open_manager
from kvbm.tiers import bounded
from tiernames import DISK

BLOCKS, SLOTS = 32, 16
CACHE = {"model": "m", "block_size": 4, "pipeline_parallel": 1}
KEYS = [bytes([i]) * 32 for i in range(SLOTS)]


class Engine:
    """A leader and its ranks in one process, without an engine that steps them."""

    def __init__(self, folder, ranks=1, **options):
        values = {
            "cpu_cache_override_num_blocks": SLOTS,
            "disk_cache_override_num_blocks": 64,
            "disk_cache_dir": str(folder),
            "disable_disk_offload_filter": True,
            **options,
        }
        config = settings.load(extra=values, environ={}, files=[])
        self.caches = [torch.zeros(BLOCKS, 2, 640, dtype=torch.int32) for _ in range(ranks)]
        self.ranks = [Rank(config, rank, ranks, cache=CACHE) for rank in range(ranks)]
        for rank, cache in zip(self.ranks, self.caches, strict=True):
            rank.register({"layer": cache}, BLOCKS)
        hellos = [rank.open() for rank in self.ranks]
        self.leader = Leader(open_manager(config, hellos, CACHE), ranks)
        connect(config, hellos, self.leader)
        self.workers = [rank.worker for rank in self.ranks]

    def store(self, keys):
        """The last step of an engine: it computes blocks and begins to store them. Its results are not taken in."""
        plan = StepPlan(stores=[self.leader.offload(keys, range(len(keys)))])
        for worker in self.workers:
            worker.begin(plan)
            worker.start_stores(plan)

    def flush(self, seconds=60.0):
        return flush(lambda: self.leader, self.workers, self.leader.apply, time.monotonic() + seconds)

    def close(self):
        for rank in self.ranks:
            rank.close()
        self.leader.manager.close()

    @property
    def on_disk(self):
        return set(self.leader.manager.catalogs[DISK].findable)


@pytest.fixture
def make(tmp_path, monkeypatch):
    # A disk that other programs keep busy may take longer to end its calls than an engine waits for it.
    monkeypatch.setattr(bounded, "DISK_END_SECONDS", 120.0)
    made = []

    def engine(ranks=1, **options):
        made.append(Engine(tmp_path / "cache", ranks, **options))
        return made[-1]

    yield engine
    for each in made:
        each.close()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("faults", ["", "slow-store,disk-slow-write:seconds=0.2"], ids=["at once", "late"])
def test_what_is_on_its_way_is_found_by_the_next_engine(faults, ranks, make):
    first = make(ranks, inject_faults=faults)
    first.store(KEYS[:8])
    assert not first.on_disk
    assert first.flush()
    assert not first.leader.busy
    assert unwritten(first.leader, in_time=True, confirmable=True) == ""
    first.close()
    assert make(ranks).on_disk == set(KEYS[:8])


def test_more_than_may_be_queued_at_once_is_written_in_turns(make):
    engine = make()  # half of the host tier, which is eight blocks
    for at in (0, 4, 8):
        engine.store(KEYS[at : at + 4])
    assert engine.flush()
    assert engine.on_disk == set(KEYS[:12])


def test_a_disk_that_does_not_answer_in_time_costs_its_blocks(make, stall):
    engine = make(inject_faults="disk-slow-write", max_pending_spills=4)
    engine.store(KEYS[:4])
    while not stall.begun.is_set():
        assert not engine.flush(0.2)
    assert unwritten(engine.leader, in_time=False, confirmable=True) == (
        f"4 blocks were lost at exit (4 being written): the disk did not take them within {module.FLUSH_SECONDS:g} s"
    )
    engine.workers[0].hurry_stores()
    engine.ranks[0].close()  # does not wait for the disk as long as it usually does
    assert not stall.over.is_set()
    stall.over.set()
    index = engine.leader.manager.catalogs[DISK].journal
    engine.leader.manager.close()
    assert not index._slots


def test_a_disk_that_is_slow_holds_up_the_end_no_longer_than_one_that_hangs(make, monkeypatch):
    """There is something new with every look at it. The flush stops at its deadline all the same."""
    engine = make(max_pending_spills=1)
    engine.store(KEYS[:1])
    assert not engine.flush(0.0)
    assert not engine.on_disk


def test_a_block_that_one_rank_cannot_write_is_not_in_the_index(make):
    first = make(2, inject_faults="disk-write:rank=1:every=1")
    first.store(KEYS[:3])
    assert first.flush()
    assert unwritten(first.leader, in_time=True, confirmable=True) == (
        "since the start, blocks were passed over at least once: 3 not written because the disk failed"
    )
    first.close()
    assert not make(2).on_disk


def test_a_disk_whose_writes_keep_failing_is_not_waited_for(make, monkeypatch):
    monkeypatch.setattr("kvbm.core.breaker.FIRST_PAUSE_SECONDS", 600.0)
    engine = make(inject_faults="disk-write:every=1")
    for key in KEYS[:3]:
        engine.store([key])
        assert engine.flush()
    engine.store(KEYS[3:5])
    assert engine.flush()
    assert unwritten(engine.leader, in_time=True, confirmable=True) == (
        "2 blocks were lost at exit (2 queued for the disk): writes to the disk kept failing; since the start, blocks "
        "were passed over at least once: 3 not written because the disk failed"
    )


def test_answers_that_were_lost_with_the_last_step_are_not_waited_for(make):
    """vLLM had a step under way when it ended: its results hold the only confirmation that there will ever be."""
    engine = make()
    engine.store(KEYS[:5])
    deadline = time.monotonic() + 60
    while not engine.workers[0].poll().report.stores:
        assert time.monotonic() < deadline
    assert engine.flush()
    assert not engine.on_disk
    assert unwritten(engine.leader, in_time=True, confirmable=True) == (
        "5 blocks were lost at exit (5 being copied to host memory): the engine did not deliver the results of its "
        "last steps"
    )


def test_workers_that_have_ended_before_the_leader_have_confirmed_nothing(make):
    engine = make(max_pending_spills=2)
    engine.store(KEYS[:4])
    deadline = time.monotonic() + 60
    while not engine.leader.counts.offloaded_blocks:
        assert time.monotonic() < deadline
        engine.leader.apply([engine.workers[0].poll().report])
    engine.leader.plan_moves()
    assert unwritten(engine.leader, in_time=True, confirmable=False) == (
        "2 blocks were lost at exit (2 being written): the engine ended its workers before they had confirmed these "
        "blocks; since the start, blocks were passed over at least once: 2 skipped because the disk was behind "
        "(KVBM_MAX_PENDING_SPILLS)"
    )


def test_what_was_reset_is_not_missed(make):
    engine = make()
    engine.store(KEYS[:4])
    assert unwritten(engine.leader, in_time=True, confirmable=False)
    engine.leader.reset()
    assert unwritten(engine.leader, in_time=True, confirmable=False) == ""
    assert engine.flush()
    assert not engine.on_disk


def test_with_the_filter_blocks_that_are_not_bound_for_the_disk_are_not_missed(make):
    engine = make(disable_disk_offload_filter=False)
    engine.store(KEYS[:4])
    assert unwritten(engine.leader, in_time=True, confirmable=False) == ""
    assert engine.flush()
    assert not engine.on_disk
    assert sum(engine.leader.counts.filtered_move_blocks.values()) == 4
