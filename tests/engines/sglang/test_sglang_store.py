"""What is behind the SGLang backend: pages go in and come out as they were, or are said not to be there."""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from engine_pages import CACHE, PAGE, Pages, content_of, figures, get, keys, open_reader, put, wait_until

from kvbm.engines.sglang.pages import gather, scatter
from kvbm.observe.findings import explain
from kvbm.observe.requests import RequestLog
from kvbm.tiers.disk import inspect as caches
from kvbm.tiers.disk.cache_dir import KEY_MAP, cache_directory
from kvbm.tiers.disk.shared import KeyMap
from tiernames import DISK, HOST


@pytest.mark.parametrize(("host", "disk"), [(0, 200), (200, 0), (40, 200)], ids=["disk", "host", "both"])
def test_pages_come_back_as_they_were(stores, host, disk):
    store = stores(host, disk, disable_disk_offload_filter=True)
    numbers = list(range(150))
    for at in range(0, 150, 10):  # a host tier does not wait for the disk
        assert all(put(store, numbers[at : at + 10]))
        wait_until(lambda: not store.leader.moves_under_way)
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
        "import engine_pages as here; from tiernames import DISK\n"
        f"store = here.open_store({str(tmp_path)!r}, disk=512)\n"
        "index = store.leader.manager.catalogs[DISK].journal\n"
        "for at in range(0, 10**6, 8):\n"
        "    here.put(store, [number % 400 for number in range(at, at + 8)])\n"
        "    print(at, index._given, index._written, flush=True)\n"
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


def test_a_page_that_was_spoiled_on_disk_is_not_served(stores, tmp_path):
    store = stores(disk=64)
    put(store, range(8))
    store.close()
    (slab,) = tmp_path.glob("*/*.slab")
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
    assert again.count(keys(*range(4))) == 0  # the circuit breaker is open
    stall.over.set()
    wait_until(lambda: again.count(keys(*range(4))) == 4)  # the reads that were given up have ended
    assert get(again, range(4), patience=60.0) == [0, 1, 2, 3]
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


def test_a_disk_that_cannot_be_used_leaves_a_store_without_it(stores, caplog, monkeypatch):
    first = stores(disk=16)
    put(first, [1])
    monkeypatch.setattr("kvbm.tiers.disk.open.PATIENCE_SECONDS", 0.1)
    second = stores(disk=16)
    assert "goes on without a disk tier" in caplog.text
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
    store = stores(host=host, access="writer")
    put(store, range(8))
    store.clear()
    assert put(store, range(8)) == [True] * 8
    assert get(store, range(8)) == list(range(8))
    reader = open_reader(tmp_path)
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


def test_pages_that_are_being_read_during_a_clear_do_not_count(stores, monkeypatch):
    from kvbm.engines.sglang import loads as module

    store = stores(host=16, disk=0)
    put(store, [1, 2])
    monkeypatch.setattr(module, "scatter", lambda source, page: store.clear())
    assert store.get(keys(1, 2), Pages(2).all(), 1.0) == [False, False]


def test_a_page_that_is_put_while_the_store_closes_still_goes_to_disk(stores, monkeypatch):
    from kvbm.engines.sglang import store as module

    store = stores()
    is_copying, may_copy = threading.Event(), threading.Event()

    def wait_and_gather(page, target):
        is_copying.set()
        assert may_copy.wait(60)
        gather(page, target)

    monkeypatch.setattr(module, "gather", wait_and_gather)
    kept = []
    putter = threading.Thread(target=lambda: kept.extend(put(store, [1])))
    putter.start()
    assert is_copying.wait(60)
    closer = threading.Thread(target=store.close)
    closer.start()
    wait_until(lambda: store._closing)
    store._thread.join(0.5)  # it must not end before the put has
    may_copy.set()
    for thread in (putter, closer):
        thread.join(60)
    assert kept == [True]


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


