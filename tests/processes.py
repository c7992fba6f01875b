"""Programs that tests start: in process groups of their own, so that all of a group can be ended by its number."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path


class Process:
    """A program in a process group of its own; leaving the context ends the whole group, whatever happened."""

    def __init__(self, command: list[str], log: Path, env: dict[str, str] | None = None) -> None:
        self.log = log
        with log.open("wb") as output:
            self.popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )

    def wait(self, timeout: float) -> int:
        return self.popen.wait(timeout)

    def end(self) -> None:
        end_group(self.popen.pid)
        self.popen.wait(30)


def heed_interrupts() -> None:
    """For a child before it runs: a shell that starts tests in the background has them ignore SIGINT, and so whatever
    they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def end_group(pid: int) -> None:
    """Kill the process group that ``pid`` leads."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
