"""A disk that hangs for ever: starts go on without it, ends do not wait for it, and no block is lost by that.

Each test runs in a process of its own, whose calls to the cache's directory block (see hanging.py)."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from hanging import HangingDisk
from kvbm import config as settings
from kvbm.runtime.rank import Rank
from kvbm.tiers import bounded
from kvbm.tiers.bounded import Call, DaemonThreads, DiskHangs, report_progress
from kvbm.tiers.disk import prealloc
from kvbm.tiers.lock import is_locked

# A rank with a few blocks, its leader's tier, and an SGLang store, over one directory.
COMMON = """
import hashlib, logging, os, sys, time
from pathlib import Path
import torch
from kvbm import config as settings
from kvbm.plans import Copy, Hello, MovePlan, StepPlan, StorePlan
from kvbm.runtime.rank import Rank
from kvbm.runtime.tiers import open_manager
from kvbm.tiers import bounded
from kvbm.tiers.base import fingerprint
from kvbm.tiers.disk.cache_dir import cache_directory, slab_path
from kvbm.tiers.disk.index import Index
from kvbm.tiers.registry import TIERS
HOST, DISK, *_ = TIERS
CACHE = {"model": "some-model", "block_size": 16}
def key(i): return hashlib.sha256(b"%d" % i).digest()
def config(**values):
    base = {"cpu_cache_override_num_blocks": 16, "disk_cache_override_num_blocks": 64,
            "disk_cache_dir": FOLDER, "host_persist_dir": FOLDER}
    return settings.load(extra={**base, **values}, environ={}, files=[])
def start(**values):
    made = config(**values)
    cache = torch.zeros(8, 2, 2, 640, dtype=torch.int32)
    rank = Rank(made, 0, 1, cache=CACHE, keeps_host=True)
    rank.register({f"layer {i}": cache[:, i] for i in range(2)}, 8)
    return rank, made, rank.open()
"""
APART = """
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
FLAG = Path(os.environ["HANGING_FLAG"])
def wait(seconds): bounded.DISK_START_SECONDS = bounded.DISK_END_SECONDS = seconds
def hang():  # deadlines are long before: a busy machine is no disk that hangs
    wait(1.0)
    FLAG.touch()
wait(1.0 if FLAG.exists() else 60.0)
def say(*words): print("##", *words, flush=True)
"""


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    made = HangingDisk(folder, tmp_path)

    def run(code: str) -> list[str]:
        text = made.run(f"FOLDER = {str(folder)!r}\n{COMMON}\n{APART}\n{textwrap.dedent(code)}", 120)
        run.text = text
        return [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]

    def here(code: str) -> list[str]:
        """In this process, while the disk answers."""
        said: list[str] = []
        names = {"FOLDER": str(folder), "say": lambda *words: said.append(" ".join(map(str, words)))}
        made.flag.unlink(missing_ok=True)
        exec(f"{COMMON}\n{code}", names)
        return said

    run.flag, run.here = made.flag, here
    return run


FILL = """
rank, made, hello = start()
disk = open_manager(made, [hello], CACHE).catalogs[DISK]
disk.journal.put([(key(i), i) for i in range(10)])
disk.close()
rank.close()
"""
FOUND = """
rank, made, hello = start()
disk = open_manager(made, [hello], CACHE).catalogs[DISK]
say(disk.published)
disk.close()
rank.close()
"""


def test_a_rank_starts_and_ends_while_its_disk_hangs(disk):
    disk.here(FILL)
    disk.flag.touch()
    code = """
    rank, made, hello = start()
    say(sorted(hello.slots))
    rank.close()
    rank, made, hello = start(cpu_cache_override_num_blocks=0)  # it is but a way to the disk, and is there
    say(hello.slots.get(DISK))
    rank.close()
    cache = torch.zeros(8, 2, 2, 640, dtype=torch.int32)
    rank = Rank(config(), 0, 1, cache=CACHE)
    rank.register({f"layer {i}": cache[:, i] for i in range(2)}, 8)
    rank.close()
    say("never opened")
    """
    assert disk(code) == ["['host']", "None", "never opened"]
    assert "rank 0 goes on without a disk tier" in disk.text
    assert "has not answered for 1 s" in disk.text
    assert "kept for the next start" in disk.text
    assert disk.here(FOUND) == ["10"]


def test_a_disk_that_comes_back_after_it_was_given_up_is_let_go(disk):
    """The late file holds a lock, and no other engine could use the cache until the end of this one."""
    disk.flag.touch()
    code = """
    rank, made, hello = start()
    FLAG.unlink()
    deadline = time.monotonic() + 100
    while True:
        other, _, again = start()
        other.close()
        if DISK in again.slots:
            break
        assert time.monotonic() < deadline
    say("free")
    rank.close()
    """
    assert disk(code) == ["free"]


def test_a_leader_starts_while_its_index_hangs(disk):
    disk.here(FILL)
    code = """
    rank, made, hello = start()
    hang()
    say(open_manager(made, [hello], CACHE).catalogs.get(DISK))
    rank.close()
    say("end")
    """
    assert disk(code) == ["None", "end"]
    assert "there is no disk tier" in disk.text
    assert "This engine runs without it; blocks on disk are kept for the next start" in disk.text
    assert disk.here(FOUND) == ["10"]


@pytest.mark.parametrize("end", ["close", "exit"])
def test_an_engine_ends_while_reads_and_writes_and_its_index_hang(disk, end):
    disk.here(FILL)
    code = """
