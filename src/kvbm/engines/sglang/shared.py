"""Pages that one rank writes and all ranks read: where every rank has the same KV, SGLang lets the first alone keep it.

The writer's disk tier is open to one process only. Beside it lies a map from keys to slots (``keys.map``), a hash table
in shared memory of a file, that the writer keeps up to date and the others look things up in. Nobody waits for anybody:
a reader may see an entry that is out of date, reads the slot all the same, and finds by its checksum, which covers the
key, that it holds another page by now.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from kvbm.config import Config
from kvbm.core.catalog import Catalog
from kvbm.core.counts import Counts
from kvbm.core.keys import Key
from kvbm.engines.sglang.observed import Lookups
from kvbm.engines.sglang.store import Page, scatter
from kvbm.plans import TierName
from kvbm.tiers import disk as disk_tier
from kvbm.tiers.bounded import Call, DaemonThreads, keep_until_exit
from kvbm.tiers.directory import CacheRefused, private_directory
from kvbm.tiers.disk.file import ALIGNMENT, SUMS_SUFFIX, checksum
from kvbm.tiers.disk.index import KEY_MAP, cache_directory, slab_path
from kvbm.tiers.disk.open import staging_slots

logger = logging.getLogger("kvbm")

DISK = disk_tier.TIER.name

_EMPTY, _GONE = 0, 1  # instead of the first bytes of a key
_SUM_BYTES = 8
_LOOK_SECONDS = 1.0  # that a call waits for a disk to say which files are there


class KeyMap:
    """A table of (first bytes of the key, slot), open addressing, at most half full. One writer, many readers."""

    def __init__(self, path: Path, slots: int = 0) -> None:
        """``slots``: make a table for so many, as its writer; 0: open the one that is there."""
        if slots:
            path.unlink(missing_ok=True)  # not truncated: that would kill whoever still reads the one before
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL if slots else os.O_RDONLY
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if slots:
                # All of it: a page that finds no room on the disk would kill the process that writes to it.
                os.posix_fallocate(fd, 0, 16 << (2 * slots - 1).bit_length())
            self._file = os.fstat(fd)
            self._map = mmap.mmap(fd, 0, access=mmap.ACCESS_WRITE if slots else mmap.ACCESS_READ)
        finally:
            os.close(fd)
        self._table = np.frombuffer(self._map, dtype=np.dtype([("key", "<u8"), ("slot", "<u8")]))
        self._mask = len(self._table) - 1
        self._gone = 0

    def is_at(self, path: Path) -> bool:
        """Whether it is the one that lies there, and not that of a writer before."""
        try:
            return os.path.samestat(self._file, os.stat(path))
        except OSError:
            return True  # none is there

    def find(self, key: Key) -> int | None:
        mark = _mark(key)
        for at in self._places(mark):
            found = int(self._table["key"][at])
            if found == mark:
                return int(self._table["slot"][at])
            if found == _EMPTY:
                return None
        return None

    def put(self, pairs: Iterable[tuple[Key, int]]) -> None:
        for key, slot in pairs:
            self._insert(_mark(key), slot)

    def remove(self, keys: Iterable[Key]) -> None:
        for key in keys:
            mark = _mark(key)
            for at in self._places(mark):
                found = int(self._table["key"][at])
                if found == mark:
                    self._table["key"][at] = _GONE
                    self._gone += 1
                if found in (mark, _EMPTY):
                    break
        if self._gone > len(self._table) // 8:
            self._tidy_up()

    def clear(self) -> None:
        self._table["key"] = _EMPTY
        self._gone = 0

    def close(self) -> None:
        del self._table
        self._map.close()

    def _insert(self, mark: int, slot: int) -> None:
        for at in self._places(mark):
            if int(self._table["key"][at]) in (_EMPTY, _GONE, mark):
                self._table["slot"][at] = slot  # before it can be found
                self._table["key"][at] = mark
                return

    def _places(self, mark: int) -> Iterable[int]:
        return ((mark + i) & self._mask for i in range(len(self._table)))

    def _tidy_up(self) -> None:
        """Without the places of what is gone. Readers miss something for a moment."""
        there = self._table[self._table["key"] > _GONE].copy()
        self.clear()
        for mark, slot in there.tolist():
            self._insert(mark, slot)


def _mark(key: Key) -> int:
    return max(int.from_bytes(key[:8], "little"), 2)


_Found = tuple[int, int, KeyMap]  # slab, checksums, which page lies where


class Reader:
    """What another rank has written, for a rank that writes nothing. As :class:`~kvbm.engines.sglang.store.Store`."""

    def __init__(self, config: Config, cache: Mapping[str, str | int], page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.counts = Counts()
        self.lookups = Lookups(config.cache_stats_max_requests)
        self.tiers: Mapping[TierName, Catalog] = {}  # all of them the writer's
        self.directory = cache_directory(config.disk_cache_dir, cache)
        self._slot_bytes = -(-page_bytes // ALIGNMENT) * ALIGNMENT
        self._direct = 0 if config.disk_disable_o_direct else os.O_DIRECT
        self._lock = threading.Lock()
        self._keys: KeyMap | None = None
        self._file = self._sums = -1
        self._looked = 0.0
        self._looking: Call[_Found | None] | None = None
        self._refused = False  # and said so
        slots = staging_slots(config, self._slot_bytes)
        self._memory = mmap.mmap(-1, slots * self._slot_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._free = list(range(slots))  # places of the memory that no read writes to
        self._threads = DaemonThreads(config.disk_threads, "kvbm-read")

    # -- finding ------------------------------------------------------------------------------------------------------

    def count(self, keys: Sequence[Key]) -> int:
        has = self.has(keys)
        found = has.index(False) if False in has else len(has)
        with self._lock:
            self.lookups.add(len(keys), {DISK: found} if found else {})
            self.counts.matched_blocks[DISK] = self.counts.matched_blocks.get(DISK, 0) + found
        return found

    def has(self, keys: Sequence[Key]) -> list[bool]:
        with self._lock:
            there = self._open()
            return [there is not None and there.find(key) is not None for key in keys]

    def _open(self) -> KeyMap | None:
        """The writer's files, once it has made them. With the lock: nobody closes them meanwhile."""
        now, patience = time.monotonic(), 0.0
        if self._looking is None and now - self._looked > 1.0:
            self._looked, patience = now, _LOOK_SECONDS
            self._looking = Call(lambda keys=self._keys: self._look(keys), str(self.directory), _close_found)
        if self._looking is not None and self._looking.wait(patience):
            found, self._looking = self._looking.result(), None
            if found is not None:
                slab, sums, keys = found
                self._file, self._sums = _take_place(self._file, slab), _take_place(self._sums, sums)
                if self._keys is not None:
                    self._keys.close()  # the writer has begun anew
                self._keys = keys
        return self._keys

    def _look(self, keys: KeyMap | None) -> _Found | None:
        """Files that are not open yet. None when there are none, or they are not whole."""
        slab = slab_path(self.directory, 0)
        if keys is not None and keys.is_at(self.directory / KEY_MAP):
            return None
        opened: list[int] = []
        try:
            private_directory(self.directory, make=False)
            opened.append(_open_file(slab, self._direct))
            opened.append(_open_file(slab.with_name(slab.name + SUMS_SUFFIX)))
            return opened[0], opened[1], KeyMap(self.directory / KEY_MAP)
        except CacheRefused as error:
            if not self._refused:
                logger.warning("this rank reads no pages from disk: %s", error.strerror)
            self._refused = True
        except (OSError, ValueError):
            pass
        for fd in opened:
            os.close(fd)
        return None

    # -- reading ------------------------------------------------------------------------------------------------------

    def get(self, keys: Sequence[Key], pages: Sequence[Page], patience: float) -> list[bool]:
        """As the store's: up to the first page that cannot be had, and nothing is written to a page afterwards."""
        arrived: list[bool] = []
        while len(arrived) < len(keys) and all(arrived):
            group = self._begin(keys[len(arrived) :])
            if not group:
                break
            arrived += self._end(group, pages[len(arrived) :], patience)
        with self._lock:
            self.counts.add_onboarded(DISK, sum(arrived))
            self.counts.failed_load_blocks += arrived.count(False)
        return arrived + [False] * (len(keys) - len(arrived))

    def _begin(self, keys: Sequence[Key]) -> list[tuple[int, Future[bool]]]:
        """Reads of as many pages as there is memory for."""
        reads: list[tuple[int, Future[bool]]] = []
        with self._lock:
            there = self._open()
            for key in keys:
                slot = there.find(key) if there is not None else None
                if slot is None or not self._free:
                    break
                place = self._free.pop()
                reads.append((place, self._threads.submit(self._read, key, slot, place)))
        return reads

    def _end(self, reads: list[tuple[int, Future[bool]]], pages: Sequence[Page], patience: float) -> list[bool]:
        arrived: list[bool] = []
        for (place, read), page in zip(reads, pages, strict=False):
            try:
                good = all(arrived) and read.result(patience)
            except Exception:  # the disk's fault, or its silence
                good = False
            if good:
                scatter(self._address + place * self._slot_bytes, page)
            arrived.append(good)
            # While a read is under way its place is nobody else's.
            read.add_done_callback(lambda _, place=place: self._free.append(place))
        return arrived

    def _read(self, key: Key, slot: int, place: int) -> bool:
        buffer = (ctypes.c_char * self._slot_bytes).from_address(self._address + place * self._slot_bytes)
        if os.preadv(self._file, [buffer], slot * self._slot_bytes) != self._slot_bytes:
            return False
        expected = os.pread(self._sums, _SUM_BYTES, ALIGNMENT + slot * _SUM_BYTES)
        return int.from_bytes(expected, "little") == checksum(buffer, key)

    # -- the rest -----------------------------------------------------------------------------------------------------

    def put(self, keys: Sequence[Key], pages: Sequence[Page], deadline: float) -> list[bool]:
        """Nothing: another rank keeps these pages."""
        return [False] * len(keys)

    def clear(self) -> None:
        """Nothing: the writer clears what is its own."""

    def close(self) -> None:
        with self._lock:
            if self._keys is not None:
                self._keys.close()
                self._keys = None
            self._looked = float("inf")
            if self._looking is not None:
                self._looking.abandon()
                self._looking = None
        # Reads that are under way still have the files and the memory.
        if not self._threads.close(cancel=True):
            logger.warning("disk tier: %s has not answered, so the engine ends without it", self.directory)
            keep_until_exit(self._memory)
            return
        for fd in (self._file, self._sums):
            if fd >= 0:
                os.close(fd)
        self._file = self._sums = -1


def _open_file(path: Path, flags: int = 0) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flags)


def _take_place(fd: int, fresh: int) -> int:
    """Put an open file in the place of another, if there is one. Reads of that one go on to their end."""
    if fd < 0:
        return fresh
    os.dup2(fresh, fd, inheritable=False)
    os.close(fresh)
    return fd


def _close_found(found: _Found | None) -> None:
    if found is not None:
        os.close(found[0])
        os.close(found[1])
        found[2].close()
