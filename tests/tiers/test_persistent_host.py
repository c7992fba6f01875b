"""A host tier that outlives the engine, as one rank and its leader see it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import logging
import random
import re
import sqlite3
import subprocess
import sys

import numpy as np
import pytest
import torch

from kvbm import config as settings
from kvbm.core.manager import BlockManager
from kvbm.core.pool import Pool
from kvbm.plans import Copy, Hello, Report, StepPlan, StorePlan, StoreResult, TierHello
from kvbm.runtime.leader import Leader
from kvbm.runtime.rank import Rank
from kvbm.runtime.tiers import open_manager
from kvbm.tiers.base import fingerprint
from kvbm.tiers.disk.cache_dir import LOCK, cache_directory
from kvbm.tiers.disk.index import Index
from kvbm.tiers.host.persistent_slab import digest, rows_of
from kvbm.tiers.lock import CacheInUse, FileLock
from kvbm.transfer import open_copier
from kvbm.transfer.base import slots_tried
from tiernames import HOST

CACHE = {"model": "some-model", "block_size": 16}
SLOTS, BLOCKS = 16, 8


def key_of(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


class Engine:
    """A rank over a cache of its own, driven by hand."""

    def __init__(self, folder, cache=CACHE, **options):
        values = {
            "cpu_cache_override_num_blocks": SLOTS,
            "host_persist": True,
            "host_persist_dir": str(folder),
            **options,
        }
        self.config = settings.load(extra=values, environ={}, files=[])
        self.cache = torch.zeros(BLOCKS, 2, 2, 640, dtype=torch.int32)
        self.rank = Rank(self.config, 0, 1, cache=cache, keeps_host=True)
        self.rank.register({f"layer {i}": self.cache[:, i] for i in range(2)}, BLOCKS)
        self.hello = self.rank.open()

    def step(self, **plans):
        plan, worker = StepPlan(**plans), self.rank.worker
        worker.begin(plan)
        worker.start_loads(plan)
        worker.start_stores(plan)
        return worker.poll()

    def store(self, plan: int, slots, keys):
        """Engine blocks 0, 1, ... to these slots; returns when that is confirmed."""
        copy = Copy(HOST, slots, list(range(len(slots))), tags=keys)
        outcome = self.step(stores=[StorePlan(plan, copy)])
        while not outcome.report.stores:
            outcome = self.rank.worker.poll()
        (result,) = outcome.report.stores
        assert (result.id, result.ok) == (plan, True)

    @property
    def good(self):
        bits = np.frombuffer(self.hello.tiers[0].intact, np.uint8)
        return [int(slot) for slot in np.flatnonzero(np.unpackbits(bits))]


@pytest.fixture
def make(tmp_path):
    made = []

    def engine(**options):
        made.append(Engine(tmp_path, **options))
        return made[-1]

    yield engine
    for each in made:
        each.rank.close()


@pytest.fixture
def place(tmp_path, make):
    """Where the cache lies: (directory, fingerprint)."""
    engine = make()
    name = fingerprint(CACHE, engine.rank.layout.description)
    engine.rank.close()
    return cache_directory(tmp_path, name), name


def enter(place, *pairs):
    index = Index.open(*place, SLOTS)
    index.put([(key_of(number), slot) for number, slot in pairs])
    index.close()


def test_a_new_slab_holds_nothing(make):
    assert make().good == []
    assert make(host_persist=False).hello.tiers[0].intact == b""


@pytest.mark.parametrize(("verdicts", "found"), [({7: True}, [2, 3]), ({7: False}, []), ({}, [])])
def test_only_what_the_leader_has_called_good_is_found_again(verdicts, found, make, place):
    engine = make()
    engine.cache += 5
    engine.store(7, [3, 2], [key_of(1), key_of(2)])
    engine.step(verdicts=verdicts)
    engine.rank.close()
    enter(place, (1, 3), (2, 2))
    assert make().good == found


def test_a_slot_answers_only_to_the_block_that_the_index_names(make, place):
    engine = make()
    engine.store(7, [3, 2], [key_of(1), key_of(2)])
    engine.step(verdicts={7: True})
    engine.rank.close()
    enter(place, (1, 2), (2, 3), (4, 5))
    assert make().good == []


def test_a_store_that_began_on_top_of_a_kept_block_makes_it_unfit(make, place):
    """As if the process had died in the middle of it."""
    engine = make()
    engine.store(7, [3, 2], [key_of(1), key_of(2)])
    engine.step(verdicts={7: True})
    engine.cache += 9
    engine.store(8, [3], [key_of(4)])
    engine.rank.close()
    enter(place, (1, 3), (2, 2))
    assert make().good == [2]


def test_blocks_outlive_a_copier_that_tries_itself_out_on_their_slots(make, place, monkeypatch):
    """As one for CUDA does when it is made, on as many slots as there are blocks in the engine's cache."""
    engine = make()
    engine.cache += 5
    engine.store(7, [0, 3, BLOCKS - 1], [key_of(1), key_of(2), key_of(3)])
    engine.step(verdicts={7: True})
    engine.rank.close()
    enter(place, (1, 0), (2, 3), (3, BLOCKS - 1))

    def open_and_try(device, layout, slab, *rest):
        tried = slots_tried(layout.block_bytes, layout.num_blocks, slab.slots)
        assert tried == BLOCKS
        ctypes.memset(slab.address, 77, tried * layout.slot_bytes)
        return open_copier(device, layout, slab, *rest)

    monkeypatch.setattr("kvbm.runtime.rank.open_copier", open_and_try)
    assert make().good == [0, 3, BLOCKS - 1]