rank, made, hello = start()
disk = open_manager(made, [hello], CACHE).catalogs[DISK]
hang()
disk.journal.put([(key(20), 20)])
operations = rank.worker._tiers[DISK].write([20], [3], [key(20)]), rank.worker._tiers[DISK].read([1], [4], [key(1)])
while not all(each.began for each in operations):
    time.sleep(0.01)
"""
    code += "rank.close()\ndisk.close()\n" if end == "close" else ""
    assert disk(code + "say(any(each.done() for each in operations))") == ["False"]
    assert disk.here(FOUND)[0] in ("10", "11")


KEPT = """
rank, made, hello = start(host_persist=True, disk_cache_override_num_blocks=0)
manager = open_manager(made, [hello], CACHE)
kept = manager.near.journal
"""


@pytest.mark.parametrize("when", ["rank", "leader", "end"])
def test_a_persistent_host_tier_whose_directory_hangs_holds_up_nobody(disk, when):
    store = """
copy = Copy(HOST, [1, 2], [0, 1], tags=[key(0), key(1)])
worker = rank.worker
worker.begin(StepPlan()); worker.start_stores(StepPlan(stores=[StorePlan(1, copy)]))
while not worker.poll().report.stores: time.sleep(0.01)
worker.begin(StepPlan(verdicts={1: True}))
kept.put([(key(0), 1), (key(1), 2)])
kept.flush()
"""
    end = "\nmanager.close()\nrank.close()\n"
    disk.here(KEPT + store + end)
    hangs = {
        "rank": f"hang()\n{KEPT}\nsay(kept)\nrank.close()",
        "leader": KEPT.replace("manager =", "hang()\nmanager =") + "\nsay(kept)\nrank.close()",
        "end": KEPT + "\nsay(None)\nhang()\nkept.put([(key(9), 9)])\n" + end,
    }
    assert disk(hangs[when]) == ["None"]
    assert disk.here(KEPT + "say(manager.catalogs[HOST].published)" + end)[0] in ("2", "3")


SGLANG = """
from kvbm.engines.sglang.store import PageStore
from kvbm.tiers.base import RankContext
import ctypes
page = ctypes.create_string_buffer(8192)
pages = [[(ctypes.addressof(page), 8192)]] * 4
keys = [key(i) for i in range(4)]
def store(host=0, access="writer"):
    made = config(cpu_cache_override_num_blocks=host)
    return PageStore(RankContext(made, 0, 1, 8192, 8192, {**CACHE, "layout": "x"}, access=access))
"""


def test_a_store_of_sglang_starts_and_ends_while_its_disk_hangs(disk):
    soon = "time.monotonic() + 60"
    disk.here(SGLANG + f"made = store()\nassert all(made.put(keys, pages, {soon}))\nmade.close()")
    disk.flag.touch()
    code = f"made = store(8)\nsay(made.has(keys), made.put(keys, pages, {soon}))\nmade.close()\nsay('end')"
    assert disk(SGLANG + code) == [f"{[False] * 4} {[True] * 4}", "end"]
    assert "there is no disk tier" in disk.text
    assert "kept for the next start" in disk.text
    disk.flag.unlink()
    code = """
made = store()
say(made.has(keys))
hang()
say(made.get(keys, pages, 1.0), made.put([key(9)], pages[:1], time.monotonic() + 1))
made.close()
say("end")
"""
    assert disk(SGLANG + code) == [str([True] * 4), f"{[False] * 4} [False]", "end"]


def test_a_reader_of_sglang_neither_waits_nor_stays_while_the_disk_hangs(disk):
    disk.here(SGLANG + "made = store()\nassert all(made.put(keys, pages, time.monotonic() + 60))\nmade.close()")
    code = """
