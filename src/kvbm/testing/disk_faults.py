"""Deliberate faults of a disk, for tests: the rules of ``KVBM_INJECT_FAULTS`` whose kind begins with ``disk-``.

- ``disk-read``, ``disk-write``: every N-th call fails, with EIO and with ENOSPC or with the ``errno`` of the rule;
- ``disk-slow-read``, ``disk-slow-write``: every N-th call begins ``seconds`` late, 5 unless said;
- ``disk-flip``: every N-th call that reads brings one flipped bit;
- ``disk-torn``: every N-th call that writes puts only half of the bytes on disk and claims success.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import threading
import time
from collections import defaultdict
from collections.abc import Sequence

from kvbm.testing.fault_rules import DISK_KINDS, Fault, parse
from kvbm.tiers.disk.file import Buffers, FileIO

STALL_SECONDS = 5.0


def disk_io(text: str, rank: int) -> FileIO:
    """The calls a :class:`~kvbm.tiers.disk.file.DiskFile` shall make, under the rules of the setting."""
    faults = [fault for fault in parse(text) if fault.kind in DISK_KINDS]
    return FaultyIO(faults, rank) if faults else FileIO()


class FaultyIO(FileIO):
    def __init__(self, faults: Sequence[Fault], rank: int) -> None:
        self._faults = faults
        self._rank = rank
        self._lock = threading.Lock()
        self._counts: dict[str, itertools.count[int]] = defaultdict(lambda: itertools.count(1))

    def _strikes(self, kind: str) -> Fault | None:
        with self._lock:
            count = next(self._counts[kind])
        return next((fault for fault in self._faults if fault.strikes(kind, self._rank, count)), None)

    def _fail(self, kind: str, usual: int) -> None:
        if fault := self._strikes(f"disk-slow-{kind}"):
            time.sleep(STALL_SECONDS if fault.seconds is None else fault.seconds)
        if fault := self._strikes(f"disk-{kind}"):
            number = fault.errno or usual
            raise OSError(number, os.strerror(number))

    def read(self, fd: int, buffers: Buffers, offset: int) -> int:
        self._fail("read", errno.EIO)
        got = super().read(fd, buffers, offset)
        if self._strikes("disk-flip"):
            at = ctypes.c_uint8.from_buffer(buffers[0], len(buffers[0]) // 2)
            at.value ^= 1
        return got

    def write(self, fd: int, buffers: Buffers, offset: int) -> int:
        self._fail("write", errno.ENOSPC)
        if self._strikes("disk-torn"):
            half = len(buffers[0]) // 2 // 4096 * 4096
            piece = (ctypes.c_char * half).from_buffer(buffers[0])
            super().write(fd, [piece], offset)
            return sum(map(len, buffers))
        return super().write(fd, buffers, offset)
