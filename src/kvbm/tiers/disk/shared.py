"""A cache that one process writes and others read: where every rank has the same KV, one rank keeps it for all.

The writer's disk tier is open to one process only. Beside its index lies a map from keys to slots (``keys.map``), a
hash table in shared memory of a file, which the writer keeps up to date and the readers look up. Neither side waits for
the other. A reader may see an entry that is out of date, and reads the slot all the same: the checksum covers the key,
so a slot that holds another block by now counts as bad.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
import time
from collections.abc import Iterable, Sequence
from math import inf
from pathlib import Path

import numpy as np

from kvbm.config import Config
from kvbm.core.catalog import Hint, Journal, ReadOnlyCatalog
from kvbm.core.keys import Key
from kvbm.tiers.base import Operation, Store
from kvbm.tiers.bounded import Call, DaemonThreads, reason_of
from kvbm.tiers.directory import CacheRefused, private_directory
from kvbm.tiers.disk.cache_dir import KEY_MAP, slab_path
from kvbm.tiers.disk.checksums import SUMS_SUFFIX, checksum
from kvbm.tiers.disk.index import Index
from kvbm.tiers.disk.prealloc import ALIGNMENT

logger = logging.getLogger("kvbm")

_EMPTY, _GONE = 0, 1  # instead of the first bytes of a key
_SUM_BYTES = 8
_LOOK_INTERVAL_SECONDS = 1.0  # between two looks for the map of a writer
_FIRST_LOOK_SECONDS = 1.0  # that a start waits for the disk to say whether there is a map


class KeyMap:
    """A table of (first bytes of the key, slot), open addressing, at most half full. One writer, many readers."""

    def __init__(self, path: Path, slots: int = 0) -> None:
        """``slots``: make a table for so many, as its writer; 0: open the one that is there."""
        if slots:
            path.unlink(missing_ok=True)  # not truncated: that would kill a process that still reads the one before
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


class MappedIndex(Journal):
    """The index, and the map for the readers beside it."""

    def __init__(self, index: Index, keys: KeyMap) -> None:
        self._index, self._keys = index, keys

    @classmethod
    def over(cls, index: Index, slots: int) -> Journal:
        """The index alone, with a warning, when the map cannot be made now. Closes the index where it raises."""
        try:
            keys = KeyMap(index.directory / KEY_MAP, slots)
            keys.put(index.entries())
            return cls(index, keys)
        except OSError as error:
            reason = error.strerror or error
            logger.warning("cannot create %s, so ranks that only read get no disk hits: %s", KEY_MAP, reason)
            return index
        except BaseException:
            index.close()
            raise

    def put(self, pairs: Sequence[tuple[Key, int]]) -> None:
        self._index.put(pairs)
        self._keys.put(pairs)

    def remove(self, keys: Iterable[Key]) -> None:
        keys = list(keys)
        self._index.remove(keys)
        self._keys.remove(keys)

    def touch(self, keys: Sequence[Key], is_prefix: bool = False) -> None:
        self._index.touch(keys, is_prefix)

    def clear(self) -> None:
        self._index.clear()
        self._keys.clear()

    def close(self, timeout: float | None = None) -> None:
        self._index.close(timeout)
        self._keys.close()


class SharedCatalog(ReadOnlyCatalog):
    """What the writer's map says. Finds blocks and holds none: the writer may evict any of them at any time."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / KEY_MAP
        self._keys: KeyMap | None = None
        self._looking: Call[KeyMap | None] | None = None
        self._looked_at = -inf
        self._is_refused = False  # and logged
        self._is_over = False  # finds nothing any more
        self.expect(())
        if self._looking is not None and self._looking.wait(_FIRST_LOOK_SECONDS):
            self.expect(())

    def expect(self, keys: Sequence[Key], start: int = 0, hint: Hint | None = None) -> None:
        """Take in the map of a writer that has begun since, and start to look for the next one once a second."""
        now = time.monotonic()
        if self._looking is None and not self._is_over and now - self._looked_at > _LOOK_INTERVAL_SECONDS:
            self._looked_at, known = now, self._keys
            self._looking = Call(lambda: self._look(known), str(self._path))
        if self._looking is not None and self._looking.wait(0.0):
            looking, self._looking = self._looking, None
            self._keys = looking.result() or self._keys  # the map before is closed when its last lookup ends

    def _look(self, known: KeyMap | None) -> KeyMap | None:
        """The map that lies there; None when it is known, or there is none that can be used."""
        if known is not None and known.is_at(self._path):
            return None
        try:
            private_directory(self._path.parent, make=False)
            return KeyMap(self._path)
        except CacheRefused as error:
            if not self._is_refused:
                logger.warning("this rank reads no blocks from disk: %s", error.strerror)
            self._is_refused = True
        except (OSError, ValueError):
            pass
        return None

    def find(self, key: Key) -> int | None:
        keys = None if self._is_over else self._keys
        return None if keys is None else keys.find(key)

    def clear(self) -> int:
        """The writer clears its blocks too, and shows no more of them: this rank looks for none."""
        self._is_over = True
        self._keys = None
        return 0

    def close(self, timeout: float | None = None) -> None:
        self.clear()  # a map is closed when its last lookup ends

    free = pinned = 0


