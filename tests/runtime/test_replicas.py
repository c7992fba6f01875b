"""KV that is the same on every rank is kept once, in either way, and comes back to all of them bit by bit."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from kvbm.core.manager import BlockManager  # noqa: E402
from kvbm.core.pool import Pool  # noqa: E402
from kvbm.plans import Copy, LoadPlan, LoadResult, Report, StepPlan, StorePlan, StoreResult, encode  # noqa: E402
from kvbm.runtime.leader import Leader  # noqa: E402
from kvbm.transfer.broadcast import BroadcastCopier  # noqa: E402
from ranks import BLOCKS, RankFailedError, Ranks, places  # noqa: E402
from tiernames import HOST  # noqa: E402

BLOCK_BYTES = 3 * 16 * 36
SHARED = {"cpu_cache_override_num_blocks": 40}
BROADCAST = {**SHARED, "nccl_mla_mode": True, "max_transfer_batch_size": 3, "max_concurrent_transfers": 2}


# On one GPU the two ranks share it: NCCL then goes over sockets, which is slow and as good for a test.
DEVICES = [
    "cpu",
    pytest.param(
        "cuda:0",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")],
    ),
]


@pytest.fixture(scope="module", params=DEVICES)
def party(request, tmp_path_factory):
    ranks = Ranks(tmp_path_factory.mktemp("ranks"), request.param)
    yield ranks
    ranks.close()


@pytest.fixture
def ranks(party):
    yield party
    party.all("close")


def store(id, slots, blocks):
    return encode(StepPlan(stores=[StorePlan(id, Copy(HOST, slots, blocks))]))


def load(id, slots, blocks, in_step=True, layered=False):
    return encode(StepPlan(loads=[LoadPlan(id, "r", [Copy(HOST, slots, blocks)], in_step, [], layered)]))


def loaded(ranks, plan, id=2):
    """The positions that each rank has reported as bad."""
    return [result["loads"][id] for result in ranks.all("step", plan=plan)]


@pytest.mark.parametrize("settings", [SHARED, BROADCAST], ids=["shared", "broadcast"])
def test_every_block_comes_back_to_every_rank_as_it_was(ranks, settings):
    ranks.all("start", settings=settings)
    for round in range(12):
        ranks.all("fill", seed=round)
        count = (1, 2, 7, BLOCKS)[round % 4]
        slots, blocks = places(round, count, 40)
        _, targets = places(round + 100, count, 40)
        before, _ = ranks.all("blocks")
        for result in ranks.all("step", plan=store(2 * round + 1, slots, blocks)):
            assert result["stores"] == {2 * round + 1: True}
        ranks.all("fill", seed=1000)
        plan = load(2 * round + 2, slots, targets, in_step=round % 3 > 0, layered=round % 3 > 1)
        assert loaded(ranks, plan, 2 * round + 2) == [[], []]
        for after in ranks.all("blocks"):
            assert [after[target] for target in targets] == [before[block] for block in blocks]


def test_a_shared_block_is_written_by_one_rank_and_all_take_turns(ranks):
    """The ranks hold different bytes here, so that one can tell who has written."""
    ranks.all("start", settings=SHARED, same=False)
    own = ranks.all("blocks")

    def writers(id, blocks):
        targets = [block + 19 for block in blocks]
        ranks.all("step", plan=store(id, blocks, blocks))
        assert loaded(ranks, load(100, blocks, targets), 100) == [[], []]
        first, second = ranks.all("blocks")
        assert [first[target] for target in targets] == [second[target] for target in targets]
        return [next(rank for rank in (0, 1) if first[block + 19] == own[rank][block]) for block in blocks]

    blocks = list(range(1, 13))  # not the first one: it is what copiers warm up with, and the same on all since then
    assert writers(2, blocks) == [0] * 6 + [1] * 6
    assert writers(3, blocks) == [1] * 6 + [0] * 6
    assert sorted(writers(4, [1]) + writers(5, [1])) == [0, 1]


def test_the_budget_counts_once_and_the_memory_is_the_same(ranks):
    budget = {"cpu_cache_gb": 16 * BLOCK_BYTES / 1e9}
    shared = ranks.all("start", settings=budget)
    assert [rank["slots"] for rank in shared] == [16, 16]
    assert [rank["shared_by"] for rank in shared] == [2, 2]
    assert shared[0]["mapped"] == shared[1]["mapped"] != []
    ranks.all("close")
    broadcast = ranks.all("start", settings={**budget, "nccl_mla_mode": True})
    assert [(rank["slots"], rank["slab"], rank["mapped"]) for rank in broadcast] == [(16, 16, []), (16, 1, [])]


def test_ranks_that_cannot_share_store_for_themselves_and_say_so(ranks):
    budget = {"cpu_cache_gb": 16 * BLOCK_BYTES / 1e9}
    first, second = ranks.all("start", settings=budget, patch={"machine": ["a", "b"]}, same=False)
    assert (first["slots"], first["shared_by"], first["mapped"]) == (8, 1, [])
    told = [line for line in first["said"] if "stores it for itself" in line]
    assert told == [
        "every rank has the same KV and stores it for itself: the ranks are on different machines, or in containers "
        "that do not see each other"
    ]
    assert not [line for line in second["said"] if "for itself" in line]
    own = ranks.all("blocks")
    ranks.all("step", plan=store(1, [1, 2], [3, 4]))
    assert loaded(ranks, load(2, [1, 2], [5, 6])) == [[], []]
    for mine, after in zip(own, ranks.all("blocks"), strict=True):
        assert after[5:7] == mine[3:5]


def test_with_a_disk_each_rank_stores_for_itself_and_says_so(ranks, tmp_path):
    disk = {"disk_cache_override_num_blocks": 40, "disk_cache_dir": str(tmp_path)}
    first, _ = ranks.all("start", settings={**SHARED, **disk})
    assert (first["shared_by"], first["mapped"]) == (1, [])
    assert [line for line in first["said"] if "stores it for itself: a disk tier requires it" in line]


def test_memory_that_cannot_be_had_is_refused_on_every_rank(party):
    huge = {"cpu_cache_gb": 1e9}
    for rank in (0, 1):
        party.tell(rank, "start", settings=huge)
    for rank in (0, 1):
        with pytest.raises(RankFailedError, match="GB of host memory for 2 ranks that share it, but only"):
            party.hear(rank)


def test_a_store_that_one_writer_has_lost_is_not_found(ranks):
    ranks.all("start", settings={**SHARED, "inject_faults": "store:rank=1:every=2"})
    leader = Leader(BlockManager({HOST: Pool(40)}), ranks=2, block_bytes=[BLOCK_BYTES] * 2, kept_bytes=BLOCK_BYTES)
    keys = [bytes([i]) * 32 for i in range(8)]
    for part in (keys[:4], keys[4:]):
        plan = leader.offload(part, list(range(4)))
        reports = []
        for rank, result in enumerate(ranks.all("step", plan=encode(StepPlan(stores=[plan])))):
            reports.append(Report(rank, stores=[StoreResult(i, ok) for i, ok in result["stores"].items()]))
        leader.apply(reports[1:])
        assert not leader.manager.lookup(part).blocks
        leader.apply(reports[:1])
    assert leader.manager.lookup(keys[:4]).blocks == 4
    assert leader.manager.lookup(keys[4:]).blocks == 0
    assert leader.counts.failed_store_blocks == 4


def test_bytes_stored_are_counted_once():
    leader = Leader(BlockManager({HOST: Pool(4)}), ranks=2, block_bytes=[100, 100], kept_bytes=100)
    plan = leader.offload([b"a" * 32], [0])
    leader.apply(Report(rank, stores=[StoreResult(plan.id, seconds=1.0)]) for rank in (0, 1))
    assert leader.counts.stored_bytes == {HOST: 100}
    match = leader.manager.lookup([b"a" * 32])
    plan = leader.onboard(match, "r", [1], in_step=False)
    leader.apply(Report(rank, loads=[LoadResult(plan.id, seconds=1.0)]) for rank in (0, 1))
    assert leader.counts.loaded_bytes == {HOST: 200}


def test_only_the_first_rank_stores_when_it_loads_for_all(ranks):
    ranks.all("start", settings=BROADCAST, same=False)
    own = ranks.all("blocks")
    ranks.all("step", plan=store(1, list(range(8)), list(range(8))))
    assert loaded(ranks, load(2, list(range(8)), list(range(8, 16)))) == [[], []]
    for after in ranks.all("blocks"):
        assert after[8:16] == own[0][:8]


def test_a_load_that_fails_on_the_first_rank_fails_on_all_at_the_same_blocks(ranks):
    ranks.all("start", settings={**BROADCAST, "inject_faults": "load:rank=0:every=5"})
    before, _ = ranks.all("blocks")
    ranks.all("step", plan=store(1, list(range(12)), list(range(12))))
    results = ranks.all("step", plan=load(2, list(range(12)), list(range(12, 24))))
    assert [result["loads"][2] for result in results] == [[4, 9], [4, 9]]
    assert results[0]["faults"] == ["load: injected load fault"]
    assert results[1]["faults"] == ["load: failed on another rank"]
    for after in ranks.all("blocks"):
        assert [after[12 + i] == before[i] for i in range(12)] == [i not in (4, 9) for i in range(12)]


@pytest.mark.parametrize(("rank", "part"), [(0, "gather"), (1, "scatter"), (0, "begin_step"), (1, "begin_step")])
def test_a_failure_on_the_way_is_the_failure_of_all_and_the_next_load_is_well(ranks, rank, part):
    ranks.all("start", settings=BROADCAST)
    before, _ = ranks.all("blocks")
    ranks.all("step", plan=store(1, list(range(8)), list(range(8))))
    ranks.one(rank, "break_next", what=part)
    assert loaded(ranks, load(2, list(range(8)), list(range(8, 16)))) == [list(range(8))] * 2
    assert loaded(ranks, load(3, list(range(8)), list(range(16, 24))), 3) == [[], []]
    for after in ranks.all("blocks"):
        assert after[16:24] == before[:8]


def test_loads_in_and_outside_of_steps_keep_their_order(ranks):
    ranks.all("start", settings=BROADCAST)
    before, _ = ranks.all("blocks")
    ranks.all("step", plan=store(1, list(range(8)), list(range(8))))
    loads = [
        LoadPlan(2, "a", [Copy(HOST, [0, 1, 2, 3], [8, 9, 10, 11])], in_step=False),
        LoadPlan(3, "b", [Copy(HOST, [4], [12])], in_step=True, layered=True),
        LoadPlan(4, "c", [Copy(HOST, [5, 6], [13, 14])], in_step=True),
        LoadPlan(5, "d", [Copy(HOST, [7], [15])], in_step=False),
    ]
    for result in ranks.all("step", plan=encode(StepPlan(loads=loads))):
        assert result["loads"] == {2: [], 3: [], 4: [], 5: []}
    for after in ranks.all("blocks"):
        assert after[8:16] == before[:8]


def test_ranks_that_pass_blocks_on_take_every_load_as_a_whole():
    """In parts, which go on when a rank's own bus is free, they would come for another part than the others."""

    class Passing(BroadcastCopier):
        load = None

    inner = SimpleNamespace(name="inner", portion=5)
    assert Passing(inner, SimpleNamespace(sends=True), None).portion == 0


