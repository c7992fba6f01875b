"""The persistent index: what it holds after a restart, and what it does when it cannot."""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvbm.tiers.directory import CacheRefused
from kvbm.tiers.disk import database as database_module
from kvbm.tiers.disk import index as index_module
from kvbm.tiers.disk.cache_dir import DESCRIPTION, cache_directory
from kvbm.tiers.disk.index import DATABASE, Index
from kvbm.tiers.lock import CacheInUse

WHAT = {"model": "Org/Some Model-8B", "dtype": "bfloat16", "layout": "2*[1:16]", "block_size": 16, "ranks": 2}


def key(i: int) -> bytes:
    return i.to_bytes(32, "big")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return cache_directory(tmp_path, WHAT)


def reopen(index: Index, slots: int = 100) -> Index:
    index.close()
    return Index.open(index.directory, WHAT, slots)


def test_what_was_put_is_there_after_a_restart_least_recently_used_first(place):
    index = Index.open(place, WHAT, 100)
    index.put([(key(1), 1), (key(2), 2)])
    index.put([(key(3), 3)])
    index.touch([key(2)])
    index = reopen(index)
    # Of one request the last block goes first: it is worth nothing without those before it.
    assert list(index.entries()) == [(key(1), 1), (key(3), 3), (key(2), 2)]
    index.touch([key(1), key(3)])
    index = reopen(index)
    assert list(index.entries()) == [(key(2), 2), (key(3), 3), (key(1), 1)]
    index.close()


def numbers(groups: list[list[tuple[bytes, int]]]) -> list[list[int]]:
    """The blocks of each group, in slots of their own numbers."""
    assert all(block == key(slot) for group in groups for block, slot in group)
    return sorted([slot for _, slot in group] for group in groups)


def prompt(*blocks: int) -> list[bytes]:
    return [key(i) for i in blocks]


def test_blocks_of_one_prompt_are_known_to_follow_one_another_after_a_restart(place):
    index = Index.open(place, WHAT, 100)
    index.put([(key(i), i) for i in range(12)])
    index.touch(prompt(*range(10)), is_prefix=True)
    index.put([(key(i), i) for i in range(20, 25)])
    index.touch(prompt(20, 21, 22, 23), is_prefix=False)  # from somewhere in a prompt
    index = reopen(index)
    singles = [[8], [9], [10], [11], [20], [21], [22], [23], [24]]
    assert numbers(index.groups(4)) == [[0, 1, 2, 3], [4, 5, 6, 7], *singles]
    assert numbers(index.groups(1)) == [[i] for i in (*range(12), *range(20, 25))]
    index.remove([key(5)])
    assert numbers(index.groups(4)) == [[0, 1, 2, 3], [4], [6], [7], *singles]
    index.close()


def test_blocks_that_come_to_disk_after_their_request_has_ended_are_known_as_well(place):
    index = Index.open(place, WHAT, 100)
    index.put([(key(0), 0)])
    index.touch(prompt(0, 1, 2, 3), is_prefix=True)
    index.put([(key(i), i) for i in (3, 1, 2)])
    assert numbers(index.groups(2)) == [[0, 1], [2, 3]]
    assert [slot for _, slot in reopen(index).entries()] == [3, 2, 1, 0]  # the last one goes first


def test_what_may_come_to_disk_is_remembered_within_bounds(place, monkeypatch):
    monkeypatch.setattr(index_module, "MAX_EXPECTED", 16)
    index = Index.open(place, WHAT, 100)
    for at in range(0, 100, 4):
        index.touch(prompt(*range(at, at + 4)), is_prefix=True)
    assert sum(map(len, index._expected)) <= 16
    index.put([(key(i), i) for i in range(96, 100)])
    assert numbers(index.groups(4)) == [[96, 97, 98, 99]]
    index.close()


def test_a_prompt_that_leaves_another_in_the_middle_of_a_group_finds_the_shared_blocks_alone(place):
    index = Index.open(place, WHAT, 100)
    index.put([(key(i), i) for i in range(20)])
    index.touch(prompt(0, 1, 2, 3, 4, 5, *range(10, 16)), is_prefix=True)
    index.touch(prompt(*range(8)), is_prefix=True)  # the same first six
    assert numbers(index.groups(4)) == [
        [0, 1, 2, 3], [4], [4, 5, 6, 7], [5], [8], [9], [10], [11], [12, 13, 14, 15], [16], [17], [18], [19]
    ]  # fmt: skip
    index.close()


