"""Opening a slab file and giving it its size, with every byte in its place on the disk before an engine serves."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import time
from pathlib import Path

from kvbm.tiers.bounded import report_progress

logger = logging.getLogger("kvbm")

ALIGNMENT = 4096
NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

_PIECE = 1 << 30  # one unit of preallocation
_ZEROS = 16 << 20


class DiskSpaceError(OSError):
    """The slab can never fit this filesystem; the text says what would."""


def reason_of_error(error: OSError) -> str:
    name = errno.errorcode.get(error.errno or 0, "")
    return f"{name} {os.strerror(error.errno)}".strip() if error.errno else str(error)


def open_slab(
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
            path, reason_of_error(refused),
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
    # From the start, for a file that was left sparse: blocks that are allocated already cost nothing.
    progress = _Progress(path, size)
    at = 0
    while at < size:
        piece = min(_PIECE, size - at)
        error = fallocate(fd, at, piece)
        if error == errno.EINTR:
            continue
        if error in NOT_SUPPORTED:
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


def fallocate(fd: int, offset: int, length: int) -> int:
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
