"""Host memory that outlives the engine.

An engine that is restarted finds its disk tier again, but its host tier is gone, and that is the larger loss: host
memory is what most hits come from. This slab lies in a file of a filesystem in memory (/dev/shm), which stays when the
process goes. Beside it lies a checksum a slot, as with the disk tier, over the block and its tag; the leader keeps an
index of it like that of the disk. The directory looks the same too, so `kvbm cache` shows, checks and removes it.

Nothing is written twice: the copier stores to the slab as to any other, and a slot is *kept* once that is over, which
takes no more than reading it. What was being written when the process died does not fit its checksum, whichever of the
two is older.

How a leader and its workers use it, in terms of what they do for the disk:

- rank, at start: ``KeptSlab(slab_path(directory, rank), slots, slot_bytes)`` in place of ``HostSlab``, in ``directory =
  cache_directory(Path("/dev/shm"), fingerprint)``, made by ``private_directory``. An OSError or HostMemoryError means
  that it cannot be kept: go on with a ``HostSlab``.
- leader, at start: ``Index.open(directory, fingerprint, slots)``. Send its ``entries`` to every rank, which answers
  with ``check(slots, tags)``; what is bad on any rank is removed from the index, the rest is adopted by the host pool.
  No slot may be written before that is over.
- when a store to host memory is over on every rank: plan ``keep(slots, tags)`` on each, with the slots pinned; when all
  have done so, ``index.put``. Whoever is evicted from the host pool is ``index.remove``-d, as with the disk.
- a reset of the cache clears the index, and new tags are chosen, as with the disk.

Ranks that share one host tier (the same KV on all of them) keep it in memory of another kind; do not combine the two.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvbm.storage.disk import SUMS_SUFFIX, DiskSpaceError, Operation, checksum, open_sums, write_sums
from kvbm.storage.host import HostSlab, Shared, mapped_bytes, refuse_if_too_large
from kvbm.storage.lock import FileLock

logger = logging.getLogger("kvbm")

_PART_BYTES = 16 << 20  # hashed by one thread at a time


class KeptSlab(HostSlab):
    """A :class:`~kvbm.storage.host.HostSlab` whose content the next process finds again.

    ``keep`` and ``check`` may be called from any thread and return at once; the slots must not change until the
    operation is over.
    """

    def __init__(
        self,
        path: Path,
        slots: int,
        slot_bytes: int,
        *,
        node: int | None = None,
        threads: int = 8,
        patience: float = 0.0,
        setting: str = "DYN_KVBM_CPU_CACHE_GB",
    ) -> None:
        self.path = path
        self._lock = FileLock(path, patience)
        self._fd = self._sums_fd = -1
        try:
            length = mapped_bytes(slots * slot_bytes)
            there = path.stat().st_size // slot_bytes
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            _reserve(self._fd, path, length, setting)
            sums_path = path.with_name(path.name + SUMS_SUFFIX)
            self._sums_fd, self._sums = open_sums(sums_path, slots, slot_bytes)
            self._sums[there:] = 0
            super().__init__(slots * slot_bytes, setting, node, Shared(self._fd, 0, 1))
        except BaseException:
            self._let_go()
            raise
        self.kept = int((self._sums != 0).sum())  # slots that held something when the slab was opened
        self._bytes = slot_bytes
        self._slot = ctypes.c_char * slot_bytes
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kvbm-keep")

    def keep(self, slots: Sequence[int], tags: Sequence[bytes]) -> Operation:
        """The slots hold the blocks that the tags name. Bad is what could not be recorded."""
        return self._begin("keep", slots, tags, self._keep)

    def check(self, slots: Sequence[int], tags: Sequence[bytes]) -> Operation:
        """Bad is whatever does not hold the block that its tag names."""
        return self._begin("check", slots, tags, self._check)

    def close(self) -> None:
        """Let go of the memory; the next process finds it."""
        self._pool.shutdown()
        super().close()
        self._let_go()

    def _let_go(self) -> None:
        for fd in (self._fd, self._sums_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._sums_fd = -1
        self._lock.release()

    def _begin(
        self, kind: str, slots: Sequence[int], tags: Sequence[bytes], work: Callable[[int, bytes], str]
    ) -> Operation:
        addresses = [self.address + slot * self._bytes for slot in slots]
        operation = Operation(kind, slots, addresses, tags, self._bytes)
        size = max(1, _PART_BYTES // self._bytes)
        parts = [range(at, min(at + size, len(slots))) for at in range(0, len(slots) or 1, size)]
        operation.parts_left = len(parts)
        for part in parts:
            self._pool.submit(self._work, operation, part, work)
        return operation

    def _work(self, operation: Operation, part: range, work: Callable[[int, bytes], str]) -> None:
        operation.begin_part()
        bad: list[int] = []
        reason = ""
        for position in part:
            slot = operation.slots[position]
            try:
                if not 0 <= slot < len(self._sums):
                    raise ValueError(f"slot {slot} is outside of the {len(self._sums)} slots of {self.path}")
                why = work(slot, operation.tags[position])
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
            if why:
                bad.append(position)
                reason = reason or why
        operation.end_part(bad, reason)

    def _sum(self, slot: int, tag: bytes) -> int:
        return checksum(self._slot.from_address(self.address + slot * self._bytes), tag)

    def _keep(self, slot: int, tag: bytes) -> str:
        self._sums[slot] = self._sum(slot, tag)
        write_sums(self._sums_fd, slot, self._sums[slot : slot + 1])
        return ""

    def _check(self, slot: int, tag: bytes) -> str:
        return "" if self._sums[slot] == self._sum(slot, tag) else "checksum mismatch"


def _reserve(fd: int, path: Path, length: int, setting: str) -> None:
    """Give the file its size and all its pages: one that cannot be had later would kill whoever touches it."""
    os.fchmod(fd, 0o600)
    if os.fstat(fd).st_size > length:
        os.ftruncate(fd, length)
    missing = max(0, length - os.fstat(fd).st_blocks * 512)
    refuse_if_too_large(missing, setting)
    filesystem = os.fstatvfs(fd)
    free = filesystem.f_bavail * filesystem.f_frsize
    if missing > free:
        raise DiskSpaceError(
            errno.ENOSPC,
            f"{setting} asks for {length / 1e9:.2f} GB a rank, and only {free / 1e9:.2f} GB are free at {path.parent}. "
            f"Make that filesystem larger (mount -o remount,size=...), or lower {setting}",
        )
    os.posix_fallocate(fd, 0, length)
