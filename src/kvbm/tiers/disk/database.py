"""The SQLite file of an index: opened, checked row by row, and damage told apart from trouble that passes.

Damage is in the file and stays: a flipped bit, a truncated file, another format. It costs the blocks that it hit, or
all of them, and the index is made anew. Trouble that passes is around the file: a full disk, a lock of another process,
missing permissions, I/O errors, too many open files. It costs no block: it raises OSError, and nothing is changed.

The column `used` orders the blocks by their last use. A number from ``TURNS`` on also says where in its prompt a block
lies: the turn that used it, counted up, its distance from MAX_POSITION, and the first byte of its key. Blocks of one
turn with positions in a row follow one another. Numbers below ``TURNS`` are of older releases, which say the order
only; and an older release that goes on counting makes numbers that the keys do not fit.

SQLite has no checksums of its own in this file. Every row carries one over its slot and key, and the text of the schema
must be the very text that this release writes: a column that a flipped bit has renamed would give rows of other types.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import sqlite3
import stat
import time
import zlib
from collections.abc import Iterable
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

from kvbm.core.keys import Key
from kvbm.tiers.bounded import report_progress

logger = logging.getLogger("kvbm")

VERSION = 1
DATABASE = "index.sqlite"
SUFFIXES = ("", "-wal", "-shm", "-journal")

_SCHEMA = (
    "CREATE TABLE blocks (slot INTEGER PRIMARY KEY, key BLOB NOT NULL, used INTEGER NOT NULL, sum INTEGER NOT NULL)"
)
_ROWS = (
    "SELECT slot, key, used, sum FROM blocks "
    "WHERE typeof(key) = 'blob' AND typeof(used) = 'integer' AND typeof(sum) = 'integer' ORDER BY used"
)
DELETE_SLOTS = "DELETE FROM blocks WHERE slot IN (VALUES {})"
_LOCK_SECONDS = 5.0  # that a start waits for another process that has locked the file
_MAX_USED = 1 << 62  # leaves room to count on
_MAX_ROWS = 240  # of one statement: four values each, and every SQLite takes 999
TURNS = 1 << 61
MAX_POSITION = 0xFFFF  # blocks from there on have no position, and 0 in its place
POSITION_STEP = 1 << 8
_TURN_STEP = POSITION_STEP * (MAX_POSITION + 1)
_MAGIC = b"SQLite format 3\0"
_FORMATS = {1, 2}  # bytes 18 and 19; SQLite takes any other for a file of the future, which it does not write
# SQLite's result codes for trouble around the file, with the texts that stand for them before Python 3.11.
_PASSING = {
    3: "access permission denied",
    5: "database is locked",
    6: "database table is locked",
    7: "out of memory",
    8: "attempt to write a readonly database",
    9: "interrupted",
    10: "disk I/O error",
    13: "database or disk is full",
    14: "unable to open database file",
    15: "locking protocol",
    22: "large file support is disabled",
}
_BUSY = (5, 6, 15)
_PROGRESS_STEPS = 10_000  # of SQLite's virtual machine, and rows that are read, between two reports of progress


class IndexUnavailable(OSError):  # noqa: N818 - a state, not a mistake
    """The index cannot be used now, and may be usable later: nothing in it was changed."""


class Opened(NamedTuple):
    connection: sqlite3.Connection
    rows: list[tuple[Key, int]]  # (key, slot), least recently used first
    used: int  # the largest number in the column of that name


def row_sum(slot: int, key: Key) -> int:
    """Detects every single flipped bit in either."""
    return zlib.crc32(key, slot)


def used_in(turn: int, position: int = MAX_POSITION) -> int:
    """The number of a block that this turn uses, without the byte of its key. The first block of a prompt counts as
    used last."""
    return TURNS + turn * _TURN_STEP + (MAX_POSITION - position) * POSITION_STEP


def turn_of(used: int) -> int:
    """0 for the numbers of older releases."""
    return max(used - TURNS, 0) // _TURN_STEP


def position_of(used: int, key: Key) -> int | None:
    """Where in its prompt a block lies; None when that is not known."""
    position = MAX_POSITION - used % _TURN_STEP // POSITION_STEP
    is_known = used >= TURNS and position < MAX_POSITION and used % POSITION_STEP == key[0]
    return position if is_known else None


def connect(directory: Path, slots: int, what: str) -> Opened:
    """The database, made if there is none, checked from end to end.

    Raises ValueError when it is damaged, and OSError when it cannot be used now. ``what``: the tier, for log lines.
    """
    path = directory / DATABASE
    _check_files(directory)
    began = time.monotonic()
    try:
        connection = sqlite3.connect(path, timeout=_LOCK_SECONDS, check_same_thread=False)
        try:
            # A large index on a slow disk takes a while to read, and must not count as a disk that hangs.
            connection.set_progress_handler(report_progress, _PROGRESS_STEPS)
            opened = _check(connection, slots, what)
            connection.set_progress_handler(None, 0)
            return opened
        except BaseException:
            connection.close()
            raise
    except (sqlite3.Error, MemoryError) as error:
        raise explain(error, path, time.monotonic() - began) from error


def explain(error: sqlite3.Error | MemoryError, path: Path, seconds: float) -> OSError | ValueError:
    """What an error of SQLite means for the index: ValueError for damage, OSError for trouble that passes."""
    code = 7 if isinstance(error, MemoryError) else getattr(error, "sqlite_errorcode", None)
    if code is None:
        code = next((code for code, text in _PASSING.items() if text in str(error)), 1)
    code &= 0xFF
    if code in _BUSY:
        return IndexUnavailable(
            errno.EAGAIN,
            f"another process has locked {path}, a backup or a tool that reads it; waited {seconds:.1f} s ({error})",
        )
    if code in _PASSING:
        return IndexUnavailable(errno.EIO, f"{path} cannot be used now: {error or 'out of memory'}")
    return ValueError(str(error))


def _check_files(directory: Path) -> None:
    """Raises ValueError for a file that is no database: SQLite would report an error that passes."""
    for suffix in SUFFIXES:
        path = directory / f"{DATABASE}{suffix}"
        try:
            if not stat.S_ISREG(os.lstat(path).st_mode):
                raise ValueError(f"{path.name} is not a file")
        except FileNotFoundError:
            pass
    fd = os.open(directory / DATABASE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        header = os.pread(fd, 20, 0)
    finally:
        os.close(fd)
    if header and not (header.startswith(_MAGIC) and {*header[18:20]} <= _FORMATS):
        raise ValueError("file is not a database")


def _check(connection: sqlite3.Connection, slots: int, what: str) -> Opened:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version not in (0, VERSION):
        raise ValueError(f"its format is {version}, and this release writes {VERSION}")
    check = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if check != "ok":
        raise _explain_check(check)
    schema = connection.execute("SELECT CAST(sql AS BLOB) FROM sqlite_master").fetchall()
    if schema and schema != [(_SCHEMA.encode(),)]:
        raise ValueError("its table is not that of this release")
    # With a write-ahead log a crash at any moment leaves whole transactions, and a reader never waits.
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    good: list[tuple[Key, int, int]] = []
    damaged = rows = 0
    with connection:
        if not schema:
            connection.execute(_SCHEMA)
        connection.execute(f"PRAGMA user_version = {VERSION}")
        for slot, key, used, total in connection.execute(_ROWS):
            rows += 1
            if total != row_sum(slot, key) or not 0 <= used < _MAX_USED:
                damaged += 1
            elif 0 <= slot < slots:
                good.append((key, slot, used))
                if not len(good) % _PROGRESS_STEPS:
                    report_progress()
        kept = {slot for _, slot, _ in good}
        rest = [row for row in connection.execute("SELECT slot FROM blocks") if row[0] not in kept]
        damaged += len(kept) + len(rest) - rows  # those of other types
        execute(connection, DELETE_SLOTS, rest)
    if damaged:
        logger.warning("%s: %d rows of the index are damaged; it has forgotten their blocks", what, damaged)
    return Opened(connection, [(key, slot) for key, slot, _ in good], max((used for *_, used in good), default=0))


def _explain_check(text: str) -> OSError | ValueError:
    """SQLite's check reports a page that the disk did not return as text, in the place of an error."""
    code = re.search(r"unable to get the page\. error code=(\d+)", text)
    if "failed to get page" in text or (code is not None and int(code[1]) & 0xFF in _PASSING):
        return IndexUnavailable(
            errno.EIO,
            f"the disk returned an error while the index was checked ({text}). Nothing was deleted. If the error "
            "stays, as with a bad sector, discard the cache with `kvbm cache clear`",
        )
    return ValueError(text)


def set_aside(directory: Path) -> None:
    """Remove the files of a damaged index."""
    for suffix in SUFFIXES:
        make_way(directory / f"{DATABASE}{suffix}")


def make_way(path: Path) -> None:
    """Remove a file, or what lies in its place. A directory is renamed: KVBM did not create it."""
    try:
        path.unlink()
    except FileNotFoundError:
        pass
    except (IsADirectoryError, PermissionError):
        if not path.is_dir():
            raise
        path.rename(path.with_name(f"{path.name}.damaged-{time.time_ns()}"))


def execute(connection: sqlite3.Connection, statement: str, rows: Iterable[tuple[object, ...]]) -> None:
    """Many rows with one call, and not with a call for each: every call lets go of the interpreter, and to get it back
    from a busy engine may take milliseconds."""
    rows = iter(rows)
    while some := list(islice(rows, _MAX_ROWS)):
        row = f"({', '.join('?' * len(some[0]))})"
        connection.execute(statement.format(", ".join([row] * len(some))), list(chain.from_iterable(some)))