def test_prompts_of_any_length_keep_their_order(place):
    """Blocks beyond the last position that a number can hold have none."""
    index = Index.open(place, WHAT, 100)
    index.put([(key(i), i) for i in range(4)])
    far = [key(1000 + i) for i in range(database_module.MAX_POSITION - 2)]
    index.touch([*far, *prompt(0, 1, 2, 3)], is_prefix=True)
    index.touch([], is_prefix=True)
    index = reopen(index)
    assert numbers(index.groups(2)) == [[0], [1], [2], [3]]
    index.close()
    numbers_of_turn = [database_module.used_in(7, at) for at in range(database_module.MAX_POSITION + 1)]
    assert numbers_of_turn == sorted(numbers_of_turn, reverse=True)
    assert numbers_of_turn[-1] == database_module.used_in(7) > database_module.used_in(6, 0) + 255
    for at in (0, 1, 255, 256, database_module.MAX_POSITION - 1):
        assert database_module.position_of(numbers_of_turn[at] + 0xAB, b"\xab more") == at
        assert database_module.position_of(numbers_of_turn[at] + 0xAB, b"\xac more") is None


@pytest.mark.parametrize("goes_on", [False, True], ids=["before", "after"])
def test_an_index_of_a_release_that_kept_the_order_alone_is_found_again(place, goes_on):
    """Its blocks have no neighbours. It may also have gone on with an index of this release."""
    index = Index.open(place, WHAT, 100)
    index.put([(key(i), i) for i in range(8)])
    if goes_on:
        index.touch(prompt(*range(8)), is_prefix=True)
    index.close()
    with contextlib.closing(sqlite3.connect(place / DATABASE)) as database, database:
        first = database.execute("SELECT max(used) FROM blocks").fetchone()[0] if goes_on else 0
        for slot in range(8):  # the first block was used last
            database.execute("UPDATE blocks SET used = ? WHERE slot = ?", (first + 100 - slot, slot))
    index = Index.open(place, WHAT, 100)
    assert [slot for _, slot in index.entries()] == [7, 6, 5, 4, 3, 2, 1, 0]
    assert numbers(index.groups(2)) == [[i] for i in range(8)]
    index.touch(prompt(4, 5), is_prefix=True)
    index = reopen(index)
    assert [slot for _, slot in index.entries()][-2:] == [5, 4]
    assert [4, 5] in numbers(index.groups(2))
    index.close()


def test_what_was_removed_is_gone_after_a_restart(place):
    index = Index.open(place, WHAT, 100)
    index.put([(key(i), i) for i in range(10)])
    index.flush()
    index.remove([key(3), key(4)])
    index.put([(key(4), 50)])
    index.remove([key(7)])
    index = reopen(index)
    assert dict(index.entries()) == {key(i): i for i in (0, 1, 2, 5, 6, 8, 9)} | {key(4): 50}
    index.close()


def test_a_slot_has_one_block_and_a_block_one_slot(place):
    index = Index.open(place, WHAT, 100)
    index.put([(key(1), 1)])
    index.flush()
    index.put([(key(2), 1)])
    index.flush()
    index.put([(key(2), 7)])
    index = reopen(index)
    assert list(index.entries()) == [(key(2), 7)]
    index.close()


def test_clear_forgets_everything_including_what_waits(place):
    index = Index.open(place, WHAT, 100)
    index.put([(key(1), 1)])
    index.flush()
    index.put([(key(2), 2)])
    index.clear()
    index.put([(key(3), 3)])
    assert index.flush()
    assert list(index.entries()) == [(key(3), 3)]
    index.close()


def test_slots_that_no_longer_exist_are_forgotten(place):
    index = Index.open(place, WHAT, 100)
    index.put([(key(i), i) for i in range(100)])
    index = reopen(index, 10)
    assert dict(index.entries()) == {key(i): i for i in range(10)}
    index.close()


def test_a_cache_is_named_after_its_model_and_everything_that_sets_it_apart(tmp_path):
    name = cache_directory(tmp_path, WHAT).name
    assert name.startswith("kvbm-some-model-8b-")
    assert cache_directory(tmp_path, dict(reversed(WHAT.items()))).name == name
    others = {cache_directory(tmp_path, WHAT | {what: "other"}).name for what in WHAT}
    assert len(others | {name}) == len(WHAT) + 1
    assert cache_directory(tmp_path, {"model": "../../etc"}).parent == tmp_path
    assert cache_directory(tmp_path, {"model": "/"}).name.startswith("kvbm-cache-")


