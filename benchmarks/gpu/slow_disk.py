"""KVBM for SGLang, with a disk that reads no faster than SLOW_DISK_GBPS says: for SGLang's ``module_path``."""

from __future__ import annotations

import os
import threading
import time

from kvbm.engines.sglang.backend import KvbmStorage as SlowStorage
from kvbm.tiers.disk.file import Buffers, FileIO

__all__ = ["SlowStorage"]


class Pace:
    """Bytes pass at this rate, whichever thread they come from."""

    def __init__(self, gbps: float) -> None:
        self._seconds_a_byte = 1e-9 / gbps
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait(self, size: int) -> None:
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + size * self._seconds_a_byte
            until = self._free_at
        time.sleep(max(0.0, until - time.monotonic()))


_pace = Pace(float(os.environ["SLOW_DISK_GBPS"]))
_read = FileIO.read


def _slow_read(self: FileIO, fd: int, buffers: Buffers, offset: int) -> int:
    got = _read(self, fd, buffers, offset)
    _pace.wait(got)
    return got


FileIO.read = _slow_read  # type: ignore[method-assign]
