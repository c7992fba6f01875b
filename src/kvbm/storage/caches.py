"""The caches that lie in a directory, seen from outside: what `kvbm cache` shows, checks and removes.

Safe beside an engine that uses them: nothing here writes to a cache but :func:`clear`, which takes the engine's own
locks first. The index is opened read-only, and blocks that change while they are being checked are left out.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from kvbm.storage.database import DATABASE, SUFFIXES
from kvbm.storage.disk import SUMS_SUFFIX, checksum, read_sums
from kvbm.storage.index import DESCRIPTION, KEY_MAP, LOCK
from kvbm.storage.lock import FileLock, is_locked

_SLABS = "rank-*.slab"
_PIECE = 8 << 20  # bytes read at a time
_SETTLE_SECONDS = 1.0  # after which the index has caught up with whatever was being written


class CacheError(Exception):
    """Not a cache, or one that cannot be read; the text says which and why."""


class Cache(NamedTuple):
    path: Path
    fingerprint: dict[str, str | int]
    slots: int
    blocks: int | None  # None: the index cannot be read
    ranks: int
    slot_bytes: int  # on one rank; 0 when no rank has made its file
    disk_bytes: int  # that the files take on the disk
    used_at: float  # seconds since 1970 of the latest change
    in_use: bool

    @property
    def model(self) -> str:
        return str(self.fingerprint.get("model", "?"))


def find(root: Path) -> list[Path]:
    """Directories of caches: ``root`` itself if it is one, else those in it."""
    if (root / DESCRIPTION).is_file():
        return [root]
    try:
        return sorted(path for path in root.iterdir() if _is_cache(path))
    except OSError as error:
        raise CacheError(f"{root} cannot be read: {error.strerror}") from error


def _is_cache(path: Path) -> bool:
    try:
        return path.name.startswith("kvbm-") and (path / DESCRIPTION).is_file()
    except OSError:  # of another user
        return False


def describe(path: Path) -> Cache:
    """What lies in the directory of a cache."""
    try:
        description = json.loads((path / DESCRIPTION).read_bytes())
        fingerprint, slots = dict(description["fingerprint"]), int(description["slots"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CacheError(f"{path / DESCRIPTION} cannot be read: {error}") from error
    try:
        with _index(path) as database:
            blocks: int | None = database.execute("SELECT count(*) FROM blocks").fetchone()[0]
    except sqlite3.Error:
        blocks = None
    slabs = _slabs(path)
    files = [file.stat() for file in path.iterdir() if file.is_file()]
    return Cache(
        path=path,
        fingerprint=fingerprint,
        slots=slots,
        blocks=blocks,
        ranks=len(slabs),
        slot_bytes=read_sums(_sums(slabs[0]))[0] if slabs else 0,
        disk_bytes=sum(file.st_blocks * 512 for file in files),
        used_at=max((file.st_mtime for file in files), default=0.0),
        in_use=in_use(path),
    )


def in_use(path: Path) -> bool:
    return any(is_locked(file) for file in (path / LOCK, *_slabs(path)))


class Verdict(NamedTuple):
    """What became of the blocks of one rank."""

    rank: str
    good: int
    bad: list[int]  # slots
    changed: int  # overwritten by a running engine meanwhile


def verify(path: Path, progress: Callable[[int, int], None]) -> list[Verdict]:
    """Read every block of every rank and compare it with its checksum. ``progress`` gets (done, all) in blocks."""
    rows = _rows(path)
    slabs = _slabs(path)
    total, done = len(rows) * len(slabs), 0
    verdicts = []
    busy = in_use(path)
    for slab in slabs:
        slot_bytes = read_sums(_sums(slab))[0]
        if not slot_bytes:
            raise CacheError(f"{_sums(slab)} cannot be read; the blocks of {slab.name} are lost")
        suspects: list[tuple[int, bytes]] = []
        # Beside an engine one thread, so that its requests keep the disk.
        for checked, bad in _check(slab, slot_bytes, rows, threads=1 if busy else 4):
            done += checked
            suspects += bad
            progress(done, total)
        # What an engine overwrites just now does not fit either. A moment later its index no longer claims it.
        changed = 0
        if suspects and busy:
            time.sleep(_SETTLE_SECONDS)
            now = dict(_rows(path))
            again = [(slot, key) for slot, key in suspects if now.get(slot) == key]
            changed = len(suspects) - len(again)
            suspects = [pair for _, bad in _check(slab, slot_bytes, again, threads=1) for pair in bad]
        good = len(rows) - len(suspects) - changed
        verdicts.append(Verdict(slab.stem, good, sorted(slot for slot, _ in suspects), changed))
    return verdicts


def clear(path: Path) -> int:
    """Remove a cache and return how many bytes came free. Raises CacheInUse, and removes nothing, if it is in use."""
    freed = describe(path).disk_bytes
    slabs = _slabs(path)
    locks: list[FileLock] = []
    try:
        for file in (path / LOCK, *slabs):
            locks.append(FileLock(file))
        names = [*slabs, *(_sums(slab) for slab in slabs)]
        names += [path / f"{DATABASE}{suffix}" for suffix in SUFFIXES]
        names.append(path / KEY_MAP)
        # The description goes last but for the lock: until then it is a cache, and can be cleared again.
        for file in (*names, path / DESCRIPTION, path / LOCK):
            file.unlink(missing_ok=True)
    finally:
        for lock in locks:
            lock.release()
    try:
        path.rmdir()
    except OSError as error:
        raise CacheError(f"{path} is not removed, because there are files in it that are not of a cache") from error
    return freed


def _slabs(path: Path) -> list[Path]:
    return sorted(path.glob(_SLABS), key=lambda slab: (len(slab.name), slab.name))


def _sums(slab: Path) -> Path:
    return slab.with_name(slab.name + SUMS_SUFFIX)


class _index:  # noqa: N801 - used like a function
    """The index, read-only, for the length of a ``with``."""

    def __init__(self, path: Path) -> None:
        file = path.absolute() / DATABASE
        # Without a log nobody has it open, and it need not be locked. Locking makes files, of the user who looks.
        how = "mode=ro" if (path / f"{DATABASE}-wal").exists() else "mode=ro&immutable=1"
        self._database = sqlite3.connect(f"file:{quote(str(file))}?{how}", uri=True)

    def __enter__(self) -> sqlite3.Connection:
        return self._database

    def __exit__(self, *_: Any) -> None:
        self._database.close()


def _rows(path: Path) -> list[tuple[int, bytes]]:
    try:
        with _index(path) as database:
            return database.execute("SELECT slot, key FROM blocks ORDER BY slot").fetchall()
    except sqlite3.Error as error:
        raise CacheError(f"{path / DATABASE} cannot be read: {error}") from error


def _check(
    slab: Path, slot_bytes: int, rows: Sequence[tuple[int, bytes]], threads: int
) -> Iterator[tuple[int, list[tuple[int, bytes]]]]:
    """(how many were looked at, those of them that do not fit), piece by piece."""
    sums = read_sums(_sums(slab))[1]
    buffers = threading.local()
    slots_a_piece = max(1, _PIECE // slot_bytes)
    fd = _open(slab)

    def check(piece: Sequence[tuple[int, bytes]]) -> tuple[int, list[tuple[int, bytes]]]:
        if not hasattr(buffers, "map"):
            buffers.map = mmap.mmap(-1, slot_bytes)  # page-aligned, as O_DIRECT wants it
            buffers.view = (ctypes.c_char * slot_bytes).from_buffer(buffers.map)
        bad = []
        for slot, key in piece:
            try:
                got = os.preadv(fd, [buffers.view], slot * slot_bytes)
            except OSError:
                got = 0
            if got != slot_bytes or slot >= len(sums) or checksum(buffers.view, key) != sums[slot]:
                bad.append((slot, key))
        return len(piece), bad

    try:
        with ThreadPoolExecutor(threads, thread_name_prefix="kvbm-verify") as pool:
            pieces = (rows[at : at + slots_a_piece] for at in range(0, len(rows), slots_a_piece))
            yield from pool.map(check, pieces)
    finally:
        os.close(fd)


def _open(slab: Path) -> int:
    """Past the page cache where that is possible: what is checked once shall not push out what is used."""
    try:
        return os.open(slab, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return os.open(slab, os.O_RDONLY | os.O_CLOEXEC)
