"""`vllm serve` with KVBM on this machine, from the kernel's list of processes: an engine that still loads answers at
no port."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

from kvbm.engines.vllm.transfer_config import on_command_line
from kvbm.processes import PARENT, STARTED, command_line, running, stat


class Server(NamedTuple):
    pid: int
    parent: int
    model: str
    seconds: float  # since its start


def servers() -> list[Server]:
    """The youngest first."""
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    found = {}
    for pid in running():
        with contextlib.suppress(ValueError, IndexError):  # not `vllm serve`, or it has ended
            words = command_line(pid)
            model = words[words.index("serve") + 1]
            if "kvbm" in (on_command_line(words) or ""):
                fields = stat(pid)
                age = uptime - int(fields[STARTED]) / os.sysconf("SC_CLK_TCK")
                found[pid] = Server(pid, int(fields[PARENT]), model, age)
    # A process that vLLM forks has the same command line for a while.
    return sorted((each for each in found.values() if each.parent not in found), key=lambda each: each.seconds)
