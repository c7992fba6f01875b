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
import errno
import fcntl
import logging
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

import numpy as np
import xxhash

from kvbm.tiers import bounded
from kvbm.tiers.base import Operation, Store
from kvbm.tiers.bounded import Call, DiskHangs, report_progress
from kvbm.tiers.lock import FileLock

logger = logging.getLogger("kvbm")

ALIGNMENT = 4096
SUMS_SUFFIX = ".sums"

_MAGIC = b"kvbm sums 1\n"
_HEADER = ALIGNMENT  # bytes in front of the checksums; also keeps them aligned
# Bytes of one unit of work. Less costs speed, at 512 KiB a third of it; more has threads hash while the disk waits.
_CHUNK = 2 << 20
_SMALLEST_CHUNK = 512 << 10
_IOV_MAX = 1024
_PIECE = 1 << 30  # one unit of preallocation
_ZEROS = 16 << 20
_WRITE_YIELD_SECONDS = 0.05  # how long one unit of writing lets reads go first
_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_CLOSED = "the disk tier was closed"
_CANCELLED = "nobody waits for it any more"
_EMPTY = 0  # the checksum of a slot that holds nothing


class DiskSpaceError(OSError):
    """The slab can never fit this filesystem; the text says what would."""


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
    addresses alive and, for a write, unchanged until the operation is over; nobody else reads or writes a slot that is
    being written. A slot whose write failed holds nothing any more.
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
        self._io = io or FileIO()
        self._buffer = ctypes.c_char * slot_bytes
        self._lock = FileLock(path, patience)
        self._fd = self._sums_fd = -1
        try:
            there = path.stat().st_size // slot_bytes
            self._fd = _open_slab(path, slots, slot_bytes, allocator, direct, zerofill, setting)
            self._sums_fd, self._sums = open_sums(path.with_name(path.name + SUMS_SUFFIX), slots, slot_bytes)
            if lost := int(np.count_nonzero(self._sums[there:])):
                logger.warning("disk tier: %s has been truncated or removed; %d blocks are lost", path, lost)
                self._sums[there:] = _EMPTY
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

    def held(self, most: int) -> list[int]:
        """Slots that hold something, the first so many of them."""
        return [int(slot) for slot in np.flatnonzero(self._sums)[:most]]

    def sync(self) -> None:
        """What was written is on the medium when this returns. Not needed to survive the death of the process."""
        os.fdatasync(self._fd)
        os.fdatasync(self._sums_fd)

    def close(self, timeout: float | None = None) -> bool:
        """Give up what has not begun, finish what has, let go of the file.

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
                "disk tier: %s has not answered for %.0f s, so the engine ends without it; what was being written is "
                "not found after a restart",
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
        """End whatever no thread will take any more."""
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
                return run, _why(error)
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
        self._sums[first : first + len(run)] = _EMPTY
        put = self._io.write(self._fd, buffers, first * self.slot_bytes)
        if put != size:
            raise OSError(f"wrote {put} of {size} bytes")
        write_sums(self._sums_fd, first, sums)
        self._sums[first : first + len(run)] = sums
        return [], ""


def checksum(payload: ctypes.Array[ctypes.c_char] | memoryview, tag: bytes) -> int:
    """Of one slot. The tag seeds it: the same payload under another tag has another checksum."""
    return xxhash.xxh3_64_intdigest(payload, xxhash.xxh3_64_intdigest(tag)) or 1  # 0 stands for an empty slot


def write_sums(fd: int, first: int, sums: np.ndarray) -> None:
    """Keep the checksums of ``first`` and the slots after it."""
    if os.pwrite(fd, sums.tobytes(), _HEADER + first * sums.itemsize) != sums.nbytes:
        raise OSError("the checksum could not be written")


def _why(error: OSError) -> str:
    name = errno.errorcode.get(error.errno or 0, "")
    return f"{name} {os.strerror(error.errno)}".strip() if error.errno else str(error)


# ---------------------------------------------------------------------------------------------------------------------
# Opening


def _open_slab(
    path: Path, slots: int, slot_bytes: int, allocator: str, direct: bool, zerofill: bool, setting: str
) -> int:
    if allocator not in ("default", "open-direct"):
        raise ValueError(f"DYN_KVBM_DISK_ALLOCATOR_TYPE={allocator!r}: expected default or open-direct")
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    at_open = direct and allocator == "open-direct"
    refused: OSError | None = None
    try:
        fd = os.open(path, flags | (os.O_DIRECT if at_open else 0))
    except OSError as error:
        if not at_open or error.errno != errno.EINVAL:
            raise
        refused = error
        fd = os.open(path, flags)
    try:
        os.fchmod(fd, 0o600)
        _allocate(fd, path, slots * slot_bytes, zerofill, setting)
        if direct and refused is None:
            refused = _go_direct(fd, slot_bytes)
    except BaseException:
        os.close(fd)
        raise
    if refused is not None:
        logger.warning(
            "disk tier: no O_DIRECT on %s (%s); going through the page cache. "
            "DYN_KVBM_DISK_DISABLE_O_DIRECT=1 asks for that without this warning",
            path, _why(refused),
        )  # fmt: skip
    return fd


def _go_direct(fd: int, slot_bytes: int) -> OSError | None:
    """Why it is not possible. Asking is not enough: a filesystem may say yes and then refuse every slot."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.preadv(fd, [mmap.mmap(-1, slot_bytes)], slot_bytes)
    except OSError as error:
        if error.errno == errno.EINVAL:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            return error
    return None


