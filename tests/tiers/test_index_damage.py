"""An index that is damaged costs its blocks and never a start; trouble that passes costs nothing once it has passed."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbm.tiers.bounded import DiskHangs
from kvbm.tiers.disk import database
from kvbm.tiers.disk import index as index_module
from kvbm.tiers.disk.cache_dir import DESCRIPTION, cache_directory
from kvbm.tiers.disk.database import IndexUnavailable
from kvbm.tiers.disk.index import DATABASE, Index

WHAT = {"model": "some-model", "block_size": 16}
SLOTS = 300
BLOCKS = 200


def key(i: int) -> bytes:
    return random.Random(i).randbytes(32)


# Every third slot is empty: a flipped bit in the number of a slot often leads to one of those.
TRUTH = {key(i): i * 3 // 2 for i in range(BLOCKS)}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A cache with blocks in it, put and touched at different times."""
    place = cache_directory(tmp_path, WHAT)
    index = Index.open(place, WHAT, SLOTS)
    for at in range(0, BLOCKS, 20):
        index.put(list(TRUTH.items())[at : at + 20])
        index.flush()
    index.touch(list(TRUTH)[::7])
    index.close()
    return place


def found(place: Path) -> dict[bytes, int]:
    index = Index.open(place, WHAT, SLOTS)
    pairs = list(index.entries())
    index.close()
    assert len(pairs) == len(dict(pairs)) == len({slot for _, slot in pairs})
    return dict(pairs)


def check_start(place: Path) -> int:
    """Starts twice, with a new block in between; returns how many of the old blocks the first start found."""
    index = Index.open(place, WHAT, SLOTS)
    before = dict(index.entries())
    assert before.items() <= TRUTH.items(), "a wrong block was found"
    fresh = {b"fresh" * 4: SLOTS - 1}
    index.put(list(fresh.items()))
    assert index.flush(60)
    index.close()
    assert found(place) == before | fresh
    return len(before)


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.long)])
def test_a_flipped_bit_anywhere_costs_blocks_and_nothing_else(every, place, tmp_path, caplog):
    """Every byte of the file's header and of the schema, and many places in the rest; or one in so many of them."""
    whole = (place / DATABASE).read_bytes()
    chance = random.Random(3)
    page = int.from_bytes(whole[16:18], "big")
    schema = whole.rindex(b"CREATE TABLE", 0, page)
    places = [*range(110), *range(schema - 20, page)]
    places += [at for at in range(page, len(whole), page) for at in range(at, at + 12)]  # headers of pages
    places += [chance.randrange(len(whole)) for _ in range(300)]
    assert len(places) > 500
    places = places[::every]
    kept, all_gone = [], 0
    for number, at in enumerate(places):
        copy = tmp_path / "copy" / str(number)
        shutil.copytree(place, copy)
        raw = bytearray(whole)
        raw[at] ^= 1 << chance.randrange(8)
        (copy / DATABASE).write_bytes(raw)
        caplog.clear()
        kept.append(check_start(copy))
        if kept[-1] < BLOCKS:
            assert "starting clean" in caplog.text or "rows of the index are damaged" in caplog.text, at
        all_gone += not kept[-1]
        shutil.rmtree(copy)
    assert 0 < all_gone < len(places)
    assert kept.count(BLOCKS - 1) > 100 // every  # most bits lie in a row, and cost that row


def test_a_flipped_bit_in_the_log_leaves_what_was_there_at_some_time(place, tmp_path):
    """The engine was killed, so the log still holds what it wrote last."""
    copy = tmp_path / "killed"
    index = Index.open(place, WHAT, SLOTS)
    index.put([(b"later" * 4, 2)])
    assert index.flush(60)
    shutil.copytree(place, copy)
    index.close()
    log = (copy / f"{DATABASE}-wal").read_bytes()
    assert log
    chance = random.Random(4)
    later = TRUTH | {b"later" * 4: 2}
    for _ in range(100):
        raw = bytearray(log)
        raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
        again = tmp_path / "again"
        shutil.copytree(copy, again)
        (again / f"{DATABASE}-wal").write_bytes(raw)
        assert found(again).items() <= later.items()
        assert found(again).items() <= later.items()
        shutil.rmtree(again)


def _directory(file: Path) -> None:
    file.unlink(missing_ok=True)
    file.mkdir()
    (file / "something").write_text("of the user")