def test_a_second_engine_is_turned_away(place):
    index = Index.open(place, WHAT, 100)
    with pytest.raises(CacheInUse, match="in use by another engine"):
        Index.open(place, WHAT, 100)
    index.close()
    Index.open(place, WHAT, 100).close()


def test_nobody_else_can_read_it(place):
    old = os.umask(0)
    index = Index.open(place, WHAT, 100)
    index.put([(key(1), 1)])
    index.flush()
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    for file in place.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    index.close()
    os.umask(old)


def test_a_directory_of_somebody_else_is_refused(place, monkeypatch):
    place.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(CacheRefused, match="cannot be trusted"):
        Index.open(place, WHAT, 100)


def test_a_link_in_the_place_of_the_directory_is_refused(place, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CacheRefused):
        Index.open(place, WHAT, 100)


def _garbage(place: Path) -> None:
    (place / DATABASE).write_bytes(os.urandom(20_000))


def _hole(place: Path) -> None:
    with open(place / DATABASE, "r+b") as file:
        file.seek(4096)
        file.write(os.urandom(8192))


def _version(place: Path) -> None:
    database = sqlite3.connect(place / DATABASE)
    database.execute("PRAGMA user_version = 77")
    database.close()


def _adapter(place: Path) -> None:
    os.truncate(place / DATABASE, (place / DATABASE).stat().st_size // 2)


def _other_table(place: Path) -> None:
    database = sqlite3.connect(place / DATABASE)
    database.executescript("DROP TABLE blocks; CREATE TABLE blocks (something)")
    database.close()


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (_garbage, "cannot be used"),
        (_hole, "cannot be used"),
        (_adapter, "cannot be used"),
        (_version, "its format is 77"),
        (_other_table, "cannot be used"),
        (lambda place: (place / DESCRIPTION).write_text("{"), "cache.json cannot be read"),
        (lambda place: (place / DESCRIPTION).write_text('{"fingerprint": {"model": "x"}}'), "of another cache"),
        (lambda place: (place / DESCRIPTION).unlink(), "cache.json is missing"),
    ],
)
def test_an_index_that_cannot_be_used_starts_clean_with_a_sentence(place, caplog, damage, sentence):
    index = Index.open(place, WHAT, 10_000)
    index.put([(key(i), i) for i in range(2000)])
    index.close()
    damage(place)
    caplog.clear()
    index = Index.open(place, WHAT, 10_000)
    assert list(index.entries()) == []
    assert sentence in index.started_clean
    assert sentence in caplog.text
    index.put([(key(1), 1)])
    index = reopen(index)
    assert list(index.entries()) == [(key(1), 1)]
    assert not index.started_clean
    index.close()


