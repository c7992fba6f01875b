"""The leader's start: which disk all ranks can use together, and what it holds from the engine before."""

import contextlib
import ctypes
import mmap
import sqlite3
from pathlib import Path

import pytest

from kvbm import config as settings
from kvbm.core.rate import Rate
from kvbm.plans import Hello, TierHello
from kvbm.runtime.leader import Leader
from kvbm.runtime.tiers import agreed_weights, connect, measured, open_manager
from kvbm.tiers import disk
from kvbm.tiers.base import RankContext, fingerprint
from kvbm.tiers.disk.cache_dir import cache_directory
from tiernames import DISK, HOST

CACHE = {"model": "m", "pipeline_parallel": 1}


def config(folder, **values):
    return settings.load(
        extra={"cpu_cache_gb": 1, "disk_cache_gb": 1, "disk_cache_dir": str(folder), **values}, environ={}, files=[]
    )


def hello(rank=0, disk=20, layout="2*x", rate=None, cache=CACHE):
    tiers = [TierHello(HOST, 10)]
    if disk:
        tiers.append(TierHello(DISK, disk, rate, cache_directory(Path(), fingerprint(cache, layout)).name))
    return Hello(rank, 100, layout, tiers)


def open_disk(config, hellos, cache):
    """The disk's catalog, or None where the engine has to do without."""
    return open_manager(config, hellos, cache).catalogs.get(DISK)


def test_the_disk_is_as_large_as_that_of_the_poorest_rank(tmp_path):
    manager = open_manager(config(tmp_path), [hello(0, 20), hello(1, 15)], CACHE)
    assert {tier: pool.size for tier, pool in manager.catalogs.items()} == {HOST: 10, DISK: 15}
    manager.close()


def test_a_rank_without_a_disk_is_an_engine_without_one(tmp_path):
    assert open_disk(config(tmp_path), [hello(0, 20), hello(1, 0)], CACHE) is None
    assert list(open_manager(config(tmp_path), [hello()], None).catalogs) == [HOST]


def test_what_the_engine_before_has_written_is_found(tmp_path):
    first = open_disk(config(tmp_path), [hello()], CACHE)
    first.journal.put([(b"a", 3), (b"b", 7)])
    first.close()
    second = open_disk(config(tmp_path), [hello()], CACHE)
    assert [second.find(key) for key in (b"a", b"b")] == [3, 7]
    second.close()
    other = {**CACHE, "model": "other"}
    assert open_disk(config(tmp_path), [hello(cache=other)], other).published == 0


def test_the_leader_reads_no_index_but_that_of_the_ranks(tmp_path, caplog):
    """Should they ever work out different names for their cache."""
    moved = {**CACHE, "weights": "moved"}
    assert open_disk(config(tmp_path), [hello(0), hello(1, cache=moved)], CACHE) is None
    assert "the ranks compute different cache directories" in caplog.text
    assert not list(tmp_path.iterdir())