def test_ranks_read_the_index_side_by_side(place):
    enter(place, (1, 3))
    other = FileLock(place[0] / LOCK, shared=True)
    assert rows_of(place[0]) == [(3, key_of(1))]
    with pytest.raises(CacheInUse):
        FileLock(place[0] / LOCK)
    other.release()
    FileLock(place[0] / LOCK).release()


def test_another_model_has_memory_of_its_own(make, tmp_path):
    make().rank.close()
    make(cache={**CACHE, "model": "another"})
    assert len(list(tmp_path.glob("kvbm-*/rank-0.slab"))) == 2


def test_a_filesystem_that_is_too_small_costs_the_next_engine_its_hits(make, monkeypatch, caplog):
    monkeypatch.setattr("kvbm.tiers.host.persistent_slab.refuse_if_too_large", lambda size: None)
    monkeypatch.setattr(
        "kvbm.tiers.host.persistent_slab.os.fstatvfs", lambda fd: type("V", (), {"f_bavail": 1, "f_frsize": 4096})
    )
    engine = make()
    assert engine.hello.tiers[0].intact == b""
    assert engine.hello.slots[HOST] == SLOTS
    assert "this engine's host tier will not survive a restart: DYN_KVBM_CPU_CACHE_GB asks for" in caplog.text
    assert "mount -o remount" in caplog.text


def fail(*_, **__):
    raise RuntimeError("of a kind that no caller expects")


@pytest.mark.parametrize("where", ["private_directory", "PersistentSlab.__init__", "rows_of"])
def test_a_rank_starts_whatever_goes_wrong_with_memory_from_before(where, make, place, monkeypatch, caplog):
    with monkeypatch.context() as broken:
        broken.setattr(f"kvbm.tiers.host.open.{where}", fail)
        engine = make()
    assert (engine.hello.tiers[0].intact, engine.hello.slots[HOST]) == (b"", SLOTS)
    assert "RuntimeError: of a kind that no caller expects" in caplog.text
    assert make().hello.tiers[0].intact  # no lock is left behind


