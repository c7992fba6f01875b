"""The caches that lie in a directory, seen from outside: what `kvbm cache` shows, checks and removes.

Safe beside an engine that uses them: nothing here writes to a cache but :func:`clear`, which takes the engine's own
locks first. The index is opened read-only, and blocks that change while they are being checked are left out.

Other users may put any file into /tmp. So this module reads only directories of this user, in places where no other
user can replace them (:mod:`kvbm.tiers.directory`), and opens only regular files of this user. It follows no link and
checks every size before it reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import fnmatch
import json
import mmap
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from kvbm.tiers.directory import CacheRefused, distrust_file, open_private, open_trusted
from kvbm.tiers.disk.cache_dir import DESCRIPTION, KEY_MAP, LOCK, MAX_DESCRIPTION_BYTES
from kvbm.tiers.disk.checksums import SUMS_SUFFIX, checksum, read_sums
from kvbm.tiers.disk.database import DATABASE, SUFFIXES
from kvbm.tiers.disk.prealloc import ALIGNMENT
from kvbm.tiers.lock import FileLock, is_locked

_PREFIX = "kvbm-"
_SLABS = "rank-*.slab"
_DATABASES = tuple(f"{DATABASE}{suffix}" for suffix in SUFFIXES)
_PIECE = 8 << 20  # bytes read at a time
_SETTLE_SECONDS = 1.0  # after which the index thread has written all changes
_MAX_SLOT = 1 << 32  # bytes; a block of the largest models has some tens of MB


class CacheError(Exception):
    """Not a cache, or one that cannot be read; the text says which and why."""


Files = dict[str, os.stat_result]  # by name


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
    """Directories of this user's caches: ``root`` itself if it is one, else those in it."""
    with _opened(root, open_trusted) as fd:
        here = os.fstat(fd)
        # Not in /tmp, where any user could hide all caches with a file of that name.
        if _is_mine(here) and not here.st_mode & stat.S_ISVTX and _exists(DESCRIPTION, fd):
            return [root]
        mine = [name for name, found in _entries(root, fd) if _is_mine(found)]
        return [root / name for name in mine if _exists(f"{name}/{DESCRIPTION}", fd)]


def links(root: Path) -> list[str]:
    """Names that a cache could have and that are links, which :func:`find` does not follow."""
    with _opened(root, open_trusted) as fd:
        return [name for name, found in _entries(root, fd) if stat.S_ISLNK(found.st_mode)]


def slabs_in(root: Path) -> Iterator[Path]:
    """The slabs of this user in a directory that can be trusted, also those that no leader has described yet."""
    with contextlib.suppress(CacheError), _opened(root, open_trusted) as fd:
        for name in [name for name, found in _entries(root, fd) if _is_mine(found)]:
            with contextlib.suppress(CacheError):
                yield from _slabs(root / name, _files(root / name))


def _entries(root: Path, fd: int) -> Iterator[tuple[str, os.stat_result]]:
    with _opened(root, lambda _: os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)) as readable:
        names = os.listdir(readable)
    for name in sorted(names):
        if name.startswith(_PREFIX):
            with contextlib.suppress(OSError):  # gone meanwhile
                yield name, os.stat(name, dir_fd=fd, follow_symlinks=False)


def _is_mine(found: os.stat_result) -> bool:
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _exists(name: str, fd: int) -> bool:
    try:
        os.stat(name, dir_fd=fd, follow_symlinks=False)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _opened(path: Path, how: Callable[[Path], int]) -> Iterator[int]:
    try:
        fd = how(path)
    except CacheRefused as error:
        raise CacheError(error.strerror) from error
    except OSError as error:
        raise CacheError(f"{path} cannot be read: {error.strerror}") from error
    try:
        yield fd
    finally:
        os.close(fd)


def _files(path: Path, *, group_may_write: bool = False) -> Files:
    """The files of a cache in its directory. Raises CacheError unless they are regular files of this user.

    ``group_may_write``: to remove them. An older release left files that a group can write to, where the umask is 002.

    Other users cannot replace them afterwards, so they can be opened by their paths.
    """
    found: Files = {}
    with _opened(path, open_private) as fd:
        for name in os.listdir(fd):
            if _is_file_of_cache(name):
                with contextlib.suppress(FileNotFoundError):  # an engine that ends removes its log
                    found[name] = os.stat(name, dir_fd=fd, follow_symlinks=False)
    for name, status in found.items():
        mode = status.st_mode & ~stat.S_IWGRP if group_may_write else status.st_mode
        if why := distrust_file(os.stat_result((mode, *status[1:10]))):
            raise CacheError(
                f"{path / name} {why}. The cache is left as it is: look at it, then remove the directory yourself"
            )
    return found


def _is_file_of_cache(name: str) -> bool:
    return name in (DESCRIPTION, f"{DESCRIPTION}.new", LOCK, KEY_MAP, *_DATABASES) or fnmatch.fnmatchcase(
        name.removesuffix(SUMS_SUFFIX), _SLABS
    )


def describe(path: Path) -> Cache:
    """Describe the cache in a directory."""
    files = _files(path)
    fingerprint, slots = _description(path, files)
    try:
        with _index(path) as database:
            blocks: int | None = database.execute("SELECT count(*) FROM blocks").fetchone()[0]
    except sqlite3.Error:
        blocks = None
    slabs = _slabs(path, files)
    return Cache(
        path=path,
        fingerprint=fingerprint,
        slots=slots,
        blocks=blocks,
        ranks=len(slabs),
        slot_bytes=_sums_of(slabs[0], files)[0] if slabs else 0,
        disk_bytes=sum(file.st_blocks * 512 for file in files.values()),
        used_at=max((file.st_mtime for file in files.values()), default=0.0),
        in_use=_in_use(path, files),
    )