class SharedFile(Store):
    """Reads the writer's slab and its checksums. Opens them at the first read, and again when a slot does not hold its
    block and other files lie there: the writer has begun anew."""

    def __init__(self, config: Config, directory: Path, slot_bytes: int) -> None:
        self.identity = directory.name
        self.stall_seconds = config.disk_load_timeout_secs
        slab, flags = slab_path(directory, 0), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        direct = 0 if config.disk_disable_o_direct else os.O_DIRECT
        self._paths = {slab: flags | direct, slab.with_name(slab.name + SUMS_SUFFIX): flags}
        self._directory = directory
        self._files: list[int] = []  # slab and checksums
        self._openings = 0
        self._opening = threading.Lock()
        self._slot_bytes = slot_bytes
        self._threads = DaemonThreads(config.disk_threads, "kvbm-read")

    def describe(self) -> str:
        return f"what another rank writes to {self._directory}"

    def read(self, slots: Sequence[int], addresses: Sequence[int], tags: Sequence[bytes]) -> Operation:
        operation = Operation("read", slots, addresses, tags, self._slot_bytes)
        operation.parts_left = max(1, len(slots))
        for position in range(len(slots)):
            try:
                self._threads.submit(self._read, operation, position)
            except RuntimeError as error:  # closed
                operation.end_part([position], str(error))
        if not slots:
            operation.end_part([], "")
        return operation

    def _read(self, operation: Operation, position: int) -> None:
        operation.begin_part()
        try:
            reason, seen = "cancelled", self._openings
            if not operation.cancelled:
                reason = self._read_slot(operation, position)
                if reason and self._open_files(seen):
                    reason = self._read_slot(operation, position)
        except Exception as error:
            reason = reason_of(error)
        operation.end_part([position] if reason else [], reason)

    def _read_slot(self, operation: Operation, position: int) -> str:
        """Why it failed; empty when the slot holds the block."""
        if not self._files:
            return "the files of the writer are not open"
        slot = operation.slots[position]
        buffer = (ctypes.c_char * self._slot_bytes).from_address(operation.addresses[position])
        if os.preadv(self._files[0], [buffer], slot * self._slot_bytes) != self._slot_bytes:
            return "the file is too short"
        expected = os.pread(self._files[1], _SUM_BYTES, ALIGNMENT + slot * _SUM_BYTES)
        return "" if int.from_bytes(expected, "little") == checksum(buffer, operation.tags[position]) else "overwritten"

    def _open_files(self, seen: int) -> bool:
        """Open the writer's files. False when those that lie there were open before, after ``seen`` openings."""
        with self._opening:
            if self._openings != seen:
                return True
            there = [os.stat(path) for path in self._paths]
            if self._files and all(map(os.path.samestat, map(os.fstat, self._files), there)):
                return False
            private_directory(self._directory, make=False)
            fresh: list[int] = []
            try:
                for path, flags in self._paths.items():
                    fresh.append(os.open(path, flags))
            except BaseException:
                for fd in fresh:
                    os.close(fd)
                raise
            for fd, new in zip(self._files, fresh, strict=False):
                os.dup2(new, fd, inheritable=False)  # reads of the file before go on to their end
                os.close(new)
            self._files = self._files or fresh
            self._openings += 1
            return True

    def write(self, slots: Sequence[int], addresses: Sequence[int], tags: Sequence[bytes]) -> Operation:
        operation = Operation("write", slots, addresses, tags, self._slot_bytes)
        operation.parts_left = 1
        operation.end_part(list(range(len(slots))), "this rank writes no blocks")
        return operation

    def close(self, timeout: float | None = None) -> bool:
        if not self._threads.close(timeout, cancel=True):
            return False
        files, self._files = self._files, []
        for fd in files:
            os.close(fd)
        return True