def test_a_rank_that_does_not_come_costs_hits_and_holds_nobody_up_twice(ranks):
    ranks.all("start", settings=BROADCAST, patch={"patience": 5})
    ranks.all("step", plan=store(1, [0, 1], [0, 1]))
    ranks.tell(0, "step", plan=load(2, [0, 1], [2, 3]))
    ranks.one(1, "step", plan=load(2, [0, 1], [2, 3]), skip_loads=True)
    first = ranks.hear(0)
    assert first["loads"] == {2: [0, 1]}
    assert "broadcasts are disabled" in first["faults"][0]
    assert first["seconds"] < 60
    again = ranks.one(0, "step", plan=load(3, [0, 1], [2, 3]))
    assert again["loads"] == {3: [0, 1]}
    assert again["seconds"] < 5 <= first["seconds"]
    late = ranks.one(1, "step", plan=load(3, [0, 1], [2, 3]))
    assert late["loads"] == {3: [0, 1]}
    assert late["seconds"] < 60


def test_without_a_group_each_rank_loads_for_itself_and_says_so(ranks):
    first, second = ranks.all("start", settings=BROADCAST, patch={"no group on": 1, "patience": 2})
    assert [(rank["shared_by"], rank["slab"]) for rank in (first, second)] == [(2, 40), (2, 40)]
    assert first["mapped"] == second["mapped"] != []
    (told,) = [line for line in first["said"] if "there is no group to broadcast in, so each rank loads for" in line]
    assert "RuntimeError: no network card" in told
    ranks.all("step", plan=store(1, [0, 1], [0, 1]))
    assert loaded(ranks, load(2, [0, 1], [2, 3])) == [[], []]


def test_ranks_that_are_killed_leave_nothing_behind(tmp_path):
    ranks = Ranks(tmp_path)
    try:
        started = ranks.all("start", settings=SHARED)
        # None that has a name: it would outlive a process that is killed. Names that others give do not count.
        mapped = [Path(f"/proc/{process.pid}/maps").read_text() for process in ranks.processes]
        assert not any("/dev/shm/" in maps and "kvbm" in maps.partition("/dev/shm/")[2] for maps in mapped)
        assert all("kvbm-host-tier" in maps for maps in mapped)
    finally:
        ranks.kill()
    assert not [process for process in ranks.processes if process.is_alive()]
    (inode,) = started[0]["mapped"]
    assert not _who_maps(inode)


def test_a_closed_slab_is_gone(party):
    (first, _) = party.all("start", settings=SHARED)
    assert first["mapped"]
    assert party.all("close") == [[], []]


def _who_maps(inode):
    found = []
    for process in os.listdir("/proc"):
        if process.isdigit():
            try:
                with open(f"/proc/{process}/maps") as maps:
                    found += [process for line in maps if "kvbm-host-tier" in line and line.split()[4] == inode]
            except OSError:
                pass
    return found
