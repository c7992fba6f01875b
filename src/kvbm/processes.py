"""Processes of this machine, as the kernel shows them in /proc."""

from __future__ import annotations

from pathlib import Path

PARENT, STARTED = 1, 19  # fields of stat(); the start is in clock ticks since the machine's own


def running() -> list[int]:
    return [int(each.name) for each in Path("/proc").iterdir() if each.name.isdecimal()]


def stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name: state, parent, and so on; empty for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def command_line(pid: int) -> list[str]:
    """Empty for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def is_resource_tracker(pid: int) -> bool:
    """Python's resource tracker removes shared memory that the other processes leave, and then ends."""
    return any("multiprocessing.resource_tracker" in word for word in command_line(pid))
