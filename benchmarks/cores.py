"""Which cores the processes of a benchmark run on."""

from __future__ import annotations

import contextlib
import os


def keep_to(cores: set[int], *processes: int) -> None:
    """All their threads; those that start later have the cores of the thread that starts them."""
    for process in processes:
        for thread in os.listdir(f"/proc/{process}/task"):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(int(thread), cores)
