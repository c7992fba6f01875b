"""What is behind the SGLang backend: pages go in and come out as they were, or are said not to be there."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvbm import config as settings
from kvbm.engines.sglang.observed import StoreSource
from kvbm.engines.sglang.shared import KeyMap, Reader
from kvbm.engines.sglang.store import Sizes, Store
from kvbm.observe.findings import explain
from kvbm.observe.metrics import render
from kvbm.observe.snapshot import Identity
from kvbm.tiers.disk import inspect as caches
from kvbm.tiers.disk.index import KEY_MAP
from tiernames import DISK, HOST

PAGE = 3 * 4096 - 512  # no multiple of a disk's block
CACHE = {"engine": "sglang", "model": "test", "shape": "x"}
SOON = 5.0


def keys(*numbers):
    return [hashlib.sha256(str(number).encode()).digest() for number in numbers]


class Pages:
    """Memory of the engine: every page in two pieces that lie apart, at addresses that are aligned to nothing."""

    def __init__(self, count):
        self.memory = np.zeros((2, count, PAGE // 2 + 8), dtype=np.uint8)
        self.count = count

    def __getitem__(self, page):
        base, (half, row, _) = self.memory.ctypes.data + 8, self.memory.strides
        return [(base + page * row, PAGE // 2), (base + half + page * row, PAGE // 2)]

    def all(self):
        return [self[page] for page in range(self.count)]

    def content(self, page):
        return self.memory[:, page, 8:].tobytes()

    def fill(self, page, number):
        self.memory[:, page, 8:] = np.frombuffer(content_of(number), dtype=np.uint8).reshape(2, -1)


def content_of(number):
    return random.Random(number).randbytes(PAGE)


def settings_for(tmp_path, **values):
    return settings.load(extra={"disk_cache_dir": str(tmp_path), "disk_bounce_mb": 1, **values}, environ={}, files=[])


@pytest.fixture
def stores(tmp_path):
    made = []

    def make(host=0, disk=64, cache=CACHE, shown=None, **values):
        made.append(Store(settings_for(tmp_path, **values), cache, PAGE, Sizes(host, disk), shown=shown))
        return made[-1]

    yield make
    for store in made:
        store.close()


def put(store, numbers, pages=None):
    pages = pages or Pages(len(numbers))
    for page, number in enumerate(numbers):
        pages.fill(page, number)
    return store.put(keys(*numbers), [pages[page] for page in range(len(numbers))], time.monotonic() + SOON)


def get(store, numbers, patience=SOON):
    """What came: the number for every page that is right, None for one that did not come."""
    pages = Pages(len(numbers))
    came = store.get(keys(*numbers), pages.all(), patience)
    for page, (number, good) in enumerate(zip(numbers, came, strict=True)):
        assert pages.content(page) == (content_of(number) if good else bytes(PAGE))
    return [number if good else None for number, good in zip(numbers, came, strict=True)]


@pytest.mark.parametrize(("host", "disk"), [(0, 200), (200, 0), (40, 200)], ids=["disk", "host", "both"])
def test_pages_come_back_as_they_were(stores, host, disk):
    store = stores(host, disk)
    numbers = list(range(150))
    assert all(put(store, numbers))
    assert store.count(keys(*numbers)) == 150
    assert get(store, numbers) == numbers
    assert get(store, [3, 1, 149]) == [3, 1, 149]


def test_a_get_ends_at_the_first_page_that_is_not_there(stores):
    store = stores()
    put(store, [1, 2, 4])
    assert store.count(keys(1, 2, 3, 4)) == 2
    assert get(store, [1, 2, 3, 4]) == [1, 2, None, None]
    assert store.has(keys(1, 3, 4)) == [True, False, True]


def test_what_was_wanted_last_stays_longest(stores):
    store = stores(disk=32)
    put(store, range(32))
    get(store, range(8))
    put(store, range(100, 124))
    disk = store._manager.catalogs[DISK]
    assert [number for number in range(32) if keys(number)[0] in disk] == list(range(8))


def test_a_page_is_written_once(stores):
    store = stores()
    put(store, [1, 2])
    put(store, [1, 2, 3])
    assert store.counts.offloaded_blocks == sum(store.counts.moved_blocks.values()) == 3


def test_three_threads_ask_read_and_write_at_once(stores):
    """As HiCache does. Ten thousand pages, each right or not there."""
    store = stores(host=0, disk=4096)
    numbers = list(range(10_000))
    written, wrong, stop = [], [], threading.Event()

    def ask():
        while not stop.is_set():
            at = random.randrange(len(written) + 1)
            store.count(keys(*range(at, at + 64)))

    def read():
        while not stop.is_set():
            if not written:
                continue
            start = max(0, len(written) - random.randrange(1, 4000))
            wanted = numbers[start : start + 32]
            try:
                get(store, wanted)
            except AssertionError as error:
                wrong.append(error)

    threads = [threading.Thread(target=target) for target in (ask, read)]
    for thread in threads:
        thread.start()
    for at in range(0, len(numbers), 128):
        assert all(put(store, numbers[at : at + 128]))
        written += numbers[at : at + 128]
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert sum(get(store, [number]) == [number] for number in numbers[-1000:]) > 500
    assert sum(store.counts.moved_blocks.values()) > 9000


# -- the disk ---------------------------------------------------------------------------------------------------------


def test_a_restart_finds_what_was_on_disk(stores):
    store = stores(disk=64)
    put(store, range(40))
    store.close()
    again = stores(disk=64)
    assert again.count(keys(*range(40))) == 40
    assert get(again, range(40)) == list(range(40))


def test_another_model_finds_nothing(stores):
    store = stores()
    put(store, [1])
    store.close()
    assert stores(cache={**CACHE, "model": "another"}).count(keys(1)) == 0


@pytest.mark.timeout(120)
def test_an_engine_that_is_killed_loses_at_most_what_its_index_had_not_written(stores, tmp_path):
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "import test_sglang_store as here; from pathlib import Path\n"
        f"store = here.Store(here.settings_for(Path({str(tmp_path)!r})), here.CACHE, here.PAGE, here.Sizes(0, 512))\n"
        "for at in range(0, 10**6, 8):\n"
        "    here.put(store, [number % 400 for number in range(at, at + 8)])\n"
        "    print(at, store._index._given, store._index._written, flush=True)\n"
    )
    path = [str(Path(__file__).parent), *sys.path]

    def safe(lines):
        """Pages whose changes of the index were in its file by the time of the last line."""
        return {
            number % 400 for at, given, _ in lines if given <= lines[-1][2] for number in range(at, at + 8)
        }  # fmt: skip

    for _ in range(3):
        engine = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        )
        lines: list[list[int]] = []
        while len(safe(lines)) < 160:
            lines.append(list(map(int, engine.stdout.readline().split())))
        time.sleep(random.random() / 10)
        engine.send_signal(signal.SIGKILL)
        engine.wait()
        # What it has said until then; the last line may be half a line.
        lines += [list(map(int, line.split())) for line in engine.stdout.read().splitlines()[:-1]]
        engine.stdout.close()
        store = stores(disk=512)
        there = [number for number in range(400) if store.has(keys(number))[0]]
        assert safe(lines) <= set(there)
        assert [got for number in there for got in get(store, [number])] == there  # each as it was written
        store.clear()
        store.close()


def test_a_page_that_was_spoiled_on_disk_is_not_served(stores):
    store = stores(disk=64)
    put(store, range(8))
    store.close()
    slab = next(store.directory.glob("*.slab"))
    with slab.open("r+b") as file:
        content = file.read()
        at = content.index(content_of(3)[:64]) + 1000
        file.seek(at)
        file.write(bytes([content[at] ^ 1]))
    again = stores(disk=64)
    assert get(again, range(8)) == [0, 1, 2, None, None, None, None, None]
    assert again.has(keys(3)) == [False]
    assert put(again, [3]) == [True]
    assert get(again, range(8)) == list(range(8))


def test_a_disk_that_does_not_answer_is_given_up_and_never_writes_to_the_page_afterwards(stores, stall):
    store = stores()
    put(store, range(4))
    store.close()
    again = stores(inject_faults="disk-slow-read")
    pages = Pages(4)
    assert again.get(keys(*range(4)), pages.all(), 0.1) == [False] * 4
    assert not stall.over.is_set()
    stall.over.set()
    assert get(again, range(4), patience=60.0) == [0, 1, 2, 3]  # after the reads that were given up
    assert not pages.memory.any()


@pytest.mark.parametrize("faults", ["disk-write:every=3", "disk-torn:every=3"])
def test_a_page_that_could_not_be_written_is_not_served(stores, faults):
    store = stores(inject_faults=faults)
    for at in range(0, 48, 2):
        put(store, [at, at + 1])
    store.close()
    again = stores()
    there = [number for number in range(48) if again.has(keys(number))[0]]
    assert all(get(again, [number]) in ([number], [None]) for number in there)


def test_a_disk_that_cannot_be_used_leaves_a_store_without_it(stores, tmp_path, caplog):
    first = stores(disk=16)
    put(first, [1])
    import kvbm.engines.sglang.store as module

    module._PATIENCE_SECONDS, before = 0.1, module._PATIENCE_SECONDS
    try:
        second = stores(disk=16)
    finally:
        module._PATIENCE_SECONDS = before
    assert "there is no disk tier" in caplog.text
    assert put(second, [1]) == [False]
    assert get(second, [1]) == [None]
    assert get(first, [1]) == [1]


def test_what_was_cleared_is_gone_for_good(stores):
    store = stores(host=16, disk=64)
    put(store, range(20))
    store.clear()
    assert store.count(keys(*range(20))) == 0
    store.close()
    assert stores(disk=64).has(keys(*range(20))) == [False] * 20


@pytest.mark.parametrize("host", [0, 16])
def test_pages_from_after_a_clear_are_not_found_by_the_next_start(stores, tmp_path, host):
    """They may be of other weights than the next start loads."""
    store = stores(host=host, shown=lambda directory, slots: KeyMap(directory / KEY_MAP, slots))
    put(store, range(8))
    store.clear()
    assert put(store, range(8)) == [True] * 8
    assert get(store, range(8)) == list(range(8))
    reader = Reader(settings_for(tmp_path), CACHE, PAGE)
    assert reader.count(keys(*range(8))) == 0
    reader.close()
    store.clear()
    assert get(store, range(8)) == [None] * 8
    store.close()
    assert stores().has(keys(*range(8))) == [False] * 8


def test_pages_that_are_being_put_during_a_clear_are_not_kept(stores, monkeypatch):
    from kvbm.engines.sglang import store as module

    store = stores(host=16, disk=0)

    def gather(page, target):
        store.clear()

    monkeypatch.setattr(module, "gather", gather)
    assert put(store, [1, 2]) == [False, False]


def test_a_store_that_was_closed_has_nothing_and_keeps_nothing(stores):
    store = stores()
    put(store, [1])
    store.close()
    assert get(store, [1]) == [None]
    assert put(store, [2]) == [False]


def test_nothing_is_left_pinned(stores):
    store = stores(host=32, disk=64, inject_faults="disk-read:every=4,disk-write:every=5")
    for at in range(0, 200, 16):
        put(store, range(at, at + 16))
        get(store, range(max(0, at - 40), at))
    end = time.monotonic() + 60
    while store._manager.busy and time.monotonic() < end:
        time.sleep(0.01)
    assert not store._manager.busy
    assert [(pool.pinned, pool.writing) for pool in store._manager.catalogs.values()] == [(0, 0), (0, 0)]


def figures(store):
    identity = Identity(
        kvbm="", engine="sglang", engine_version="", model="m", ranks=1, block_tokens=16, block_bytes=PAGE,
        engine_blocks=0,
    )  # fmt: skip
    snapshot = StoreSource(identity, store, dict).snapshot()
    text = render(snapshot).decode()
    found = {name: float(value) for name, value in re.findall(r"^(kvbm_\w+) (\S+)$", text, re.M)}
    return snapshot, found


def test_what_happens_to_pages_can_be_seen(stores):
    store = stores(host=8, disk=64)
    put(store, range(20))
    end = time.monotonic() + 60
    while sum(store.counts.moved_blocks.values()) < 20 and time.monotonic() < end:
        time.sleep(0.01)
    store.count(keys(*range(25)))
    store.count(keys(99))
    get(store, range(20))
    snapshot, found = figures(store)
    assert found["kvbm_offload_blocks_d2h"] == found["kvbm_offload_blocks_h2d"] == 20
    assert found["kvbm_onboard_blocks_h2d"] + found["kvbm_onboard_blocks_d2d"] == 20
    assert found["kvbm_matched_tokens"] == 20 * 16
    assert found["kvbm_host_cache_hit_rate"] + found["kvbm_disk_cache_hit_rate"] == pytest.approx(20 / 26)
    assert [(tier.tier, tier.slots) for tier in snapshot.tiers] == [("host", 8), ("disk", 64)]
    assert explain(snapshot)[0].name == "gain"


def test_memory_that_is_but_the_way_to_the_disk_is_no_tier(stores):
    store = stores(host=0, disk=64)
    put(store, range(4))
    snapshot, found = figures(store)
    assert [tier.tier for tier in snapshot.tiers] == ["disk"]
    assert found["kvbm_offload_blocks_d2d"] == 4


# -- one rank writes, all read ----------------------------------------------------------------------------------------


def test_a_map_of_keys_finds_what_a_dict_finds(tmp_path):
    writer = KeyMap(tmp_path / KEY_MAP, 64)
    reader = KeyMap(tmp_path / KEY_MAP)
    known, chance = {}, random.Random(1)
    for _ in range(5000):
        (key,) = keys(chance.randrange(300))
        if chance.random() < 0.5 and len(known) < 64:
            known[key] = chance.randrange(64)
            writer.put([(key, known[key])])
        elif known:
            gone = chance.choice(list(known))
            del known[gone]
            writer.remove([gone])
        assert reader.find(key) == known.get(key)
    assert [reader.find(key) for key in keys(*range(300))] == [known.get(key) for key in keys(*range(300))]
    writer.clear()
    assert [reader.find(key) for key in known] == [None] * len(known)
    reader.close()
    writer.close()


def test_a_writer_that_begins_anew_kills_no_reader(tmp_path):
    """In a process of its own: a mapping whose file was truncated ends it at the first look."""
    look = (
        "import sys; from pathlib import Path; from kvbm.engines.sglang.shared import KeyMap\n"
        "path = Path(sys.argv[1]); before, reader = KeyMap(path, 100_000), KeyMap(path)\n"
        "KeyMap(path, 1)\n"
        "print([reader.find(bytes([i]) * 32) for i in range(256)] == [None] * 256, reader.is_at(path))"
    )
    done = subprocess.run(
        [sys.executable, "-c", look, str(tmp_path / KEY_MAP)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "True False\n")


def test_other_ranks_find_a_writer_that_begins_anew(stores, tmp_path):
    shown = {"shown": lambda directory, slots: KeyMap(directory / KEY_MAP, slots)}
    store = stores(disk=64, **shown)
    put(store, range(10))
    reader = Reader(settings_for(tmp_path), CACHE, PAGE)
    assert get(reader, range(10)) == list(range(10))
    store.close()
    caches.clear(store.directory)
    again = stores(disk=64, **shown)
    put(again, range(20, 30))
    time.sleep(1.1)  # it looks for the writer's files once a second
    assert get(reader, range(20, 30)) == list(range(20, 30))
    assert reader.count(keys(1)) == 0
    reader.close()


def test_pages_are_neither_kept_nor_read_where_other_users_can_exchange_them(stores, tmp_path, caplog):
    shown = {"shown": lambda directory, slots: KeyMap(directory / KEY_MAP, slots)}
    store = stores(disk=64, **shown)
    put(store, range(10))
    store.close()
    tmp_path.chmod(0o777)
    reader = Reader(settings_for(tmp_path), CACHE, PAGE)
    assert reader.count(keys(1)) == 0
    assert get(reader, range(10)) == [None] * 10
    assert caplog.text.count(f"this rank reads no pages from disk: {tmp_path} belongs to") == 1
    store = stores(host=32, disk=64, **shown)
    assert f"there is no disk tier: {tmp_path} belongs to" in caplog.text
    put(store, range(10))  # the host tier stays
    assert get(store, range(10)) == list(range(10))
    # The directory itself is writable to others: a file in it may be another user's.
    tmp_path.chmod(0o700)
    reader.directory.chmod(0o777)
    time.sleep(1.1)  # it looks for the writer's files once a second
    assert reader.count(keys(1)) == 0
    reader.directory.chmod(0o700)
    time.sleep(1.1)
    assert get(reader, range(10)) == list(range(10))
    reader.close()


def test_other_ranks_read_what_one_has_written(stores, tmp_path):
    reader = Reader(settings_for(tmp_path), CACHE, PAGE)
    assert reader.count(keys(1)) == 0
    store = stores(disk=64, shown=lambda directory, slots: KeyMap(directory / KEY_MAP, slots))
    put(store, range(40))
    time.sleep(1.1)  # it looks for the writer's files once a second
    assert reader.count(keys(*range(50))) == 40
    assert get(reader, range(40)) == list(range(40))
    assert reader.put(keys(99), [Pages(1)[0]], 0.0) == [False]
    put(store, range(100, 164))  # pushes the others out
    assert reader.count(keys(1)) == 0
    assert get(reader, range(100, 110)) == list(range(100, 110))
    store.clear()
    assert reader.count(keys(100)) == 0
    reader.close()


def test_a_reader_is_closed_while_others_ask_and_read(stores, tmp_path):
    store = stores(0, 50, shown=lambda directory, slots: KeyMap(directory / KEY_MAP, slots))
    put(store, range(50))
    for _ in range(10):
        reader = Reader(settings_for(tmp_path), CACHE, PAGE)
        began, errors = threading.Barrier(4), []

        def use(what, reader=reader, began=began, errors=errors):
            began.wait()
            try:
                while any(what(reader)):
                    pass
            except Exception as error:
                errors.append(error)

        ways = (lambda it: it.has(keys(*range(50))), lambda it: [it.count(keys(*range(50)))], lambda it: get(it, [3]))
        threads = [threading.Thread(target=use, args=(way,)) for way in ways]
        for thread in threads:
            thread.start()
        began.wait()
        time.sleep(0.01)
        reader.close()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        assert errors == []
        reader.close()


def test_a_reader_that_comes_too_late_for_a_slot_gets_nothing_of_another_page(stores, tmp_path):
    store = stores(disk=32, shown=lambda directory, slots: KeyMap(directory / KEY_MAP, slots))
    put(store, range(32))
    reader = Reader(settings_for(tmp_path), CACHE, PAGE)
    assert get(reader, range(8)) == list(range(8))
    old = {key: reader._keys.find(key) for key in keys(*range(32))}
    put(store, range(100, 132))
    reader._keys.find = old.get  # as it was a moment ago
    assert get(reader, range(8)) == [None] * 8
    reader.close()


def test_readers_in_other_processes_see_right_pages_or_none(stores, tmp_path):
    store = stores(disk=128, shown=lambda directory, slots: KeyMap(directory / KEY_MAP, slots))
    put(store, range(64))
    context = multiprocessing.get_context("fork")
    results = context.Queue()

    def read():
        reader = Reader(settings_for(tmp_path), CACHE, PAGE)
        right = 0
        end = time.monotonic() + 2
        try:
            while time.monotonic() < end:
                start = random.randrange(900)
                right += sum(number is not None for number in get(reader, range(start, start + 16)))
            results.put(right)
        except AssertionError as error:
            results.put(f"wrong page: {str(error)[:200]}")

    ranks = [context.Process(target=read) for _ in range(2)]
    for rank in ranks:
        rank.start()
    end = time.monotonic() + 2
    while time.monotonic() < end:
        start = random.randrange(900)
        put(store, range(start, start + 32))
    outcomes = [results.get(timeout=30) for _ in ranks]
    for rank in ranks:
        rank.join()
    assert all(isinstance(outcome, int) for outcome in outcomes), outcomes
    assert sum(outcomes) > 0


def test_ctypes_copies_what_it_is_told():
    pages = Pages(2)
    pages.fill(1, 5)
    target = ctypes.create_string_buffer(PAGE)
    from kvbm.engines.sglang.store import gather, scatter

    gather(pages[1], ctypes.addressof(target))
    assert target.raw == content_of(5)
    scatter(ctypes.addressof(target), pages[0])
    assert pages.content(0) == content_of(5)


def test_tiers_are_what_was_asked_for(stores):
    assert set(stores(host=0, disk=8)._manager.catalogs) == {HOST, DISK}
    assert set(stores(host=8, disk=0, cache={**CACHE, "model": "b"})._manager.catalogs) == {HOST}


LIMITED = """
import logging, resource, signal, sys
from test_sglang_store import *
logging.basicConfig(stream=sys.stdout)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
store = Store(settings_for(sys.argv[1]), CACHE, PAGE, Sizes(8, 64), shown=lambda d, n: KeyMap(d / KEY_MAP, n))
print(put(store, [1, 2]), get(store, [1, 2]))
store.close()
"""


def test_a_disk_that_is_full_at_start_costs_nothing_later(stores, tmp_path):
    store = stores()
    assert all(put(store, range(10)))
    store.close()
    command = [sys.executable, "-c", LIMITED, tmp_path]
    path = os.pathsep.join([*map(str, Path(__file__).parents[:3]), os.environ.get("PYTHONPATH", "")])
    said = subprocess.check_output(command, env={**os.environ, "PYTHONPATH": path}, text=True, timeout=120)
    assert "[True, True] [1, 2]" in said
    assert "there is no disk tier" in said
    assert "pages on disk are kept for the next start" in said
    assert get(stores(), list(range(10))) == list(range(10))


@pytest.mark.parametrize("seed", range(10))
def test_a_flipped_bit_in_the_index_costs_pages_and_no_start(stores, tmp_path, seed):
    store = stores()
    put(store, range(10))
    store.close()
    (path,) = tmp_path.glob("kvbm-*/index.sqlite")
    raw, chance = bytearray(path.read_bytes()), random.Random(seed)
    raw[chance.choice((chance.randrange(100), raw.index(b"CREATE TABLE") + seed * 10, chance.randrange(len(raw))))] ^= 4
    path.write_bytes(raw)
    store = stores()
    for number in range(10):
        assert get(store, [number]) in ([number], [None])
    assert all(put(store, range(20)))
    store.close()
    assert get(stores(), list(range(20))) == list(range(20))


def test_a_map_that_finds_no_room_costs_the_other_ranks_their_pages_and_not_the_engine(stores, caplog):
    def full(directory, slots):
        raise OSError(errno.ENOSPC, "No space left on device")

    store = stores(shown=full)
    assert all(put(store, [1, 2]))
    assert get(store, [1, 2]) == [1, 2]
    assert "cannot create keys.map, so ranks that only read get no disk hits: No space left on device" in caplog.text


def test_a_store_that_fails_to_open_lets_its_files_go(stores):
    def fail(directory, slots):
        raise RuntimeError("no key map")

    with pytest.raises(RuntimeError, match="no key map"):
        stores(disk=64, shown=fail)
    assert DISK in stores(disk=64).tiers
