"""`kvbm cache`: sees what is there, beside a running engine too, and removes only what nobody uses."""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import random
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvbm.cli.main import main
from kvbm.tiers.disk import inspect as caches
from kvbm.tiers.disk.cache_dir import cache_directory, slab_path
from kvbm.tiers.disk.file import DiskFile
from kvbm.tiers.disk.index import DATABASE, Index

SLOT = 8192
SLOTS = 32


class Engine:
    """The disk tier of an engine of two ranks."""

    def __init__(self, root: Path, model: str = "org/some-model") -> None:
        what = {"model": model, "dtype": "bfloat16", "ranks": 2}
        self.path = cache_directory(root, what)
        self.index = Index.open(self.path, what, SLOTS)
        self.files = [DiskFile(slab_path(self.path, rank), SLOTS, SLOT) for rank in range(2)]
        self.memory = mmap.mmap(-1, SLOT)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.chance = random.Random(1)
        self.keys: dict[int, bytes] = {}

    def store(self, slot: int) -> None:
        key = hashlib.sha256(self.chance.randbytes(8)).digest()
        if slot in self.keys:
            self.index.remove([self.keys[slot]])
        self.memory[:] = self.chance.randbytes(SLOT)
        for file in self.files:
            assert file.write([slot], [self.address], [key]).wait(60)
        self.index.put([(key, slot)])
        self.keys[slot] = key

    def stop(self) -> Path:
        self.index.close()
        for file in self.files:
            file.close()
        return self.path


@pytest.fixture
def engine(tmp_path: Path):
    engine = Engine(tmp_path)
    for slot in range(20):
        engine.store(slot)
    engine.index.flush()
    yield engine
    engine.stop()


def flip(path: Path, rank: int, slot: int) -> None:
    with open(slab_path(path, rank), "r+b") as raw:
        raw.seek(slot * SLOT + 77)
        byte = raw.read(1)[0]
        raw.seek(slot * SLOT + 77)
        raw.write(bytes([byte ^ 4]))
        raw.flush()
        os.fsync(raw.fileno())