def test_a_rank_starts_whatever_goes_wrong_with_its_disk(make, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("kvbm.tiers.disk.open.open_file", fail)
    engine = make(host_persist=False, disk_cache_override_num_blocks=8, disk_cache_dir=str(tmp_path))
    assert engine.hello.slots == {HOST: SLOTS}
    assert "goes on without a disk tier: RuntimeError" in caplog.text


@pytest.mark.parametrize("where", ["rows_of", "Index.open"])
def test_a_leader_starts_whatever_goes_wrong_with_memory_from_before(where, make, monkeypatch, caplog):
    engine = make()
    monkeypatch.setattr(f"kvbm.tiers.host.persistent_host.{where}", fail)
    assert not open_manager(engine.config, [engine.hello], CACHE).outlives_engine
    assert "RuntimeError: of a kind that no caller expects" in caplog.text


def test_ranks_that_find_no_room_together_go_on_with_memory_that_ends_with_them(make, monkeypatch, caplog, tmp_path):
    """Each has seen room for its own share, and the pages run out while they come."""

    def full(fd, offset, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as crowded:
        crowded.setattr("kvbm.tiers.host.persistent_slab.os.posix_fallocate", full)
        engine = make()
    assert (engine.hello.tiers[0].intact, engine.hello.slots[HOST]) == (b"", SLOTS)
    assert "this engine's host tier will not survive a restart: DYN_KVBM_CPU_CACHE_GB asks for" in caplog.text
    engine.store(1, [0, SLOTS - 1], [key_of(0), key_of(1)])
    (slab,) = tmp_path.glob("kvbm-*/rank-0.slab")
    assert slab.stat().st_blocks == 0  # nothing stays taken
    assert make().hello.tiers[0].intact  # and nobody holds the file


def test_an_index_that_cannot_be_read_costs_what_it_named(make, place, caplog):
    engine = make()
    engine.store(7, [3], [key_of(1)])
    engine.step(verdicts={7: True})
    engine.rank.close()
    enter(place, (1, 3))
    (place[0] / "index.sqlite").write_bytes(b"no database at all" * 100)
    assert make().good == []
    assert "discarding the persisted blocks: index.sqlite is damaged" in caplog.text


def kept_block(make, place):
    """A block in slot 3 that the next engine finds."""
    engine = make()
    engine.store(7, [3], [key_of(1)])
    engine.step(verdicts={7: True})
    engine.rank.close()
    enter(place, (1, 3))


@pytest.fixture
def locked(place, monkeypatch):
    """Another process, as far as SQLite can tell, has the index for itself while the context lasts. It is waited for
    only shortly."""
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda path, **options: connect(path, **{**options, "timeout": 0.2}))

    @contextlib.contextmanager
    def lock():
        code = (
            "import sqlite3, sys\ndatabase = sqlite3.connect(sys.argv[1])\n"
            "database.execute('PRAGMA locking_mode = EXCLUSIVE')\ndatabase.execute('BEGIN EXCLUSIVE')\n"
            "print('locked', flush=True)\nsys.stdin.read()\n"
        )
        command = [sys.executable, "-c", code, place[0] / "index.sqlite"]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert child.stdout.readline() == "locked\n"
            yield
        finally:
            child.communicate()

    return lock


def test_an_index_that_is_locked_costs_the_next_engine_nothing(make, place, locked, caplog):
    """This one stores to memory of its own: what lies in the slots of the last one stays."""
    kept_block(make, place)
    with locked():
        engine = make()
        assert (engine.hello.tiers[0].intact, engine.hello.slots[HOST]) == (b"", SLOTS)
        engine.store(1, list(range(8)), [key_of(100 + i) for i in range(8)])
        engine.rank.close()
    assert "another process has locked" in caplog.text
    assert re.search(r"waited \d+\.\d s", caplog.text)
    assert "Blocks saved by the previous engine are untouched" in caplog.text
    assert make().good == [3]


def test_without_memory_for_a_second_host_tier_the_engine_starts_all_the_same(make, place, locked, monkeypatch, caplog):
    kept_block(make, place)
    monkeypatch.setattr("kvbm.tiers.host.open.available_memory", lambda: 0)
    with locked():
        engine = make()
        assert engine.good == []
        assert engine.hello.slots[HOST] == SLOTS
    assert "blocks of the last engine are lost" in caplog.text


@pytest.mark.parametrize("seed", range(8))
def test_a_flipped_bit_in_the_index_costs_blocks_and_no_start(make, place, seed):
    kept_block(make, place)
    path, chance = place[0] / "index.sqlite", random.Random(seed)
    raw = bytearray(path.read_bytes())
    raw[chance.choice((raw.index(b"CREATE TABLE") + chance.randrange(100), chance.randrange(len(raw))))] ^= 1 << 3
    path.write_bytes(raw)
    engine = make()
    assert engine.good in ([], [3])
    manager = open_manager(engine.config, [engine.hello], CACHE)
    assert manager.outlives_engine
    assert set(manager.catalogs[HOST].findable) <= {key_of(1)}
    manager.close()


# -- the leader's books -----------------------------------------------------------------------------------------------


def bits(*slots, of=SLOTS):
    return np.packbits([slot in slots for slot in range(of)]).tobytes()


@pytest.fixture
def books(tmp_path):
    config = settings.load(
        extra={"host_persist": True, "host_persist_dir": str(tmp_path), "cpu_cache_gb": 1}, environ={}, files=[]
    )
    opened = []

    def hello(rank, kept, layout, slots):
        directory = cache_directory(tmp_path, fingerprint(CACHE, layout))
        compared = digest(directory, rows_of(directory), slots)
        return Hello(rank, 100, layout, [TierHello(HOST, slots, intact=kept, index=compared)])

    def make(*kept, layouts="LL", slots=(SLOTS, SLOTS)):
        hellos = [hello(rank, each, layouts[rank], slots[rank]) for rank, each in enumerate(kept)]
        manager = open_manager(config, hellos, CACHE)
        opened.append(manager)
        return manager, manager if manager.outlives_engine else None

    yield make
    for each in opened:
        each.close()  # for some the second time


def publish(manager, *numbers):
    plan = manager.store([key_of(number) for number in numbers], list(range(len(numbers))))
    manager.finish_store(plan.id, ok=True)
    return plan


def test_what_every_rank_has_found_whole_is_adopted_and_the_rest_forgotten(books, caplog):
    caplog.set_level(logging.INFO)
    manager, first = books(bits(), bits())
    plan = publish(manager, 1, 2, 3)
    assert plan.copy.tags == [key_of(1), key_of(2), key_of(3)]
    slots = plan.copy.slots
    first.close()
    manager, second = books(bits(*slots), bits(*slots[:2]))
    assert set(manager.catalogs[HOST].findable) == {key_of(1), key_of(2)}
    assert "2 of 16 blocks are there from before, 1 were not whole" in caplog.text
    second.close()
    manager, _ = books(bits(*range(SLOTS)), bits(*range(SLOTS)))
    assert set(manager.catalogs[HOST].findable) == {key_of(1), key_of(2)}


def test_the_leader_gives_every_verdict_once(books):
    manager, _ = books(bits())
    leader = Leader(manager, 1)
    good, bad = leader.offload([key_of(1)], [0]), leader.offload([key_of(2)], [1])
    assert not leader.owes_verdicts
    leader.apply([Report(0, stores=[StoreResult(good.id), StoreResult(bad.id, ok=False)])])
    assert leader.owes_verdicts
    assert leader.take_verdicts() == {good.id: True, bad.id: False}
    assert not leader.owes_verdicts
    assert leader.take_verdicts() == {}


def test_without_a_persistent_host_tier_no_rank_waits_for_verdicts():
    leader = Leader(BlockManager({HOST: Pool(SLOTS)}), 1)
    plan = leader.offload([key_of(1)], [0])
    leader.apply([Report(0, stores=[StoreResult(plan.id)])])
    assert not leader.owes_verdicts
    assert plan.copy.tags == []


def test_after_a_reset_nothing_more_is_entered_and_tags_are_others(books):
    manager, kept = books(bits())
    publish(manager, 1)
    Leader(manager, 1).reset()
    plan = publish(manager, 1)
    assert plan.copy.tags != [key_of(1)]
    kept.close()
    manager, _ = books(bits(*range(SLOTS)))
    assert manager.catalogs[HOST].published == 0


def test_where_a_rank_does_not_keep_its_own_nobody_does(books):
    assert books(bits(), b"")[1] is None
    manager, kept = books(bits(), bits(), layouts="LM")
    assert kept is None
    assert not manager.tags_stores


def test_blocks_come_back_in_the_order_of_their_use(books):
    manager, kept = books(bits())
    for number in range(4):
        publish(manager, number)
    Leader(manager, 1).touch([key_of(0)])
    kept.close()
    manager, _ = books(bits(*range(SLOTS)))
    pool = manager.catalogs[HOST]
    pool.reserve([key_of(100 + i) for i in range(SLOTS - 1)])
    assert list(pool.findable) == [key_of(0)]


def test_ranks_that_have_room_for_different_numbers_of_slots_agree_on_those_of_all(books):
    """The stages of a pipeline have different layers: 16 slots here and 26 there from the same gigabytes."""
    slots = (SLOTS, SLOTS + 10)
    manager, kept = books(bits(), bits(of=slots[1]), slots=slots)
    used = publish(manager, 1, 2).copy.slots
    kept.close()
    manager, _ = books(bits(*used), bits(*used, 20, of=slots[1]), slots=slots)
    assert set(manager.catalogs[HOST].findable) == {key_of(1), key_of(2)}


def test_a_fault_while_taking_over_costs_the_blocks_and_not_the_engine(books, monkeypatch, caplog):
    with monkeypatch.context() as broken:
        broken.setattr(Pool, "adopt", lambda self, entries: 1 // 0)
        manager, kept = books(bits())
    assert kept is None
    assert not manager.tags_stores
    assert "the host tier is not persistent: ZeroDivisionError" in caplog.text
    assert books(bits())[1] is not None  # the index was let go of


@pytest.fixture
def two_caches(make, tmp_path):
    """Two models, each with four blocks from before."""
    caches = []
    for weights, first in (("a", 0), ("b", 100)):
        caches.append({**CACHE, "weights": weights})
        engine = make(cache=caches[-1])
        keys = [key_of(first + i) for i in range(4)]
        engine.store(1, [0, 1, 2, 3], keys)
        engine.step(verdicts={1: True})
        engine.rank.close()
        name = fingerprint(caches[-1], engine.rank.layout.description)
        enter((cache_directory(tmp_path, name), name), *((first + i, i) for i in range(4)))
    return caches


def take_over(engine, cache):
    manager = open_manager(engine.config, [engine.hello], cache)
    kept = manager.near.journal
    manager.close()
    return kept, set(manager.catalogs[HOST].findable)


def test_the_leader_takes_over_only_what_the_ranks_have_compared(make, two_caches, caplog):
    """Both work out which cache is theirs, at different times: the model's folder may have moved between them."""
    a, b = two_caches
    engine = make(cache=a)
    assert take_over(engine, b) == (None, set())
    assert "has compared its memory with another index" in caplog.text
    assert take_over(engine, a)[1] == {key_of(i) for i in range(4)}


def test_who_cannot_keep_the_books_is_told_which_setting_to_change(make, place, monkeypatch, caplog):
    monkeypatch.setattr("kvbm.tiers.host.persistent_host.PATIENCE_SECONDS", 0)
    engine = make()
    monkeypatch.setattr("kvbm.tiers.host.persistent_host.rows_of", lambda directory: [])
    index = Index.open(*place, SLOTS)  # another leader
    assert take_over(engine, CACHE)[0] is None
    index.close()
    assert "is in use by another engine" in caplog.text
    assert "KVBM_HOST_PERSIST_DIR" in caplog.text
    assert "DYN_KVBM_DISK_CACHE_DIR" not in caplog.text


def test_two_caches_without_blocks_are_still_two(make):
    engine = make()
    assert take_over(engine, {**CACHE, "weights": "b"})[0] is None
    assert take_over(engine, CACHE)[0] is not None


def test_an_index_that_has_changed_since_it_was_compared_is_not_taken_over(make, place):
    engine = make()
    engine.store(7, [3], [key_of(1)])
    engine.step(verdicts={7: True})
    engine.rank.close()
    enter(place, (1, 3))
    engine = make()
    enter(place, (2, 3))
    assert take_over(engine, CACHE) == (None, set())
