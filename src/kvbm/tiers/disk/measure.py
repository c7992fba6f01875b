"""How fast a rank's file is read, measured at start."""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING

from kvbm.core.rate import Rate
from kvbm.tiers import bounded
from kvbm.tiers.base import Operation

if TYPE_CHECKING:
    from kvbm.tiers.disk.file import DiskFile

# Read at start to see how fast the disk is: enough to tell, and over in a moment.
_MEASURED_BYTES = 64 << 20
_MEASURE_SECONDS = 3.0


def measure(file: DiskFile) -> Rate | None:
    """The rate of reads from a disk, before it serves any request; None when it does not answer.

    Reads blocks of the last engine, or a few that it writes for this: the kernel reads a place that was never written
    without asking the disk. No index names the blocks that it writes, so no lookup finds them.
    """
    blocks = max(1, min(file.slots // 8, _MEASURED_BYTES // file.slot_bytes))
    memory = mmap.mmap(-1, blocks * file.slot_bytes)
    first = (ctypes.c_char * len(memory)).from_buffer(memory)
    places = [ctypes.addressof(first) + i * file.slot_bytes for i in range(blocks)]
    slots = file.held(blocks)
    if len(slots) < blocks and not file.kept:
        slots = list(range(blocks))
        if not _finish(file.write(slots, places, [b""] * blocks), memory):
            return None
    took = []
    for part in (slots[:1], slots):
        read = file.read(part, places[: len(part)], [b""] * len(part))
        if not _finish(read, memory):
            return None
        took.append(read.seconds)
    if not slots or min(took) <= 0:
        return None
    rate = len(slots) * file.slot_bytes / took[1]
    return Rate(rate, max(0.0, took[0] - file.slot_bytes / rate))


def _finish(operation: Operation, memory: object) -> bool:
    if operation.wait(_MEASURE_SECONDS):
        return True
    operation.cancel()  # a late write must not overwrite blocks
    bounded.keep_until_exit(memory)  # the disk may still write to it
    return False
