"""The disk tier's file on one rank: a slab of equal slots, and beside it a checksum a slot.

The slab is raw: slot *i* begins at ``i * slot_bytes``. The file of checksums (the same name and ``.sums``) holds eight
bytes a slot. A checksum covers the payload *and* the tag of the block that was written, so a slot answers only to the
block it holds: an index that is out of date, a write that was cut short by a crash, writes that a power failure
reordered and a bit that flipped all look the same, and none of them is served.

Slots are written payload first, checksum second. A process may die between any two instructions: until the new checksum
is there, the old one does not fit the new payload.

Reads and writes have threads of their own, so that a request which waits for its blocks never stands behind an offload
or a write that hangs; a write also lets the reads go first, within reason. The interpreter is let go of in every call
that moves or hashes bytes.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

import numpy as np

from kvbm.core.rate import Rate
from kvbm.tiers import bounded
from kvbm.tiers.base import Operation, Store
from kvbm.tiers.bounded import Call, DiskHangs
from kvbm.tiers.disk.checksums import EMPTY, SUMS_SUFFIX, checksum, open_sums, write_sums
from kvbm.tiers.disk.measure import measure
from kvbm.tiers.disk.prealloc import ALIGNMENT, open_slab, reason_of_error
from kvbm.tiers.disk.prealloc import DiskSpaceError as DiskSpaceError
from kvbm.tiers.lock import FileLock

logger = logging.getLogger("kvbm")

# Bytes of one unit of work. Less costs speed, at 512 KiB a third of it; more has threads hash while the disk waits.
_CHUNK = 2 << 20
_SMALLEST_CHUNK = 512 << 10
_IOV_MAX = 1024
_WRITE_YIELD_SECONDS = 0.05  # how long one unit of writing lets reads go first
_CLOSED = "the disk tier was closed"
_CANCELLED = "cancelled"


Buffers = list["ctypes.Array[ctypes.c_char]"]


class FileIO:
    """The two calls that move bytes. Tests put another one in its place to make them fail."""

    def read(self, fd: int, buffers: Buffers, offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def write(self, fd: int, buffers: Buffers, offset: int) -> int:
        return os.pwritev(fd, buffers, offset)


class _Part(NamedTuple):
    operation: Operation
    positions: list[int]  # in order of their slots


_Queue = SimpleQueue["Operation | _Part | None"]


class DiskFile(Store):
    """``slots`` places of ``slot_bytes`` in a file that outlives the process.

    ``write`` and ``read`` return at once and never raise for the disk's sake. The caller keeps the memory at the
    addresses alive and, for a write, unchanged until the operation is over, and starts no other operation on a slot
    that is being written. A slot whose write failed holds no block.
    """

    def __init__(
        self,
        path: Path,
        slots: int,
        slot_bytes: int,
        *,
        allocator: str = "default",
        direct: bool = True,
        zerofill: bool = False,
        threads: int = 8,
        patience: float = 0.0,
        setting: str = "DYN_KVBM_DISK_CACHE_GB",
        io: FileIO | None = None,
        stall_seconds: float = Store.stall_seconds,
    ) -> None:
        """Open the file, keeping what fits, or make it. Raises OSError: :class:`DiskSpaceError` when it can never fit,
        :class:`~kvbm.tiers.lock.CacheInUse` when another process has it for longer than ``patience`` seconds, others
        for trouble that may pass, a filesystem that is full now among them."""
        if slots < 1 or slot_bytes < ALIGNMENT or slot_bytes % ALIGNMENT:
            raise ValueError(
                f"no slab of {slots} slots of {slot_bytes} bytes: slots are multiples of {ALIGNMENT} bytes"
            )
        self.path = path
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.identity = path.parent.name
        self.stall_seconds = stall_seconds
        self._io = io or FileIO()
        self._buffer = ctypes.c_char * slot_bytes
        self._lock = FileLock(path, patience)
        self._fd = self._sums_fd = -1
        try:
            there = path.stat().st_size // slot_bytes
            self._fd = open_slab(path, slots, slot_bytes, allocator, direct, zerofill, setting)
            self._sums_fd, self._sums = open_sums(path.with_name(path.name + SUMS_SUFFIX), slots, slot_bytes)
            if lost := int(np.count_nonzero(self._sums[there:])):
                logger.warning("disk tier: %s has been truncated or removed; %d blocks are lost", path, lost)
                self._sums[there:] = EMPTY
        except BaseException:
            self._close_files()
            raise
        # Slots that held something when the file was opened. 0: new, or nothing of it could be kept.
        self.kept = int(np.count_nonzero(self._sums))
        self._closing = False
        self._no_reads = threading.Event()
        self._no_reads.set()
        self._reads_left = 0
        self._count = threading.Lock()
        self._reads: _Queue = SimpleQueue()
        self._writes: _Queue = SimpleQueue()
        self._parallel = threads
        self._threads = [
            threading.Thread(target=self._run, args=(queue,), name=f"kvbm-disk-{name}-{i}", daemon=True)
            for queue, name, count in ((self._reads, "read", threads), (self._writes, "write", threads))
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def read(self, slots: Sequence[int], addresses: Sequence[int], tags: Sequence[bytes]) -> Operation:
        """Read slots to memory. A slot that does not hold the block its tag names is bad."""
        operation = Operation("read", slots, addresses, tags, self.slot_bytes)
        with self._count:
            self._reads_left += 1
            self._no_reads.clear()
        return self._submit(self._reads, operation)

    def write(self, slots: Sequence[int], addresses: Sequence[int], tags: Sequence[bytes]) -> Operation:
        """Write memory to slots, under the tags that will be asked for."""
        return self._submit(self._writes, Operation("write", slots, addresses, tags, self.slot_bytes))

    def _submit(self, queue: _Queue, operation: Operation) -> Operation:
        queue.put(operation)
        if self._closing:
            self._give_up()
        return operation

    def describe(self) -> str:
        return f"{self.slots} slots on disk at {self.path}"

    def measure(self) -> Rate | None:
        return measure(self)

    def held(self, max_slots: int) -> list[int]:
        """Slots that hold something, the first so many of them."""
        return [int(slot) for slot in np.flatnonzero(self._sums)[:max_slots]]

    def sync(self) -> None:
        """Flush all writes to the medium. Blocks survive the end of the process without it."""
        os.fdatasync(self._fd)
        os.fdatasync(self._sums_fd)

    def close(self, timeout: float | None = None) -> bool:
        """Cancel queued operations, finish those that have begun, close the file.

        False when a call to the disk still hangs after ``timeout`` seconds: then the memory it was given must stay.
        """
        self._closing = True
        timeout = bounded.DISK_END_SECONDS if timeout is None else timeout
        for queue in (self._reads, self._writes):
            for _ in range(self._parallel):
                queue.put(None)
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._give_up()
        if any(thread.is_alive() for thread in self._threads):
            logger.warning(
                "disk tier: %s has not answered for %.0f s, so the engine ends without it; a restart does not find "
                "the blocks that were being written",
                self.path, timeout,
            )  # fmt: skip
            return False
        try:
            # A network filesystem may write back, and hang, when a file is closed. No thread uses memory by then.
            Call(self._close_files, str(self.path)).result(max(1.0, deadline - time.monotonic()))
        except DiskHangs as error:
            logger.warning("disk tier: %s; the engine ends without it", error.strerror)
        return True

    def _give_up(self) -> None:
        """End the queued operations: no thread will take them."""
        for queue in (self._reads, self._writes):
            while True:
                try:
                    task = queue.get_nowait()
                except Empty:
                    break
                for part in self._split(task) if isinstance(task, Operation) else [task] if task else []:
                    self._end(part, part.positions, _CLOSED)

    def _close_files(self) -> None:
        for fd in (self._fd, self._sums_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._sums_fd = -1
        self._lock.release()

    # -- the threads --------------------------------------------------------------------------------------------------

    def _run(self, queue: _Queue) -> None:
        while not self._closing and (task := queue.get()) is not None:
            if isinstance(task, Operation):
                for part in self._split(task):
                    queue.put(part)
            else:
                self._end(task, *self._work(task))

    def _end(self, part: _Part, bad: list[int], reason: str) -> None:
        if part.operation.end_part(bad, reason) and part.operation.kind == "read":
            with self._count:
                self._reads_left -= 1
                if not self._reads_left:
                    self._no_reads.set()

    def _split(self, operation: Operation) -> list[_Part]:
        """Neighbouring slots together, in parts that keep every thread busy."""
        positions = sorted(range(len(operation.slots)), key=operation.slots.__getitem__)
        share = min(_CHUNK, max(_SMALLEST_CHUNK, operation.bytes // self._parallel))
        size = max(1, share // self.slot_bytes)
        # At least one, so that an operation on nothing ends like any other.
        parts = [_Part(operation, positions[at : at + size]) for at in range(0, len(positions) or 1, size)]
        operation.parts_left = len(parts)
        return parts

    def _work(self, part: _Part) -> tuple[list[int], str]:
        operation = part.operation
        if operation.cancelled:
            return part.positions, _CANCELLED
        if operation.kind == "write":
            self._no_reads.wait(_WRITE_YIELD_SECONDS)
        operation.begin_part()
        bad: list[int] = []
        reason = ""
        try:
            for run in self._runs(part):
                failed, why = self._transfer(operation, run)
                bad += failed
                reason = reason or why
        except Exception as error:
            return part.positions, f"{type(error).__name__}: {error}"
        return bad, reason

    def _transfer(self, operation: Operation, run: list[int]) -> tuple[list[int], str]:
        """(positions that failed, why)"""
        move = self._read if operation.kind == "read" else self._write
        try:
            return move(operation, run)
        except OSError as error:
            if len(run) == 1:
                return run, reason_of_error(error)
        # One at a time: a bad sector shall cost one block, not its neighbours too.
        bad: list[int] = []
        reason = ""
        for position in run:
            failed, why = self._transfer(operation, [position])
            bad += failed
            reason = reason or why
        return bad, reason

    def _runs(self, part: _Part) -> Iterator[list[int]]:
        """Stretches of positions whose slots lie side by side in the file."""
        slots = part.operation.slots
        run: list[int] = []
        for position in part.positions:
            slot = slots[position]
            if not 0 <= slot < self.slots:
                raise ValueError(f"slot {slot} is outside of the {self.slots} slots of {self.path}")
            if run and (slot != slots[run[-1]] + 1 or len(run) == _IOV_MAX):
                yield run
                run = []
            run.append(position)
        if run:
            yield run

    def _read(self, operation: Operation, run: list[int]) -> tuple[list[int], str]:
        first, size = operation.slots[run[0]], len(run) * self.slot_bytes
        buffers = [self._buffer.from_address(operation.addresses[position]) for position in run]
        got = self._io.read(self._fd, buffers, first * self.slot_bytes)
        if got != size:
            raise OSError(f"read {got} of {size} bytes")
        bad = [
            position
            for slot, (position, buffer) in enumerate(zip(run, buffers, strict=True), first)
            if self._sums[slot] != checksum(buffer, operation.tags[position])
        ]
        return bad, "checksum mismatch" if bad else ""

    def _write(self, operation: Operation, run: list[int]) -> tuple[list[int], str]:
        first, size = operation.slots[run[0]], len(run) * self.slot_bytes
        buffers = [self._buffer.from_address(operation.addresses[position]) for position in run]
        sums = np.array(
            [checksum(buffer, operation.tags[position]) for position, buffer in zip(run, buffers, strict=True)],
            dtype="<u8",
        )
        self._sums[first : first + len(run)] = EMPTY
        put = self._io.write(self._fd, buffers, first * self.slot_bytes)
        if put != size:
            raise OSError(f"wrote {put} of {size} bytes")
        write_sums(self._sums_fd, first, sums)
        self._sums[first : first + len(run)] = sums
        return [], ""