def test_what_happens_to_pages_can_be_seen(stores):
    log = RequestLog()
    store = stores(
        host=8, disk=64, options={"log": log, "page_tokens": 16}, load="always", disable_disk_offload_filter=True
    )
    for at in range(0, 20, 4):
        put(store, range(at, at + 4))
        wait_until(lambda: not store.leader.moves_under_way)
    store.count(keys(*range(25)))
    store.count(keys(99))
    get(store, range(20))
    snapshot, found = figures(store, log)
    assert found["kvbm_offload_blocks_d2h"] == found["kvbm_offload_blocks_h2d"] == 20
    assert found["kvbm_onboard_blocks_h2d"] + found["kvbm_onboard_blocks_d2d"] == 20
    assert found["kvbm_matched_tokens"] == 20 * 16
    assert found["kvbm_host_cache_hit_rate"] + found["kvbm_disk_cache_hit_rate"] == pytest.approx(20 / 26)
    assert [(tier.tier, tier.slots) for tier in snapshot.tiers] == [("host", 8), ("disk", 64)]
    assert explain(snapshot)[0].name == "gain"


def test_memory_that_is_but_the_way_to_the_disk_is_no_tier(stores):
    log = RequestLog()
    store = stores(host=0, disk=64, options={"log": log})
    put(store, range(4))
    snapshot, found = figures(store, log)
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
        "import sys; from pathlib import Path; from kvbm.tiers.disk.shared import KeyMap\n"
        "path = Path(sys.argv[1]); before, reader = KeyMap(path, 100_000), KeyMap(path)\n"
        "KeyMap(path, 1)\n"
        "print([reader.find(bytes([i]) * 32) for i in range(256)] == [None] * 256, reader.is_at(path))"
    )
    done = subprocess.run(
        [sys.executable, "-c", look, str(tmp_path / KEY_MAP)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "True False\n")


def test_other_ranks_find_a_writer_that_begins_anew(stores, tmp_path):
    shown = {"access": "writer"}
    store = stores(disk=64, **shown)
    put(store, range(10))
    reader = open_reader(tmp_path)
    assert get(reader, range(10)) == list(range(10))
    store.close()
    caches.clear(cache_directory(tmp_path, CACHE))
    again = stores(disk=64, **shown)
    put(again, range(20, 30))
    wait_until(lambda: reader.count(keys(*range(20, 30))) == 10)  # it looks for the writer's map once a second
    assert get(reader, range(20, 30)) == list(range(20, 30))
    assert reader.count(keys(1)) == 0
    reader.close()


def test_pages_are_neither_kept_nor_read_where_other_users_can_exchange_them(stores, tmp_path, caplog):
    shown = {"access": "writer"}
    store = stores(disk=64, **shown)
    put(store, range(10))
    store.close()
    tmp_path.chmod(0o777)
    reader = open_reader(tmp_path)
    assert reader.count(keys(1)) == 0
    assert get(reader, range(10)) == [None] * 10
    assert caplog.text.count(f"this rank reads no blocks from disk: {tmp_path} belongs to") == 1
    with pytest.raises(OSError, match=f"DYN_KVBM_DISK_CACHE_DIR={tmp_path} cannot be used: {tmp_path} belongs to"):
        stores(host=32, disk=64, **shown)
    # The directory itself is writable to others: a file in it may be another user's.
    tmp_path.chmod(0o700)
    directory = cache_directory(tmp_path, CACHE)
    directory.chmod(0o777)
    time.sleep(1.1)  # it looks for the writer's map once a second
    assert reader.count(keys(1)) == 0
    time.sleep(1.1)
    assert reader.count(keys(1)) == 0
    directory.chmod(0o700)
    wait_until(lambda: reader.count(keys(1)) == 1)
    assert get(reader, range(10)) == list(range(10))
    # Nor does a reader that knows the map read files of a directory that others can write to.
    reader.close()
    reader = open_reader(tmp_path)
    directory.chmod(0o777)
    assert reader.count(keys(1)) == 1
    assert get(reader, [1]) == [None]
    directory.chmod(0o700)
    assert get(reader, [1]) == [1]
    reader.close()


def test_other_ranks_read_what_one_has_written(stores, tmp_path):
    reader = open_reader(tmp_path)
    assert reader.count(keys(1)) == 0
    store = stores(disk=64, access="writer")
    put(store, range(40))
    wait_until(lambda: reader.count(keys(*range(50))) == 40)  # it looks for the writer's map once a second
    assert get(reader, range(40)) == list(range(40))
    assert reader.put(keys(99), [Pages(1)[0]], 0.0) == [False]
    put(store, range(100, 164))  # pushes the others out
    assert reader.count(keys(1)) == 0
    assert get(reader, range(100, 110)) == list(range(100, 110))
    store.clear()
    assert reader.count(keys(100)) == 0
    reader.close()


def test_a_reader_is_closed_while_others_ask_and_read(stores, tmp_path):
    store = stores(0, 50, access="writer")
    put(store, range(50))
    for _ in range(10):
        reader = open_reader(tmp_path)
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
            thread.join(60)
            assert not thread.is_alive()
        assert errors == []
        reader.close()


def test_a_reader_that_comes_too_late_for_a_slot_gets_nothing_of_another_page(stores, tmp_path):
    store = stores(disk=32, access="writer")
    put(store, range(32))
    reader = open_reader(tmp_path)
    assert get(reader, range(8)) == list(range(8))
    catalog = reader.leader.manager.catalogs[DISK]
    old = {key: catalog.find(key) for key in keys(*range(32))}
    put(store, range(100, 132))
    catalog.find = old.get  # as it was a moment ago
    assert get(reader, range(8)) == [None] * 8
    reader.close()


def test_readers_in_other_processes_see_right_pages_or_none(stores, tmp_path):
    store = stores(disk=128, access="writer")
    put(store, range(64))
    context = multiprocessing.get_context("fork")
    results = context.Queue()

    def read():
        reader = open_reader(tmp_path)
        right = 0
        began = time.monotonic()
        try:
            while time.monotonic() < began + 2 or (not right and time.monotonic() < began + 60):
                start = random.randrange(900)
                right += sum(number is not None for number in get(reader, range(start, start + 16)))
            results.put(right)
        except AssertionError as error:
            results.put(f"wrong page: {str(error)[:200]}")

    ranks = [context.Process(target=read) for _ in range(2)]
    for rank in ranks:
        rank.start()
    while results.empty():
        start = random.randrange(900)
        put(store, range(start, start + 32))
    outcomes = [results.get(timeout=120) for _ in ranks]
    for rank in ranks:
        rank.join()
    assert all(isinstance(outcome, int) for outcome in outcomes), outcomes
    assert sum(outcomes) > 0


def test_ctypes_copies_what_it_is_told():
    pages = Pages(2)
    pages.fill(1, 5)
    target = ctypes.create_string_buffer(PAGE)
    gather(pages[1], ctypes.addressof(target))
    assert target.raw == content_of(5)
    scatter(ctypes.addressof(target), pages[0])
    assert pages.content(0) == content_of(5)


def test_tiers_are_what_was_asked_for(stores):
    assert set(stores(host=0, disk=8)._manager.catalogs) == {HOST, DISK}
    assert set(stores(host=8, disk=0, cache={**CACHE, "model": "b"})._manager.catalogs) == {HOST}


LIMITED = """
import logging, resource, signal, sys
from engine_pages import *
logging.basicConfig(stream=sys.stdout)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
store = open_store(sys.argv[1], 8, 64, access="writer")
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
    assert "goes on without a disk tier" in said
    assert "Blocks on disk are kept for the next start" in said
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


def test_a_map_that_finds_no_room_costs_the_other_ranks_their_pages_and_not_the_engine(stores, caplog, monkeypatch):
    def full(path, slots):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kvbm.tiers.disk.shared.KeyMap", full)
    store = stores(access="writer")
    assert all(put(store, [1, 2]))
    assert get(store, [1, 2]) == [1, 2]
    assert "cannot create keys.map, so ranks that only read get no disk hits: No space left on device" in caplog.text


def test_a_tier_that_fails_to_open_costs_the_tier_and_lets_its_files_go(stores, caplog, monkeypatch):
    def fail(path, slots):
        raise RuntimeError("no key map")

    with monkeypatch.context() as patch:
        patch.setattr("kvbm.tiers.disk.shared.KeyMap", fail)
        store = stores(access="writer")
    assert "there is no disk tier: RuntimeError: no key map" in caplog.text
    assert (put(store, [1]), get(store, [1])) == ([False], [None])
    assert DISK in stores().leader.manager.catalogs


def test_a_start_that_fails_lets_its_files_go(stores, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("kvbm.tiers.disk.file.DiskFile.measure", lambda file: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            stores()
    assert DISK in stores().leader.manager.catalogs
