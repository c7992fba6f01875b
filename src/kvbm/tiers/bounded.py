"""Calls to a filesystem that may never return, on threads that hold back neither the engine nor its end.

A system call on a disk that hangs cannot be interrupted from Python. So every such call of a start or an end runs on a
daemon thread, and the caller waits for a limited time. Python joins the threads of a ThreadPoolExecutor when the
process ends, daemon threads it does not: none of the code that touches a disk uses an executor.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

logger = logging.getLogger("kvbm")

# How long a start waits for a disk that shows no progress. Preallocation reports progress and may take longer in all.
DISK_START_SECONDS = 30.0
# How long each file of a tier may take at the end of an engine.
DISK_END_SECONDS = 10.0

T = TypeVar("T")


class DiskHangs(OSError):  # noqa: N818 - a state, not a mistake
    """A call to the file system has not returned in time. It may still return later."""


def reason_of(error: Exception) -> str:
    """For a log line. The text of an OSError of ours is whole sentences; other errors need their type."""
    return (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"


class Call(Generic[T]):
    """One call on a daemon thread of its own.

    ``undo`` receives a result that comes too late: it releases locks and files as soon as the disk answers.
    """

    def __init__(self, call: Callable[[], T], what: str, undo: Callable[[T], object] | None = None) -> None:
        """``what``: the file or directory, named in the error when the call times out."""
        self._call = call
        self._what = what
        self._undo = undo
        self._heard_at = time.monotonic()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._abandoned = False
        self._value: list[T] = []
        self._error: BaseException | None = None
        try:
            threading.Thread(target=self._run, name="kvbm-disk-call", daemon=True).start()
        except RuntimeError:  # Python 3.12 and later start no thread once the interpreter ends: close in place
            self._run()

    def result(self, seconds: float | None = None) -> T:
        """The call's return value or exception. Raises :class:`DiskHangs` when it shows no progress for ``seconds``,
        :data:`DISK_START_SECONDS` unless given; a result that comes later is undone."""
        seconds = DISK_START_SECONDS if seconds is None else seconds
        while not self._over.wait(max(0.0, self._heard_at + seconds - time.monotonic())):
            if time.monotonic() - self._heard_at >= seconds and not self._give_up():
                raise DiskHangs(errno.ETIMEDOUT, f"{self._what} has not answered for {seconds:.0f} s: the disk hangs")
        if self._error is not None:
            raise self._error
        return self._value[0]

    def wait(self, seconds: float) -> bool:
        """Whether the call is over, after so many seconds at most."""
        return self._over.wait(seconds)

    def abandon(self) -> None:
        """Abandon the call: undo its result, now or when it comes. Never waits."""
        if self._give_up():
            self._undo_result()

    def _give_up(self) -> bool:
        """True when the call is over; otherwise its own thread undoes it later."""
        with self._lock:
            self._abandoned = not self._over.is_set()
            return not self._abandoned

    def _run(self) -> None:
        outer, _current.call = getattr(_current, "call", None), self
        try:
            self._value.append(self._call())
        except BaseException as error:
            self._error = error
        finally:
            _current.call = outer
        with self._lock:
            self._over.set()
            late = self._abandoned
        if late:
            self._undo_result()

    def _undo_result(self) -> None:
        if self._value and self._undo is not None:
            try:
                self._undo(self._value[0])
            except Exception as error:
                logger.warning("%s could not be closed: %s", self._what, error)

    def heard(self) -> None:
        if self._abandoned:
            raise DiskHangs(errno.ETIMEDOUT, f"{self._what} answered too late: its caller goes on without it")
        self._heard_at = time.monotonic()


_current = threading.local()


def report_progress() -> None:
    """The disk has answered: the :class:`Call` that this thread runs, if any, counts its silence from now on.

    Raises :class:`DiskHangs` in an abandoned call: the work stops and closes its files, beside an engine that runs."""
    call: Call[Any] | None = getattr(_current, "call", None)
    if call is not None:
        call.heard()


class DaemonThreads:
    """A pool of threads that the end of the process does not wait for."""

    def __init__(self, count: int, name: str) -> None:
        self._tasks: SimpleQueue[tuple[Future[Any] | None, Callable[..., Any], tuple[Any, ...]] | None] = SimpleQueue()
        self._closing = threading.Lock()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True) for i in range(max(1, count))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Raises RuntimeError after :meth:`close`: no thread is left to run it."""
        future: Future[T] = Future()
        self._put(future, call, arguments)
        return future

    def post(self, call: Callable[..., object], *arguments: Any) -> None:
        """As :meth:`submit`, for a call that reports its own end and never raises. A future costs the interpreter as
        much as the rest of a short task."""
        self._put(None, call, arguments)

    def _put(self, future: Future[Any] | None, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        with self._closing:
            if self._closed:
                raise RuntimeError("closed")
            self._tasks.put((future, call, arguments))

    def close(self, seconds: float | None = None, *, cancel: bool = False) -> bool:
        """Finish what was submitted, or with ``cancel`` only what has begun. False when a call still has not returned
        after ``seconds``, :data:`DISK_END_SECONDS` unless given: the memory and files that it uses must stay then."""
        deadline = time.monotonic() + (DISK_END_SECONDS if seconds is None else seconds)
        while cancel:
            try:
                task = self._tasks.get_nowait()
            except Empty:
                break
            if task is not None and task[0] is not None:
                task[0].cancel()
        with self._closing:
            self._closed = True
            for _ in self._threads:
                self._tasks.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, call, arguments = task
            if future is None:
                try:
                    call(*arguments)
                except Exception:
                    logger.exception("a task of %s failed", threading.current_thread().name)
                continue
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call(*arguments))
            except BaseException as error:
                future.set_exception(error)


def keep_until_exit(thing: object) -> None:
    """Never free it, not even when the interpreter ends: a call to the disk may still use its memory."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
