"""`vllm serve` with KVBM on this machine, from the kernel's list of processes: an engine that still loads answers at
no port."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

from kvbm.engines.vllm.transfer_config import on_command_line

PROCESSES = Path("/proc")


class Server(NamedTuple):
    pid: int
    parent: int
    model: str
    seconds: float  # since its start


def servers() -> list[Server]:
    """The youngest first."""
    uptime = float((PROCESSES / "uptime").read_text().split()[0])
    found = {}
    for folder in PROCESSES.iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):  # no process, or one that has ended
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            model = words[words.index("serve") + 1]
            if "kvbm" in (on_command_line(words) or ""):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()  # from the state on
                age = uptime - int(fields[19]) / os.sysconf("SC_CLK_TCK")
                found[int(folder.name)] = Server(int(folder.name), int(fields[1]), model, age)
    # A process that vLLM forks has the same command line for a while.
    return sorted((each for each in found.values() if each.parent not in found), key=lambda each: each.seconds)