def test_what_was_put_just_before_a_process_ends_is_there(place):
    """An engine may end without a word to its connector. A child that it has forked has nothing to write."""
    code = (
        "import atexit, os, sys, time\n"
        "def told():\n if os.getpid() == parent: print(time.monotonic() - ended)\n"
        "atexit.register(told)\nparent = os.getpid()\n"  # called last
        "from pathlib import Path\nfrom kvbm.tiers.disk import index as module\nmodule._LAST_SECONDS = 60.0\n"
        f"index = module.Index.open(Path({str(place)!r}), {WHAT!r}, 100)\n"
        "index.put([(bytes([i]) * 32, i) for i in range(50)])\n"
        "if os.fork() == 0: sys.exit()\n"
        "os.wait()\n"
        "index.put([(bytes([i]) * 32, i) for i in range(50, 60)])\n"
        "ended = time.monotonic()\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    ended = subprocess.run(command, check=True, timeout=120, stdout=subprocess.PIPE, text=True).stdout
    assert float(ended) < 60
    index = Index.open(place, WHAT, 100)
    assert len(index) == 60
    index.close()


def test_many_blocks_are_written_with_few_calls(place):
    """In each of which an engine that is busy may keep the interpreter to itself for milliseconds."""
    index = Index.open(place, WHAT, 4000)
    calls: list[str] = []
    index._database.set_trace_callback(calls.append)
    index.put([(key(i), i) for i in range(3000)])
    index.flush()
    index.touch([key(i) for i in range(3000)])
    index.flush()
    index.remove([key(i) for i in range(2000)])
    index.flush()
    assert 3 < len(calls) < 60
    index = reopen(index, 4000)
    assert sorted(index.entries()) == [(key(i), i) for i in range(2000, 3000)]
    index.close()


def test_a_caller_never_waits_and_nothing_is_lost_however_slow_the_disk(place, monkeypatch):
    index = Index.open(place, WHAT, 200)
    real = index._write

    def slow(changes):
        time.sleep(0.3)
        real(changes)

    monkeypatch.setattr(index, "_write", slow)
    began = time.monotonic()
    for i in range(2000):
        index.remove([key(max(0, i - 200))])
        index.put([(key(i), i % 200)])
        index.touch([key(i)])
        waiting = index._waiting
        assert len(waiting.keys) + len(waiting.gone) + len(waiting.used) <= 3 * 200
        time.sleep(0.0003)
    assert time.monotonic() - began < 30  # had each of them waited for a write, it would be 600
    index = reopen(index, 200)
    assert list(index.entries()) == [(key(i), i % 200) for i in range(1800, 2000)]
    index.close()


def broken(changes: object) -> None:
    raise sqlite3.OperationalError("disk is full")


def test_nothing_is_lost_when_the_index_cannot_be_written_for_a_while(place, monkeypatch, caplog):
    monkeypatch.setattr(index_module, "_BATCH_SECONDS", 0.01)
    index = Index.open(place, WHAT, 100)
    index.put([(key(i), i) for i in range(10)])
    index.flush()
    real = index._write
    monkeypatch.setattr(index, "_write", broken)
    index.remove([key(3)])
    index.put([(key(50), 50), (key(51), 51)])
    time.sleep(0.05)
    index.remove([key(51)])
    index.put([(key(60), 5)])
    assert not index.flush(timeout=0.2)
    assert caplog.text.count("disk is full") == 1
    monkeypatch.setattr(index, "_write", real)
    assert index.flush(timeout=60)
    expected = {key(i): i for i in range(10) if i not in (3, 5)} | {key(50): 50, key(60): 5}
    index.remove([key(5)])  # late: its slot belongs to another block by now
    index = reopen(index)
    assert dict(index.entries()) == expected
    index.close()


def test_an_index_that_can_never_be_written_again_does_not_hold_up_the_end(place, monkeypatch):
    monkeypatch.setattr(index_module, "_BATCH_SECONDS", 0.001)
    index = Index.open(place, WHAT, 10)
    monkeypatch.setattr(index, "_write", broken)
    index.put([(key(1), 1)])
    index.close()
    assert not index._thread.is_alive()  # close() has not run into its timeout


def test_any_history_leaves_what_the_caller_knows(place, monkeypatch):
    """Random changes and failures, with the thread writing whenever it likes; a dict is the judge."""
    monkeypatch.setattr(index_module, "_BATCH_SECONDS", 0.0005)
    chance = random.Random(11)
    index = Index.open(place, WHAT, 20)
    real = index._write
    known: dict[bytes, int] = {}
    monkeypatch.setattr(index, "_write", lambda changes: broken(changes) if chance.random() < 0.3 else real(changes))
    for step in range(3000):
        number, slot = key(chance.randrange(40)), chance.randrange(20)
        what = chance.random()
        if what < 0.5:
            owner = next((k for k, s in known.items() if s == slot), None)
            if owner is not None:
                index.remove([owner])
                del known[owner]
            index.put([(number, slot)])
            known[number] = slot
        elif what < 0.8:
            index.remove([number])
            known.pop(number, None)
        elif what < 0.99:
            index.touch([number])
        else:
            index.clear()
            known.clear()
        if step % 100 == 0:
            time.sleep(0.002)
    assert index.flush()
    index.close()
    index = Index.open(place, WHAT, 20)
    assert dict(index.entries()) == known
    index.close()


def test_a_disk_that_fails_is_tried_ever_less_often(place, monkeypatch, caplog):
    index = Index.open(place, WHAT, 8)
    waits, wait_for, write = [], index._changed.wait_for, index._write
    tried, fails = threading.Semaphore(0), True

    def wait_shortly(condition, seconds=None):
        if threading.current_thread() is not index._thread or seconds is None:
            return wait_for(condition, seconds)
        waits.append(seconds)
        return wait_for(condition, seconds / 1000)

    def fail(changes):
        tried.release()
        if fails:
            raise OSError("no disk")
        write(changes)

    monkeypatch.setattr(index._changed, "wait_for", wait_shortly)
    monkeypatch.setattr(index, "_write", fail)
    index.put([(key(1), 1)])
    for _ in range(10):
        assert tried.acquire(timeout=60)
    assert waits[:10] == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30, 30])
    fails = False
    assert index.flush(60)
    index.put([(key(2), 2)])
    assert index.flush(60)
    assert waits[-1] == pytest.approx(0.2)
    assert caplog.text.count("cannot be written") == 1
    index.close()