hang()
reader = store(access="reader")
say(reader.has(keys))
FLAG.unlink()
deadline = time.monotonic() + 30
while not all(reader.has(keys)):
    assert time.monotonic() < deadline
    time.sleep(0.1)
say(reader.get(keys, pages, 20.0))
hang()
say(reader.get(keys, pages, 0.5))
reader.close()
say("end")
"""
    assert disk(SGLANG + code) == [str([False] * 4), str([True] * 4), str([False] * 4), "end"]


# -- the parts --------------------------------------------------------------------------------------------------------


def test_a_call_that_makes_progress_is_waited_for(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(bounded, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def slow():
        for _ in range(10):
            now[0] += 0.5
            report_progress()
        return "done"

    assert Call(slow, "it").result(0.9) == "done"


def test_a_call_that_is_silent_is_undone_when_it_ends():
    gate, undone = threading.Event(), threading.Event()
    call = Call(lambda: gate.wait(60), "/some/where", lambda _: undone.set())
    with pytest.raises(DiskHangs, match=r"/some/where has not answered for 0 s"):
        call.result(0.05)
    assert not undone.is_set()
    gate.set()
    assert undone.wait(30)


@pytest.mark.parametrize("given_up", ["it hangs", "it is abandoned"])
def test_a_call_that_was_given_up_stops_when_it_next_reports_progress(given_up):
    gate, stopped = threading.Event(), threading.Event()

    def allocate():
        gate.wait(60)
        try:
            report_progress()
        except DiskHangs:
            stopped.set()
            raise

    call = Call(allocate, "it")
    if given_up == "it hangs":
        with pytest.raises(DiskHangs):
            call.result(0.05)
    else:
        call.abandon()
    gate.set()
    assert stopped.wait(30)


def test_a_slab_that_is_given_up_is_not_allocated_to_its_end(tmp_path, monkeypatch, caplog):
    """The preallocation runs beside the engine by then, and the slab may be as large as the disk."""
    allocate, called, gate = prealloc.fallocate, [], threading.Event()

    def slow(fd, at, length):
        called.append(at)
        gate.wait(60)
        return allocate(fd, at, length)

    monkeypatch.setattr(prealloc, "fallocate", slow)
    monkeypatch.setattr(prealloc, "_PIECE", 1 << 20)
    monkeypatch.setattr(bounded, "DISK_START_SECONDS", 0.2)
    config = settings.load(
        extra={
            "cpu_cache_override_num_blocks": 4, "disk_cache_override_num_blocks": 256, "disk_cache_dir": str(tmp_path)
        },
        environ={}, files=[],
    )  # fmt: skip
    cache = torch.zeros(8, 2, 2, 8192, dtype=torch.int32)
    rank = Rank(config, 0, 1, cache={"model": "some-model"})
    rank.register({f"layer {i}": cache[:, i] for i in range(2)}, 8)
    assert "disk" not in rank.hello().slots
    gate.set()
    (slab,) = tmp_path.glob("*/rank-0.slab")
    deadline = time.monotonic() + 30
    while is_locked(slab):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    rank.close()
    assert len(called) == 1
    assert caplog.text.count("goes on without a disk tier") == 1


def test_a_result_that_nobody_wants_is_undone_once():
    undone = []
    call = Call(lambda: 7, "it", undone.append)
    assert call.result(30) == 7
    call.abandon()
    assert undone == [7]


def test_a_call_runs_in_place_when_the_interpreter_starts_no_more_threads(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    ran_on = Call(threading.current_thread, "it").result(30)
    assert ran_on is threading.current_thread()
    report_progress()  # of no call any more


def test_an_error_of_a_call_is_raised_where_it_is_waited_for():
    def fail():
        raise TimeoutError("of the file system itself")

    with pytest.raises(TimeoutError, match="of the file system itself"):
        Call(fail, "it").result(30)


def test_threads_that_hang_are_left_behind_and_the_others_finish(monkeypatch):
    monkeypatch.setattr(bounded, "DISK_END_SECONDS", 0.2)
    gate = threading.Event()
    threads = DaemonThreads(2, "test")
    stuck = threads.submit(gate.wait, 60)
    assert threads.submit(lambda: 3).result(30) == 3
    assert not threads.close()
    gate.set()
    assert stuck.result(30)
    assert threads.close(30)
    with pytest.raises(RuntimeError, match="closed"):
        threads.submit(lambda: 4)


def test_a_process_ends_though_threads_of_a_pool_hang():
    code = "import time\nfrom kvbm.tiers.bounded import DaemonThreads\nDaemonThreads(1, 'x').submit(time.sleep, 600)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=dict(os.environ))