def _description(path: Path, files: Files) -> tuple[dict[str, str | int], int]:
    file = path / DESCRIPTION
    try:
        if files[DESCRIPTION].st_size > MAX_DESCRIPTION_BYTES:
            raise ValueError(f"{files[DESCRIPTION].st_size:,} bytes, expected at most {MAX_DESCRIPTION_BYTES:,}")
        found = json.loads(file.read_bytes())
        fingerprint, slots = found["fingerprint"], found["slots"]
        if not isinstance(fingerprint, dict) or not all(isinstance(value, str | int) for value in fingerprint.values()):
            raise ValueError("fingerprint: expected text and numbers by name")
        if not isinstance(slots, int) or not 0 <= slots < 1 << 63:
            raise ValueError("slots: expected a number")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CacheError(f"{file} cannot be read: {error}") from error
    return fingerprint, slots


def _sums_of(slab: Path, files: Files) -> tuple[int, Any]:
    """As :func:`~kvbm.tiers.disk.file.read_sums`, of no more bytes than the slab has use for."""
    sums = files.get(_sums(slab).name)
    slab_bytes = files[slab.name].st_size
    # Eight bytes a slot of at least ALIGNMENT bytes. A slab that was cut has more of them than slots.
    if sums is None or sums.st_size > (1 << 30) + slab_bytes // ALIGNMENT * 8:
        return 0, ()
    slot_bytes, found = read_sums(_sums(slab))
    return (slot_bytes, found) if ALIGNMENT <= slot_bytes <= _MAX_SLOT else (0, ())


def _in_use(path: Path, files: Files) -> bool:
    return any(is_locked(file) for file in (path / LOCK, *_slabs(path, files)))


class Verdict(NamedTuple):
    """What became of the blocks of one rank."""

    rank: str
    good: int
    bad: list[int]  # slots
    changed: int  # overwritten by a running engine meanwhile


def verify(path: Path, progress: Callable[[int, int], None]) -> list[Verdict]:
    """Read every block of every rank and compare it with its checksum. ``progress`` gets (done, all) in blocks."""
    files = _files(path)
    rows = _rows(path)
    slabs = _slabs(path, files)
    total, done = len(rows) * len(slabs), 0
    verdicts = []
    busy = _in_use(path, files)
    for slab in slabs:
        slot_bytes, sums = _sums_of(slab, files)
        if not slot_bytes:
            raise CacheError(f"{_sums(slab)} cannot be read; the blocks of {slab.name} are lost")
        suspects: list[tuple[int, bytes]] = []
        # Beside an engine one thread, so that its requests keep the disk.
        for checked, bad in _check(slab, slot_bytes, sums, rows, threads=1 if busy else 4):
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
            sums = read_sums(_sums(slab))[1]
            suspects = [pair for _, bad in _check(slab, slot_bytes, sums, again, threads=1) for pair in bad]
        good = len(rows) - len(suspects) - changed
        verdicts.append(Verdict(slab.stem, good, sorted(slot for slot, _ in suspects), changed))
    return verdicts


def clear(path: Path) -> int:
    """Remove a cache and return how many bytes came free. Raises CacheInUse, and removes nothing, if it is in use."""
    files = _files(path, group_may_write=True)
    freed = sum(file.st_blocks * 512 for file in files.values())
    locks: list[FileLock] = []
    with _opened(path, open_private) as fd:
        try:
            for file in (path / LOCK, *_slabs(path, files)):
                locks.append(FileLock(file))
            # The description goes last but for the lock: until then it is a cache, and can be cleared again.
            for name in (*(files.keys() - {DESCRIPTION, LOCK}), DESCRIPTION, LOCK):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=fd)
        finally:
            for lock in locks:
                lock.release()
    try:
        path.rmdir()
    except OSError as error:
        left = ", ".join(sorted(os.listdir(path)))
        raise CacheError(f"{path} is not removed, because it holds what is not of a cache: {left}") from error
    return freed


def _slabs(path: Path, files: Files) -> list[Path]:
    slabs = [path / name for name in files if fnmatch.fnmatchcase(name, _SLABS)]
    return sorted(slabs, key=lambda slab: (len(slab.name), slab.name))


def _sums(slab: Path) -> Path:
    return slab.with_name(slab.name + SUMS_SUFFIX)


def _index(path: Path) -> contextlib.closing[sqlite3.Connection]:
    """The index, read-only, for the length of a ``with``."""
    file = path.absolute() / DATABASE
    # Without a log no process has it open, and it needs no lock. Locking would create files of this user.
    how = "mode=ro" if (path / f"{DATABASE}-wal").exists() else "mode=ro&immutable=1"
    return contextlib.closing(sqlite3.connect(f"file:{quote(str(file))}?{how}", uri=True))


def _rows(path: Path) -> list[tuple[int, bytes]]:
    try:
        with _index(path) as database:
            return database.execute("SELECT slot, key FROM blocks ORDER BY slot").fetchall()
    except sqlite3.Error as error:
        raise CacheError(f"{path / DATABASE} cannot be read: {error}") from error


def _check(
    slab: Path, slot_bytes: int, sums: Any, rows: Sequence[tuple[int, bytes]], threads: int
) -> Iterator[tuple[int, list[tuple[int, bytes]]]]:
    """(how many were looked at, those of them that do not fit), piece by piece."""
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
    """Open it past the page cache where possible: a single check must not evict cached files in use."""
    try:
        return os.open(slab, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return os.open(slab, os.O_RDONLY | os.O_CLOEXEC)