def _special(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        file.unlink(missing_ok=True)
        make(file)

    return damage


DAMAGES = {
    "fifo": _special(lambda file: os.mkfifo(file, 0o600)),
    "socket": _special(lambda file: os.mknod(file, stat.S_IFSOCK | 0o600)),
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: os.truncate(file, file.stat().st_size // 2 + 100),
    "one byte": lambda file: file.write_bytes(b"S"),
    "header only": lambda file: os.truncate(file, 100),
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "garbage": lambda file: file.write_bytes(random.Random(5).randbytes(50_000)),
    "directory": _directory,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [DATABASE, DESCRIPTION, f"{DESCRIPTION}.new"])
@pytest.mark.timeout(300)
def test_whatever_lies_in_the_place_of_a_file_the_index_starts(place, name, damage):
    if name == f"{DESCRIPTION}.new":
        (place / name).touch(0o600)
        (place / DESCRIPTION).unlink()
    DAMAGES[damage](place / name)
    assert check_start(place) <= BLOCKS


def test_a_description_larger_than_any_engine_writes_is_not_read(place):
    with open(place / DESCRIPTION, "ab") as file:
        file.write(b" " * (1 << 20))  # and still valid JSON
    index = Index.open(place, WHAT, SLOTS)
    index.close()
    assert "1,048,576 bytes" in index.started_clean
    assert (place / DESCRIPTION).stat().st_size < 10_000


@pytest.mark.parametrize("suffix", ["-wal", "-shm", "-journal"])
def test_a_directory_in_the_place_of_a_log_is_moved_and_kept(place, suffix):
    _directory(place / f"{DATABASE}{suffix}")
    check_start(place)
    (moved,) = place.glob(f"{DATABASE}{suffix}.damaged-*")
    assert (moved / "something").read_text() == "of the user"


# -- trouble that passes ----------------------------------------------------------------------------------------------


def start_in_child(place: Path, limit: int, value: int) -> str:
    """What a start says in a process with a limit; the process must get to its end."""
    code = (
        "import resource, signal, sys\nfrom pathlib import Path\nfrom kvbm.tiers.disk.index import Index\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"resource.setrlimit({limit}, ({value}, {value}))\n"
        f"try:\n    index = Index.open(Path({str(place)!r}), {WHAT!r}, {SLOTS})\n"
        "except OSError as error:\n    sys.exit(print('refused:', error.strerror))\n"
        "index.put([(b'new' * 8, 2)])\nprint('found', len(list(index.entries())))\n"
        "print('flushed', index.flush(2))\nindex.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_disk_without_room_for_a_byte_costs_nothing_later(place):
    assert "refused:" in start_in_child(place, resource.RLIMIT_FSIZE, 0)
    assert found(place) == TRUTH


@pytest.mark.parametrize("room", [4096, 20_000, 33_000, 40_000])
def test_a_disk_that_fills_up_while_the_index_is_opened_or_written_costs_nothing_later(place, room):
    start_in_child(place, resource.RLIMIT_FSIZE, room)
    assert found(place).items() >= TRUTH.items()


def test_an_index_that_finds_no_room_to_be_made_is_made_later(tmp_path):
    place = cache_directory(tmp_path, WHAT)
    assert "refused:" in start_in_child(place, resource.RLIMIT_FSIZE, 0)
    assert "refused:" in start_in_child(place, resource.RLIMIT_FSIZE, 4096)
    assert found(place) == {}
    assert check_start(place) == 0


@pytest.mark.parametrize("files", range(3, 12))
def test_too_many_open_files_cost_nothing_later(place, files):
    start_in_child(place, resource.RLIMIT_NOFILE, files)
    assert found(place).items() >= TRUTH.items()


@pytest.fixture
def small(tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True)
    if made.returncode:
        pytest.skip("only root may mount a filesystem; limits of a process stand for it in the other tests")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_full_filesystem_costs_nothing_later(place, small, caplog):
    for name in (DATABASE, DESCRIPTION):
        shutil.copy(place / name, small / name)
    with open(small / "ballast", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    with pytest.raises(OSError, match=r"full|I/O error|No space left"):
        Index.open(small, WHAT, SLOTS)
    assert "starting clean" not in caplog.text
    (small / "ballast").unlink()
    assert found(small) == TRUTH


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EMFILE, errno.ENOSPC, errno.ESTALE])
def test_a_description_that_cannot_be_read_now_costs_nothing_later(place, monkeypatch, number):
    def fail(path):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as broken:
        broken.setattr(index_module.Path, "read_bytes", fail)
        with pytest.raises(OSError, match=os.strerror(number)):
            Index.open(place, WHAT, SLOTS)
    assert found(place) == TRUTH


LOCKER = """
import sqlite3, sys
database = sqlite3.connect(sys.argv[1])
database.execute("PRAGMA locking_mode = EXCLUSIVE")
database.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
"""


def test_an_index_that_another_process_has_locked_says_how_long_it_was_waited_for(place, monkeypatch):
    monkeypatch.setattr(database, "_LOCK_SECONDS", 0.5)
    child = subprocess.Popen(
        [sys.executable, "-c", LOCKER, place / DATABASE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout.readline() == "locked\n"
        began = time.monotonic()
        with pytest.raises(IndexUnavailable, match=r"another process has locked .*index\.sqlite.*waited \d+\.\d s"):
            Index.open(place, WHAT, SLOTS)
        assert time.monotonic() - began >= 0.5
    finally:
        child.communicate()
    assert found(place) == TRUTH


@pytest.mark.parametrize("code", database._PASSING)
def test_trouble_is_told_from_damage_with_and_without_the_code_of_sqlite(code):
    """Python 3.10 has the text alone."""
    path = Path("index.sqlite")
    text = sqlite3.OperationalError(database._PASSING[code])
    assert isinstance(database.explain(text, path, 1.0), IndexUnavailable)
    text.sqlite_errorcode = code | 7 << 8
    assert isinstance(database.explain(text, path, 1.0), IndexUnavailable)


@pytest.mark.parametrize("text", ["no such column: used", "database disk image is malformed", "file is not a database"])
def test_damage_is_told_from_trouble(text):
    assert isinstance(database.explain(sqlite3.DatabaseError(text), Path("index.sqlite"), 1.0), ValueError)


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("*** in database main ***\nTree 2 page 7: unable to get the page. error code=8458", True),  # a bad sector
        ("*** in database main ***\nTree 2 page 7: unable to get the page. error code=7", True),
        ("*** in database main ***\nFreelist: failed to get page 9", True),
        ("*** in database main ***\nTree 2 page 7: unable to get the page. error code=11", False),
        ("*** in database main ***\nTree 2 page 7: btreeInitPage() returns error code 11", False),
    ],
)
def test_a_page_that_the_disk_does_not_return_to_the_check_costs_nothing_later(place, monkeypatch, text, passes):
    class Checked(sqlite3.Connection):
        def execute(self, statement, *parameters):
            if "quick_check" in statement:
                return super().execute("SELECT ?", (text,))
            return super().execute(statement, *parameters)

    real = sqlite3.connect
    with monkeypatch.context() as patch:
        patch.setattr(database.sqlite3, "connect", lambda *given, **named: real(*given, factory=Checked, **named))
        if passes:
            with pytest.raises(IndexUnavailable, match="kvbm cache clear"):
                Index.open(place, WHAT, SLOTS)
        else:
            with pytest.raises(ValueError, match="Tree 2 page 7"):
                database.connect(place, SLOTS, "disk tier")
    assert found(place) == TRUTH


def test_the_thread_that_writes_closes_an_index_that_was_left_behind(place, monkeypatch):
    gate, real = threading.Event(), Index._write
    monkeypatch.setattr(Index, "_write", lambda self, changes: gate.wait(60) and real(self, changes))
    index = Index.open(place, WHAT, SLOTS)
    index.put([(b"late" * 4, 2)])
    index.close(0.3)
    with pytest.raises(OSError, match="in use"):
        Index.open(place, WHAT, SLOTS)
    gate.set()
    index._thread.join(60)
    assert found(place) == TRUTH | {b"late" * 4: 2}


def test_an_index_that_takes_long_to_read_reports_progress(place, monkeypatch):
    reports = []
    monkeypatch.setattr(database, "report_progress", lambda: reports.append(threading.get_ident()))
    monkeypatch.setattr(database, "_PROGRESS_STEPS", 100)
    database.connect(place, SLOTS, "disk tier").connection.close()
    assert len(reports) > BLOCKS // 100  # also from the check, and not only from the rows


def test_an_index_whose_caller_has_gone_on_is_not_read_to_its_end(place, monkeypatch):
    def gone():
        raise DiskHangs(errno.ETIMEDOUT, "too late")

    with monkeypatch.context() as patch:
        patch.setattr(database, "report_progress", gone)
        patch.setattr(database, "_PROGRESS_STEPS", 100)
        with pytest.raises(OSError):
            Index.open(place, WHAT, SLOTS)
    assert found(place) == TRUTH