def _allocate(fd: int, path: Path, size: int, zerofill: bool, setting: str) -> None:
    """Give the file its size, and every byte of it a place on the disk where the filesystem can do that."""
    found = os.fstat(fd)
    if found.st_size > size:
        os.ftruncate(fd, size)
        found = os.fstat(fd)
    missing = size - min(size, found.st_blocks * 512)
    if missing <= 0 and found.st_size == size:
        return
    _refuse_without_room(fd, path, size, missing, setting)
    # From the start, for a file that was left sparse: what is there already costs nothing.
    progress = _Progress(path, size)
    at = 0
    while at < size:
        piece = min(_PIECE, size - at)
        error = _fallocate(fd, at, piece)
        if error == errno.EINTR:
            continue
        if error in _NOT_SUPPORTED:
            break
        if error:
            kind = DiskSpaceError if error == errno.EFBIG else OSError
            raise kind(error, f"{path} cannot have {size / 1e9:.2f} GB: {os.strerror(error)}")
        at += piece
        progress.reached(at)
    else:
        return
    if zerofill:
        _fill(fd, found.st_size, size, progress)
    else:
        logger.warning(
            "disk tier: the filesystem of %s cannot preallocate, so the file is sparse and may run out of room later. "
            "DYN_KVBM_DISK_ZEROFILL_FALLBACK=1 writes zeros instead",
            path,
        )
        os.ftruncate(fd, size)


def _refuse_without_room(fd: int, path: Path, size: int, missing: int, setting: str) -> None:
    filesystem = os.fstatvfs(fd)
    free = filesystem.f_bavail * filesystem.f_frsize
    if missing > free:
        fits = free + size - missing
        # Other files may go, but the filesystem does not grow: a start that can never succeed is refused.
        kind = DiskSpaceError if size > filesystem.f_blocks * filesystem.f_frsize else OSError
        raise kind(
            errno.ENOSPC,
            f"{setting} asks for {size / 1e9:.2f} GB of disk on this rank, of which {missing / 1e9:.2f} GB are not "
            f"there yet, but only {free / 1e9:.2f} GB are free at {path.parent}. "
            f"Lower {setting}: up to {fits / 1e9:.2f} GB a rank would fit; or set DYN_KVBM_DISK_CACHE_DIR to a larger "
            "filesystem. `kvbm cache ls` shows what other models, and other releases of the engine, have left there, "
            "and `kvbm cache clear` removes it",
        )


_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


def _fallocate(fd: int, offset: int, length: int) -> int:
    """The system call itself: where it is not supported, posix_fallocate would write to every block instead."""
    return 0 if _libc.fallocate(fd, 0, offset, length) == 0 else ctypes.get_errno()


def _fill(fd: int, start: int, size: int, progress: _Progress) -> None:
    zeros = memoryview(mmap.mmap(-1, _ZEROS))  # page-aligned, as O_DIRECT wants it
    at = start // ALIGNMENT * ALIGNMENT
    while at < size:
        at += os.pwrite(fd, zeros[: min(_ZEROS, size - at)], at)
        progress.reached(at)


class _Progress:
    """A line in the log every few seconds while a file gets its size."""

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._size = path, size
        self._began = self._last = time.monotonic()

    def reached(self, at: int) -> None:
        report_progress()
        now = time.monotonic()
        if at >= self._size:
            logger.info("disk tier: %.2f GB at %s ready in %.1f s", at / 1e9, self._path, now - self._began)
        elif now - self._last >= 2:
            self._last = now
            logger.info("disk tier: %.1f of %.1f GB allocated (%.0f s)", at / 1e9, self._size / 1e9, now - self._began)


def read_sums(path: Path) -> tuple[int, np.ndarray]:
    """(bytes of a slot, checksums by slot) of a file of checksums; (0, none) when it is no such file."""
    try:
        raw = path.read_bytes()
        if raw.startswith(_MAGIC):
            slot_bytes = int(raw[len(_MAGIC) : _HEADER].split(b"\n")[0].removeprefix(b"slot_bytes "))
            return slot_bytes, np.frombuffer(raw[_HEADER:], "<u8", max(0, len(raw) - _HEADER) // 8)
    except (OSError, ValueError):
        pass
    return 0, np.zeros(0, "<u8")


def open_sums(path: Path, slots: int, slot_bytes: int, what: str = "disk tier") -> tuple[int, np.ndarray]:
    """The file of checksums and what is in it. Of another geometry, or none of ours: every slot is empty. ``what`` it
    belongs to goes into the log."""
    header = (_MAGIC + f"slot_bytes {slot_bytes}\n".encode()).ljust(_HEADER, b"\0")
    sums = np.zeros(slots, dtype="<u8")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.fchmod(fd, 0o600)
        if os.pread(fd, _HEADER, 0) == header:
            records = os.pread(fd, sums.nbytes, _HEADER)
            whole = len(records) // sums.itemsize
            sums[:whole] = np.frombuffer(records, "<u8", whole)
        elif os.fstat(fd).st_size:
            logger.warning("%s: %s is not of slots of %d bytes; starting clean", what, path, slot_bytes)
            os.ftruncate(fd, 0)
        size = _HEADER + sums.nbytes
        if os.fstat(fd).st_size > size:
            os.ftruncate(fd, size)
        elif (error := _fallocate(fd, 0, size)) != 0:
            if error not in _NOT_SUPPORTED:
                raise OSError(error, os.strerror(error), str(path))
            os.ftruncate(fd, size)
        os.pwrite(fd, header, 0)
    except BaseException:
        os.close(fd)
        raise
    return fd, sums
