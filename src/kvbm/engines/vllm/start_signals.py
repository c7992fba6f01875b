"""SIGTERM and Ctrl-C end `vllm serve` soon, also while it starts.

vLLM turns a signal during the start into a KeyboardInterrupt, and its wait for the engine's handshake catches that one
(`zmq_socket_ctx`, vLLM 0.31). The API server then goes on starting. If the engine has ended meanwhile, it waits for it
until VLLM_ENGINE_READY_TIMEOUT_S is over: ten minutes. A worker that loads weights or allocates its host tier does not
notice that its parent has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from kvbm.engines.vllm.sockets import remove_directory
from kvbm.engines.vllm.transfer_config import on_command_line
from kvbm.processes import PARENT, STARTED, is_resource_tracker, running, stat

GRACE_SECONDS = 5.0  # for vLLM's own way to end


def end_start_on_signals(argv: Sequence[str]) -> None:
    """In the process of `vllm serve` that the user has started: watch over signals until the server runs. vLLM then
    sets handlers of its own, in place of these."""
    is_server = on_command_line(argv) is not None and multiprocessing.parent_process() is None
    if not is_server or threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        handler = signal.getsignal(number)
        if callable(handler) and not isinstance(handler, _Handler):
            signal.signal(number, _Handler(handler))


class _Handler:
    """Lets vLLM end. After the grace period, ends the process and all processes below it."""

    def __init__(self, vllms: Callable[[int, FrameType | None], Any]) -> None:
        self._vllms = vllms
        self._processes: dict[int, str] = {}
        self._is_over = False  # the server has run

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        self._is_over = self._is_over or _is_in_uvicorn(frame)
        if not self._is_over and not self._processes:
            self._processes = {os.getpid(): "", **_processes_below(os.getpid())}
            atexit.register(self._kill)
            threading.Thread(target=self._end, args=(number,), name="kvbm-end", daemon=True).start()
        return self._vllms(number, frame)

    def _end(self, number: int) -> None:
        time.sleep(GRACE_SECONDS)
        if signal.getsignal(number) is not self:  # the server runs and can end in order
            atexit.unregister(self._kill)
            os.kill(os.getpid(), number)
            return
        self._kill()
        remove_directory()
        os._exit(128 + number)

    def _kill(self) -> None:
        now = _processes_below(os.getpid())
        for pid, began in {**self._processes, **now}.items():
            if pid != os.getpid() and began == _began(pid):  # a number can belong to another process by now
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)


def _is_in_uvicorn(frame: FrameType | None) -> bool:
    """Where vLLM leaves signals to uvicorn, uvicorn sets its own handlers and puts these back when the server ends.
    It then raises the signal once more, and the engine is about to end in order."""
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith("uvicorn"):
            return True
        frame = frame.f_back
    return False


def _processes_below(pid: int) -> dict[int, str]:
    """Number -> start time of the processes below this one, without Python's resource tracker, which ends by itself."""
    parents = {each: int(fields[PARENT]) for each in running() if (fields := stat(each))}
    found: dict[int, str] = {}
    front = {pid}
    while front:
        front = {child for child, parent in parents.items() if parent in front}
        found |= {child: _began(child) for child in front if not is_resource_tracker(child)}
    return found


def _began(pid: int) -> str:
    fields = stat(pid)
    return fields[STARTED] if fields else ""
