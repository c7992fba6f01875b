"""A process of its own for every engine: it starts clean, and its GPU memory is back when it has ended.

The parent runs the script again with ``--child TASK FD``: TASK is a JSON object, FD a pipe for rows. What the child
prints, and vLLM prints a lot, goes to a log file. Orders can be sent to a child that waits for them, a JSON line each.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from records import SOURCE, Row

Emit = Callable[[Row], None]


class ChildError(RuntimeError):
    """A child has died or is silent; the text ends with the last it has printed."""


class Child:
    """Use in a ``with``: whatever the child has started is gone afterwards."""

    def __init__(self, script: str, task: Row, name: str, path: Sequence[Path] = (SOURCE,)) -> None:
        """``path``: folders that it imports from before all others."""
        self._log = tempfile.NamedTemporaryFile(prefix=f"kvbm-{name}-", suffix=".log", mode="wb")  # noqa: SIM115
        reading, writing = os.pipe()
        others = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
        if SOURCE not in path:
            others = [entry for entry in others if Path(entry).resolve() != SOURCE]
        self._process = subprocess.Popen(
            [sys.executable, "-u", script, "--child", json.dumps(task), str(writing)],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, path), *others])},
            pass_fds=(writing,),
            start_new_session=True,
            text=True,
        )
        os.close(writing)
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, args=(reading,), daemon=True).start()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20 if exception[0] is None else 0)
        # The group holds the engine's own processes, which must not outlive it: the next engine needs the memory.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def send(self, order: Row) -> None:
        """To a child that has died, an order is lost: :meth:`receive` says why it died."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()

    def receive(self, timeout: float) -> Row | None:
        """The next row; None when the child has said its last."""
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise ChildError(f"nothing heard for {timeout:.0f} s; it printed last:\n{self.tail()}") from None
        if line is not None:
            return json.loads(line)
        status = self._process.wait()
        if status:
            raise ChildError(f"ended with status {status}; it printed last:\n{self.tail()}")
        return None

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def end(self, patience: float = 10) -> None:
        """Ask it to end, so that it gives back its shared memory, and kill what is left of it."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        self.kill()

    def kill(self) -> None:
        """End it and all it has started, now."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def rows(self, timeout: float) -> Iterator[Row]:
        """All rows until the child ends. ``timeout`` is for all of them together."""
        deadline = time.monotonic() + timeout
        while (row := self.receive(max(1.0, deadline - time.monotonic()))) is not None:
            yield row

    def _listen(self, reading: int) -> None:
        with open(reading) as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)

    def tail(self, lines: int = 25) -> str:
        return "\n".join(self._printed()[-lines:])

    def lines_with(self, text: str) -> list[str]:
        """What it has printed so far, of lines that contain the text."""
        return [line for line in self._printed() if text in line]

    def _printed(self) -> list[str]:
        return Path(self._log.name).read_text(errors="replace").splitlines()


def run_child(main: Callable[[Row, Emit], None]) -> bool:
    """True when this process was started as a child, and has done its work."""
    if len(sys.argv) != 4 or sys.argv[1] != "--child":
        return False
    with open(int(sys.argv[3]), "w") as pipe:

        def emit(row: Row) -> None:
            pipe.write(json.dumps(row) + "\n")
            pipe.flush()

        main(json.loads(sys.argv[2]), emit)
    return True


def orders() -> Iterator[Row]:
    """For a child: what the parent sends, until it closes."""
    for line in sys.stdin:
        yield json.loads(line)


def wait_for_memory(megabytes: int = 2000, patience: float = 30) -> None:
    """Return when hardly any GPU memory is in use any more: the last engine's goes back some time after its end."""
    deadline = time.monotonic() + patience
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    while time.monotonic() < deadline:
        try:
            used = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()
            if not used or int(used[0]) < megabytes:
                return
        except (OSError, ValueError, subprocess.SubprocessError):
            return
        time.sleep(1)
