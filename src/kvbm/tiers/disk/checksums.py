"""The file of checksums beside a slab: eight bytes a slot, over the payload and the tag of the block that was written.

A checksum fits one payload of one block. So an index that is out of date, a write that a crash has cut short and a bit
that flipped all look the same: the slot does not hold the block that is asked for.
"""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path

import numpy as np
import xxhash

from kvbm.tiers.disk.prealloc import ALIGNMENT, NOT_SUPPORTED, fallocate

logger = logging.getLogger("kvbm")

SUMS_SUFFIX = ".sums"
EMPTY = 0  # the checksum of a slot that holds nothing

_MAGIC = b"kvbm sums 1\n"
_HEADER = ALIGNMENT  # bytes in front of the checksums; also keeps them aligned


def checksum(payload: ctypes.Array[ctypes.c_char] | memoryview, tag: bytes) -> int:
    """Of one slot. The tag seeds it: the same payload under another tag has another checksum."""
    return xxhash.xxh3_64_intdigest(payload, xxhash.xxh3_64_intdigest(tag)) or 1  # 0 stands for an empty slot


def write_sums(fd: int, first: int, sums: np.ndarray) -> None:
    """Keep the checksums of ``first`` and the slots after it."""
    if os.pwrite(fd, sums.tobytes(), _HEADER + first * sums.itemsize) != sums.nbytes:
        raise OSError("the checksum could not be written")


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
    """The file of checksums and its content. With another geometry or format every slot is empty. ``what`` it
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
        elif (error := fallocate(fd, 0, size)) != 0:
            if error not in NOT_SUPPORTED:
                raise OSError(error, os.strerror(error), str(path))
            os.ftruncate(fd, size)
        os.pwrite(fd, header, 0)
    except BaseException:
        os.close(fd)
        raise
    return fd, sums