def test_a_cache_in_use_is_left_alone_with_a_sentence(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("kvbm.tiers.disk.open.PATIENCE_SECONDS", 0.1)
    first = open_disk(config(tmp_path), [hello()], CACHE)
    assert open_disk(config(tmp_path), [hello()], CACHE) is None
    assert "there is no disk tier" in caplog.text
    assert "in use by another engine" in caplog.text
    first.close()


def test_a_locked_index_costs_this_engine_its_disk_and_the_next_one_nothing(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("kvbm.tiers.disk.database._LOCK_SECONDS", 0.3)
    first = open_disk(config(tmp_path), [hello()], CACHE)
    first.journal.put([(b"a", 3)])
    directory = first.journal.directory
    first.close()
    with contextlib.closing(sqlite3.connect(directory / "index.sqlite")) as backup:
        backup.execute("PRAGMA locking_mode = EXCLUSIVE")
        backup.execute("BEGIN EXCLUSIVE")
        assert open_disk(config(tmp_path), [hello()], CACHE) is None
    assert "there is no disk tier: another process has locked" in caplog.text
    assert "waited 0." in caplog.text
    assert "This engine runs without it; blocks on disk are kept for the next start" in caplog.text
    again = open_disk(config(tmp_path), [hello()], CACHE)
    assert again.find(b"a") == 3
    again.close()


def test_ranks_of_different_layouts_share_a_cache_only_as_stages_of_a_pipeline(tmp_path, caplog):
    stages = {**CACHE, "pipeline_parallel": 2}
    hellos = [hello(0, layout="3*x"), hello(1, layout="2*x")]
    assert open_disk(config(tmp_path), hellos, CACHE) is None
    assert "different kinds" in caplog.text
    shared = open_disk(config(tmp_path), [hello(i, layout=f"{3 - i}*x", cache=stages) for i in range(2)], stages)
    assert shared is not None
    shared.close()
    hellos = [hello(0, layout="3*x", cache=stages), hello(1, layout="2*y", cache=stages)]
    assert open_disk(config(tmp_path), hellos, stages) is None


@pytest.mark.parametrize(
    ("values", "filtered"),
    [({}, True), ({"disable_disk_offload_filter": True}, False), ({"cpu_cache_gb": 0}, False)],
    ids=["usual", "switched off", "disk only"],
)
def test_the_filter_is_between_host_memory_and_disk_and_nowhere_else(values, filtered, tmp_path):
    settings = config(tmp_path, **values)
    leader = Leader(open_manager(settings, [hello()], CACHE), 1)
    connect(settings, [hello()], leader)
    (edge,) = leader.edges
    assert (edge.source, edge.target) == (HOST, DISK)
    edge.stored([b"a"])
    assert leader.counts.filtered_move_blocks == {DISK: int(filtered)}
    assert edge.bypass is (not settings.has_host_tier)
    leader.manager.close()


def test_a_store_is_opened_without_an_engine_s_tensors(tmp_path):
    """As a process does that has pages and no KV cache of its own."""
    made = config(tmp_path, disk_cache_override_num_blocks=4)
    cache = {"model": "pages"}
    store = disk.TIER.open_store(RankContext(made, 0, 1, 5000, 8192, cache)).result()
    assert (store.slots, store.identity) == (4, cache_directory(tmp_path, cache).name)
    memory = mmap.mmap(-1, 8192)
    memory[:6] = b"a page"
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert store.write([2], [address], [b"key"]).wait(60)
    memory[:6] = b"other "
    assert store.read([2], [address], [b"key"]).wait(60)
    assert memory[:6] == b"a page"
    assert store.close()


def test_a_setting_that_holds_no_block_is_refused_by_the_tier(tmp_path):
    made = config(tmp_path, disk_cache_gb=1e-6)
    with pytest.raises(ValueError, match=r"DYN_KVBM_DISK_CACHE_GB=1e-06 holds no block: one block takes 0\.010000 GB"):
        disk.TIER.open_store(RankContext(made, 0, 2, 5_000_000, 5_001_216, {"model": "m"}))


def test_the_slowest_rank_says_how_fast_a_tier_is():
    assert measured([hello(0, rate=(5e9, 0.001)), hello(1, rate=(4e9, 0.003))], DISK) == Rate(4e9, 0.003)
    assert measured([hello(0, rate=(5e9, 0.001)), hello(1)], DISK) is None
    assert measured([], DISK) is None


@pytest.mark.parametrize(
    ("digests", "agreed", "said"),
    [
        (["a", "a"], "a", ""),
        (["", ""], "", ""),
        (["a", "b"], "", "rank 0: a, rank 1: b"),
        (["a", ""], "", "rank 1: none"),
    ],
)
def test_ranks_that_disagree_on_their_weights_keep_nothing_for_the_next_engine(digests, agreed, said, caplog):
    hellos = [Hello(rank, 100, {HOST: 10}, "x", weights=weights) for rank, weights in enumerate(digests)]
    assert agreed_weights(hellos) == agreed
    assert said in caplog.text
    assert ("persistence is off" in caplog.text) == bool(said)
