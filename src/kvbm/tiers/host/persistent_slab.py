"""Host memory that outlives the engine.

An engine that is restarted finds its disk tier again, but its host tier is gone, and that is the larger loss: host
memory is what most hits come from. This slab lies in a file of a filesystem in memory (/dev/shm), which stays when the
process goes. Beside it lies a checksum a slot, as with the disk tier, over the block and its tag; the leader keeps an
index of it like that of the disk. The directory looks the same too, so `kvbm cache` shows, checks and removes it.

Nothing is written twice: the copier stores to the slab as to any other. When that is over the slots are hashed, which
takes no more than reading them; when every rank has confirmed the store, and it was good, the checksums are recorded.
A slot that was being written when the process died does not match its checksum, and a slot whose store was never
confirmed has none.

The next engine hashes every slot that the index names before it uses any. Ranks that share one host tier (the same KV
on all of them) keep it in memory of another kind, which ends with them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from kvbm.tiers.base import Operation
from kvbm.tiers.bounded import DaemonThreads, keep_until_exit
from kvbm.tiers.disk.cache_dir import LOCK
from kvbm.tiers.disk.checksums import SUMS_SUFFIX, checksum, open_sums, write_sums
from kvbm.tiers.disk.database import DATABASE, explain
from kvbm.tiers.disk.prealloc import DiskSpaceError
from kvbm.tiers.host.slab import SETTING, HostSlab, Shared, mapped_bytes, refuse_if_too_large
from kvbm.tiers.lock import PATIENCE_SECONDS, FileLock

logger = logging.getLogger("kvbm")

DIRECTORY_SETTING = "KVBM_HOST_PERSIST_DIR"
_PART_BYTES = 16 << 20  # hashed by one thread at a time
_THREADS = 8

_ROWS = "SELECT slot, key FROM blocks WHERE typeof(slot) = 'integer' AND slot >= 0 AND typeof(key) = 'blob'"

Work = Callable[[int, int, bytes], None]  # position, slot, tag; raises ValueError when the slot is bad


class PersistentSlab(HostSlab):
    """A :class:`~kvbm.tiers.host.slab.HostSlab` whose content the next process finds again.

    ``rows``: the index of the last engine.

    ``hash`` and ``check`` may be called from any thread and return at once; the slots must not change until the
    operation is over.
    """

    outlives_engine = True

    def __init__(
        self,
        path: Path,
        slots: int,
        slot_bytes: int,
        *,
        node: int | None = None,
        patience: float = 0.0,
    ) -> None:
        """Raises OSError when it cannot be kept there, and HostMemoryError when there is not that much memory."""
        self.path = path
        self.rows: Rows = []
        self._lock = FileLock(path, patience, DIRECTORY_SETTING)
        self._fd = self._sums_fd = -1
        try:
            length = mapped_bytes(slots * slot_bytes)
            there = path.stat().st_size // slot_bytes
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            _reserve(self._fd, path, length)
            sums_path = path.with_name(path.name + SUMS_SUFFIX)
            self._sums_fd, self._sums = open_sums(sums_path, slots, slot_bytes, "host tier")
            self._sums[there:] = 0
            super().__init__(slots * slot_bytes, node, Shared(self._fd, 0, 1))
        except BaseException:
            self._let_go()
            raise
        self.kept = int((self._sums != 0).sum())  # slots that held something when the slab was opened
        self._bytes = slot_bytes
        self._slot = ctypes.c_char * slot_bytes
        self._pool = DaemonThreads(_THREADS, "kvbm-keep")

    def carve(self, slots: int, slot_bytes: int) -> HostSlab:
        super().carve(slots, slot_bytes)
        # Several threads have faulted in most pages. A page that the filesystem cannot provide must fail here: the
        # first access to it would kill the process.
        try:
            os.posix_fallocate(self._fd, 0, mapped_bytes(self.size))
        except OSError as error:
            raise _no_room(mapped_bytes(self.size), _free(self._fd), self.path) from error
        return self

    @contextlib.contextmanager
    def spared(self, slots: int) -> Iterator[None]:
        size = min(slots * self._bytes, self.size) if self.kept else 0
        before = ctypes.string_at(self.address, size)
        try:
            yield
        finally:
            ctypes.memmove(self.address, before, size)

    def intact(self, slots: int) -> tuple[bytes, bytes]:
        return held(self, slots, self.rows)

    def give_up(self) -> None:
        """Close it and free its memory with all blocks: this engine cannot use them and needs the memory."""
        if self._pool.close():
            super().close()
            os.ftruncate(self._fd, 0)
            self._let_go()
        else:
            keep_until_exit(self)  # as in close: without its pages, the thread that waits would kill the process

    def hash(self, slots: Sequence[int], tags: Sequence[bytes]) -> Hashes:
        """The slots hold the blocks that the tags name; bad is what cannot be. Nothing is recorded by this."""
        hashes = Hashes("hash", slots, tags, self._bytes)
        self._begin(hashes, lambda position, slot, tag: hashes.sums.put(position, self._sum(slot, tag)))
        return hashes

    def record(self, hashes: Hashes) -> None:
        """The blocks are good: the next process shall find them. Takes a microsecond or two for each stretch."""
        slots = np.array(hashes.slots, dtype=np.int64)
        self._sums[slots] = hashes.sums
        slots.sort()
        for neighbours in np.split(slots, np.flatnonzero(np.diff(slots) != 1) + 1):
            if len(neighbours):
                write_sums(self._sums_fd, int(neighbours[0]), self._sums[neighbours[0] : neighbours[-1] + 1])

    def check(self, slots: Sequence[int], tags: Sequence[bytes]) -> Operation:
        """Hash the slots. A slot that does not hold the block of its tag is bad."""
        operation = Operation("check", slots, [0] * len(slots), tags, self._bytes)

        def check(position: int, slot: int, tag: bytes) -> None:
            if self._sums[slot] != self._sum(slot, tag):
                raise ValueError("checksum mismatch")

        self._begin(operation, check)
        return operation

    def close(self) -> None:
        """Let go of the memory; the next process finds it."""
        if self._pool.close():
            super().close()
            self._let_go()
        else:
            keep_until_exit(self)  # a page of it does not come, and a thread waits for it

    def _let_go(self) -> None:
        for fd in (self._fd, self._sums_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._sums_fd = -1
        self._lock.release()

    def _begin(self, operation: Operation, work: Work) -> None:
        count, size = len(operation.slots), max(1, _PART_BYTES // self._bytes)
        parts = [range(at, min(at + size, count)) for at in range(0, count or 1, size)]
        operation.parts_left = len(parts)
        for part in parts:
            self._pool.submit(self._work, operation, part, work)

    def _work(self, operation: Operation, part: range, work: Work) -> None:
        operation.begin_part()
        bad: list[int] = []
        reason = ""
        for position in part:
            slot = operation.slots[position]
            try:
                if not 0 <= slot < len(self._sums):
                    raise ValueError(f"slot {slot} is outside of the {len(self._sums)} slots of {self.path}")
                work(position, slot, operation.tags[position])
            except Exception as error:
                bad.append(position)
                reason = reason or str(error)
        operation.end_part(bad, reason)

    def _sum(self, slot: int, tag: bytes) -> int:
        return checksum(self._slot.from_address(self.address + slot * self._bytes), tag)


Rows = list[tuple[int, bytes]]  # (slot, key)


def held(slab: PersistentSlab, slots: int, rows: Rows) -> tuple[bytes, bytes]:
    """(a bit for each slot, 1 if it holds the block that ``rows`` names; the :func:`digest` of the index). Waits until
    all slots have been hashed.

    The index is the last engine's. This rank holds the lock of the slab, so the workers of that engine have ended;
    :func:`rows_of` waits for its leader.
    """
    bits = np.zeros(slots, dtype=np.uint8)
    rows = [(slot, key) for slot, key in rows if slot < slots]
    if rows:
        began = time.monotonic()
        operation = slab.check([slot for slot, _ in rows], [key for _, key in rows])
        operation.wait()
        bits[[slot for slot, _ in rows]] = 1
        bits[[rows[position][0] for position in operation.bad]] = 0
        logger.info(
            "host tier: %d blocks from before compared with their checksums in %.1f s, %d do not fit",
            len(rows), time.monotonic() - began, len(operation.bad),
        )  # fmt: skip
    return np.packbits(bits).tobytes(), digest(slab.path.parent, rows, slots)


def digest(directory: Path, rows: Rows, slots: int) -> bytes:
    """Tells the index of a cache from any other, as far as its blocks lie in the first ``slots``. With the name of the
    directory: two indexes without a block are still of two caches."""
    found = hashlib.sha256(directory.name.encode())
    for slot, key in sorted(row for row in rows if row[0] < slots):
        found.update(b"%d %d " % (slot, len(key)) + key)
    return found.digest()


def rows_of(directory: Path) -> Rows:
    """The rows of the index in the directory. Empty, with a logged reason, when it is damaged; raises OSError when it
    cannot be read now."""
    path = directory / DATABASE
    if not path.is_file():
        return []
    # Shared: the ranks of an engine read it side by side, however many there are.
    lock = FileLock(directory / LOCK, PATIENCE_SECONDS, DIRECTORY_SETTING, shared=True)
    began = time.monotonic()
    try:
        with contextlib.closing(sqlite3.connect(path)) as database:
            return database.execute(_ROWS).fetchall()
    except (sqlite3.Error, MemoryError) as error:
        found = explain(error, path, time.monotonic() - began)
        if isinstance(found, OSError):
            raise found from error
        logger.warning("host tier: discarding the persisted blocks: index.sqlite is damaged: %s", error)
        return []
    finally:
        lock.release()


class Hashes(Operation):
    """The checksums of some slots, once it is done."""

    def __init__(self, kind: str, slots: Sequence[int], tags: Sequence[bytes], size: int) -> None:
        super().__init__(kind, slots, [0] * len(slots), tags, size)
        self.sums = np.zeros(len(slots), dtype="<u8")


def _reserve(fd: int, path: Path, length: int) -> None:
    """Give the file its size, if there is room for all its pages."""
    os.fchmod(fd, 0o600)
    missing = max(0, length - os.fstat(fd).st_blocks * 512)
    refuse_if_too_large(missing)
    if missing > (free := _free(fd)):
        raise _no_room(length, free, path)
    os.ftruncate(fd, length)


def _free(fd: int) -> int:
    filesystem = os.fstatvfs(fd)
    return filesystem.f_bavail * filesystem.f_frsize


def _no_room(length: int, free: int, path: Path) -> DiskSpaceError:
    return DiskSpaceError(
        errno.ENOSPC,
        f"{SETTING} asks for {length / 1e9:.2f} GB a rank, and only {free / 1e9:.2f} GB are free at {path.parent}. "
        f"Make that filesystem larger (mount -o remount,size=...), lower {SETTING}, or give back what other models "
        "have left there: `kvbm cache ls`, `kvbm cache clear`",
    )
