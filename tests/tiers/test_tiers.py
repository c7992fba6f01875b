"""The leader's start: which disk all ranks can use together, and what it holds from the engine before."""

import contextlib
import sqlite3
from pathlib import Path

import pytest

from kvbm import config as settings
from kvbm.core.rate import Rate
from kvbm.plans import Hello, TierHello
from kvbm.runtime.leader import Leader
from kvbm.runtime.tiers import DiskTier, agreed_weights, make_manager, measured
from kvbm.tiers.disk.index import cache_directory, fingerprint
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


def test_the_disk_is_as_large_as_that_of_the_poorest_rank(tmp_path):
    disk = DiskTier.open(config(tmp_path), [hello(0, 20), hello(1, 15)], CACHE)
    manager = make_manager([hello(0, 20), hello(1, 15)], disk)
    assert {tier: pool.size for tier, pool in manager.catalogs.items()} == {HOST: 10, DISK: 15}
    disk.index.close()


def test_a_rank_without_a_disk_is_an_engine_without_one(tmp_path):
    assert DiskTier.open(config(tmp_path), [hello(0, 20), hello(1, 0)], CACHE) is None
    assert list(make_manager([hello()], None).catalogs) == [HOST]


def test_what_the_engine_before_has_written_is_found(tmp_path):
    first = DiskTier.open(config(tmp_path), [hello()], CACHE)
    first.index.put([(b"a", 3), (b"b", 7)])
    first.index.close()
    second = DiskTier.open(config(tmp_path), [hello()], CACHE)
    assert [second.pool.find(key) for key in (b"a", b"b")] == [3, 7]
    second.index.close()
    other = {**CACHE, "model": "other"}
    assert DiskTier.open(config(tmp_path), [hello(cache=other)], other).pool.published == 0


def test_the_leader_reads_no_index_but_that_of_the_ranks(tmp_path, caplog):
    """Should they ever work out different names for their cache."""
    moved = {**CACHE, "weights": "moved"}
    assert DiskTier.open(config(tmp_path), [hello(0), hello(1, cache=moved)], CACHE) is None
    assert "the ranks compute different cache directories" in caplog.text
    assert not list(tmp_path.iterdir())


def test_a_cache_in_use_is_left_alone_with_a_sentence(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("kvbm.runtime.tiers.PATIENCE_SECONDS", 0.1)
    first = DiskTier.open(config(tmp_path), [hello()], CACHE)
    assert DiskTier.open(config(tmp_path), [hello()], CACHE) is None
    assert "there is no disk tier" in caplog.text
    assert "in use by another engine" in caplog.text
    first.index.close()


def test_a_locked_index_costs_this_engine_its_disk_and_the_next_one_nothing(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("kvbm.tiers.disk.database._LOCK_SECONDS", 0.3)
    first = DiskTier.open(config(tmp_path), [hello()], CACHE)
    first.index.put([(b"a", 3)])
    first.index.close()
    with contextlib.closing(sqlite3.connect(first.index.directory / "index.sqlite")) as backup:
        backup.execute("PRAGMA locking_mode = EXCLUSIVE")
        backup.execute("BEGIN EXCLUSIVE")
        assert DiskTier.open(config(tmp_path), [hello()], CACHE) is None
    assert "there is no disk tier: another process has locked" in caplog.text
    assert "waited 0." in caplog.text
    assert "This engine runs without it; blocks on disk are kept for the next start" in caplog.text
    again = DiskTier.open(config(tmp_path), [hello()], CACHE)
    assert again.pool.find(b"a") == 3
    again.index.close()


def test_ranks_of_different_layouts_share_a_cache_only_as_stages_of_a_pipeline(tmp_path, caplog):
    stages = {**CACHE, "pipeline_parallel": 2}
    hellos = [hello(0, layout="3*x"), hello(1, layout="2*x")]
    assert DiskTier.open(config(tmp_path), hellos, CACHE) is None
    assert "different kinds" in caplog.text
    disk = DiskTier.open(config(tmp_path), [hello(i, layout=f"{3 - i}*x", cache=stages) for i in range(2)], stages)
    assert disk is not None
    disk.index.close()
    hellos = [hello(0, layout="3*x", cache=stages), hello(1, layout="2*y", cache=stages)]
    assert DiskTier.open(config(tmp_path), hellos, stages) is None


@pytest.mark.parametrize(
    ("values", "filtered"),
    [({}, True), ({"disable_disk_offload_filter": True}, False), ({"cpu_cache_gb": 0}, False)],
    ids=["usual", "switched off", "disk only"],
)
def test_the_filter_is_between_host_memory_and_disk_and_nowhere_else(values, filtered, tmp_path):
    settings = config(tmp_path, **values)
    disk = DiskTier.open(settings, [hello()], CACHE)
    leader = Leader(make_manager([hello()], disk), 1)
    disk.serve(settings, leader)
    (edge,) = leader.edges
    assert (edge.source, edge.target) == (HOST, DISK)
    edge.stored([b"a"])
    assert leader.counts.filtered_move_blocks == {DISK: int(filtered)}
    assert edge.bypass is (not settings.has_host_tier)
    disk.index.close()


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