def test_ls_shows_every_cache_and_which_are_in_use(tmp_path, engine, capsys):
    Engine(tmp_path, "org/another").stop()
    (tmp_path / "something-else").mkdir()
    assert main(["cache", "ls", str(tmp_path)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["CACHE", "MODEL", "BLOCKS", "OF"]
    assert len(lines) == 2
    other, running = lines
    assert other.split()[1:4] == ["org/another", "0", "32"]
    assert not other.endswith("in use")
    assert running.split()[:4] == [engine.path.name, "org/some-model", "20", "32"]
    assert running.endswith("in use")


@pytest.mark.parametrize("action", ["ls", "stat"])
def test_the_same_as_json(tmp_path, engine, capsys, action):
    assert main(["cache", action, str(tmp_path), "--json"]) == 0
    (cache,) = json.loads(capsys.readouterr().out)
    assert cache["path"] == str(engine.path)
    assert (cache["blocks"], cache["slots"], cache["ranks"], cache["slot_bytes"]) == (20, 32, 2, SLOT)
    assert cache["in_use"] is True
    assert cache["disk_bytes"] >= 2 * SLOTS * SLOT


def test_stat_says_what_the_cache_is_of(engine, capsys):
    path = engine.stop()
    assert main(["cache", "stat", str(path)]) == 0
    text = capsys.readouterr().out
    for word in ("org/some-model", "bfloat16", "20 of 32 (62%)", "2 ranks", "not in use"):
        assert word in text


def test_the_directory_is_that_of_the_settings_unless_given(tmp_path, engine, capsys, monkeypatch):
    monkeypatch.setenv("DYN_KVBM_DISK_CACHE_DIR", str(tmp_path))
    assert main(["cache", "ls"]) == 0
    assert engine.path.name in capsys.readouterr().out


def test_host_tiers_that_were_kept_are_seen_too(tmp_path, engine, capsys, monkeypatch):
    memory = tmp_path / "memory"
    memory.mkdir()
    kept = Engine(memory, "org/kept").stop()
    monkeypatch.setenv("DYN_KVBM_DISK_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("KVBM_HOST_PERSIST_DIR", str(memory))
    assert main(["cache", "ls"]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [engine.path.name, kept.name]
    assert str(memory) in lines[1]
    assert main(["cache", "clear", "--all"]) == 1  # the other is in use
    assert not kept.exists()
    monkeypatch.setenv("KVBM_HOST_PERSIST_DIR", str(tmp_path / "missing"))
    assert main(["cache", "ls"]) == 0


def test_where_there_is_none_it_says_so(tmp_path, capsys):
    assert main(["cache", "ls", str(tmp_path)]) == 0
    assert f"no caches in {tmp_path}" in capsys.readouterr().err
    assert main(["cache", "ls", str(tmp_path / "missing")]) == 2
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize("running", [True, False])
def test_verify_finds_exactly_the_blocks_that_are_damaged(engine, capsys, monkeypatch, running):
    monkeypatch.setattr(caches, "_SETTLE_SECONDS", 0.05)
    if not running:
        engine.stop()
    assert main(["cache", "verify", str(engine.path)]) == 0
    assert capsys.readouterr().out.count("20 blocks good, 0 bad") == 2
    flip(engine.path, rank=1, slot=7)
    flip(engine.path, rank=1, slot=25)  # holds nothing
    assert main(["cache", "verify", str(engine.path)]) == 1
    text = capsys.readouterr().out
    assert "rank-0: 20 blocks good, 0 bad" in text
    assert "rank-1: 19 blocks good, 1 bad" in text
    assert "slots 7:" in text


def test_verify_beside_an_engine_that_writes_calls_nothing_bad(engine, capsys, monkeypatch):
    for slot in range(20, SLOTS):
        engine.store(slot)
    engine.index.flush()
    over = threading.Event()

    def write() -> None:
        while not over.is_set():
            engine.store(engine.chance.randrange(SLOTS))

    def stop(seconds: float = 0.0) -> None:
        over.set()
        thread.join()
        assert engine.index.flush(60)

    # In place of a second in which the index is written, however long this machine takes for it.
    monkeypatch.setattr(caches, "time", SimpleNamespace(sleep=stop))
    changed = 0
    while not changed:  # the first look may be over before the engine has written anything
        over.clear()
        thread = threading.Thread(target=write)
        thread.start()
        try:
            verdicts = caches.verify(engine.path, lambda done, total: None)
        finally:
            stop()
        for verdict in verdicts:
            assert 0 < verdict.good + verdict.changed <= SLOTS
            assert verdict.bad == []
            changed += verdict.changed


def test_verify_shows_how_far_it_is(engine):
    engine.stop()
    steps: list[tuple[int, int]] = []
    caches.verify(engine.path, lambda done, total: steps.append((done, total)))
    assert steps[-1] == (40, 40)


@pytest.mark.parametrize("who", ["leader", "worker"])
def test_clear_refuses_a_cache_in_use(engine, capsys, who):
    if who == "leader":
        for file in engine.files:
            file.close()
    else:
        engine.index.close()
    before = sorted(engine.path.iterdir())
    assert main(["cache", "clear", str(engine.path)]) == 1
    assert "is in use by an engine and stays" in capsys.readouterr().err
    assert sorted(engine.path.iterdir()) == before


def test_clear_removes_what_is_not_in_use(tmp_path, engine, capsys):
    other = Engine(tmp_path, "org/another").stop()
    assert main(["cache", "clear", str(tmp_path)]) == 2
    assert "use --all" in capsys.readouterr().err
    assert main(["cache", "clear", "--all", str(tmp_path)]) == 1
    assert not other.exists()
    assert engine.path.exists()
    engine.stop()
    assert main(["cache", "clear", str(engine.path)]) == 0
    assert not engine.path.exists()
    assert "free" in capsys.readouterr().out


def test_clear_leaves_files_that_are_not_of_a_cache(engine, capsys):
    engine.stop()
    (engine.path / "notes.txt").write_text("mine")
    assert main(["cache", "clear", str(engine.path)]) == 2
    assert [file.name for file in engine.path.iterdir()] == ["notes.txt"]
    assert "holds what is not of a cache: " in capsys.readouterr().err


def test_a_broken_index_is_told_and_can_be_removed(engine, capsys):
    engine.stop()
    (engine.path / DATABASE).write_bytes(b"nonsense" * 1000)
    assert main(["cache", "stat", str(engine.path)]) == 0
    assert "cannot be read of 32" in capsys.readouterr().out
    assert main(["cache", "verify", str(engine.path)]) == 2
    assert main(["cache", "clear", str(engine.path)]) == 0


def test_clear_removes_what_an_older_release_and_a_crash_have_left(engine):
    engine.stop()
    (engine.path / DATABASE).chmod(0o664)  # of an older release, with umask 002
    (engine.path / "cache.json.new").write_text("{")  # of a crash while it was written
    caches.clear(engine.path)
    assert not engine.path.exists()


def test_an_engine_can_start_at_once_where_a_cache_was_cleared(tmp_path, engine):
    engine.stop()
    caches.clear(engine.path)
    again = Engine(tmp_path)
    again.store(1)
    again.stop()


def test_looking_changes_nothing(engine):
    engine.stop()
    before = {file.name: file.read_bytes() for file in engine.path.iterdir()}
    caches.describe(engine.path)
    caches.verify(engine.path, lambda done, total: None)
    assert {file.name: file.read_bytes() for file in engine.path.iterdir()} == before


@pytest.mark.parametrize("action", ["verify", "clear", "stat", "ls"])
def test_a_path_that_is_not_there_fails(action, tmp_path, capsys):
    assert main(["cache", action, str(tmp_path / "gone")]) == 2
    assert f"{tmp_path / 'gone'}" in capsys.readouterr().err


def test_a_directory_without_caches_cannot_be_verified(tmp_path, capsys):
    assert main(["cache", "verify", str(tmp_path)]) == 1
    assert f"no caches in {tmp_path}" in capsys.readouterr().err
    assert main(["cache", "ls", str(tmp_path)]) == 0
