"""A rank's half of the object store tier where another process makes the requests (:mod:`.process`).

The rank sends it what to read and write, and a thread hears of the results: the engine's interpreter does nothing else
for the tier. When the process dies, its transfers fail and another one starts. An operation is over only when no
process can touch its memory any more: the process has said so, or has ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any

import msgspec

from kvbm.core.rate import Rate
from kvbm.forks import close_in_children
from kvbm.tiers.base import NearMemory, Operation, Store
from kvbm.tiers.objects.client import ObjectStoreError
from kvbm.tiers.objects.format import Names
from kvbm.tiers.objects.process import (
    Answer,
    Attach,
    Cancel,
    Close,
    Ended,
    Measure,
    Measured,
    Opened,
    Order,
    Said,
    Setup,
    Transfer,
    frame,
    receive,
)
from kvbm.tiers.objects.store import END_SECONDS, describe_settings, stall_seconds

logger = logging.getLogger("kvbm")

MAX_RESTARTS = 3
OPEN_SECONDS = 60.0
_MEASURE_SECONDS = 30.0
_GRACE_SECONDS = 1.0  # beyond the time that the process has to end


class _Transfer(Operation):
    def __init__(self, kind: str, slots: Sequence[int], addresses: Sequence[int], tags: Sequence[bytes], size: int):
        super().__init__(kind, slots, addresses, tags, size)
        self.parts_left = 1
        self.sent: tuple[_Connection, int] | None = None

    def cancel(self) -> None:
        super().cancel()
        if self.sent is not None and not self.done():
            connection, number = self.sent
            connection.send(Cancel(number))

    def end(self, ended: Ended) -> None:
        self.began = ended.began
        self.end_part(ended.bad, ended.reason)

    def fail(self, reason: str) -> None:
        self.end_part(list(range(len(self.slots))), reason)


class _Connection:
    """One process, from its start to its end."""

    def __init__(self, memory_bytes: int) -> None:
        """``memory_bytes``: of all objects under way."""
        self._socket, its = socket.socketpair()
        close_in_children(self._socket)
        # The secrets come through the socket, not among the arguments or in the environment.
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvbm.tiers.objects.process", str(its.fileno())],
                pass_fds=[its.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                env={**os.environ, **_environment(memory_bytes)},
            )  # fmt: skip
        except OSError:
            self._socket.close()
            raise
        finally:
            its.close()
        self._numbers = count()
        self._lock = threading.Lock()
        self._transfers: dict[int, _Transfer] | None = {}  # None: the process has ended
        self._orders: SimpleQueue[tuple[Order, int] | None] = SimpleQueue()
        threading.Thread(target=self._send_all, name="kvbm-object-send", daemon=True).start()

    def send(self, order: Order, file: int = -1) -> None:
        """Returns at once: a process that is stopped does not take orders."""
        self._orders.put((order, file))

    def transfer(self, operation: _Transfer, base: int) -> None:
        with self._lock:
            if self._transfers is not None:
                number = next(self._numbers)
                operation.sent = self, number
                self._transfers[number] = operation
                offsets = [address - base for address in operation.addresses]
                is_write = operation.kind == "write"
                self.send(Transfer(number, is_write, list(operation.slots), offsets, list(operation.tags)))
                return
        operation.fail("the process for the object store has ended")

    def receive(self, decoder: msgspec.msgpack.Decoder[Any]) -> Any:
        return receive(self._socket, decoder)[0]

    def take(self, number: int) -> _Transfer | None:
        with self._lock:
            return None if self._transfers is None else self._transfers.pop(number, None)

    def end(self) -> int:
        """Waits for the end of the process, which has closed its socket; returns its status."""
        self.process.kill()
        status = self.process.wait()
        self._orders.put(None)
        with self._lock:
            transfers, self._transfers = self._transfers or {}, None
        for operation in transfers.values():
            operation.fail(f"the process for the object store has ended (status {status})")
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        return status

    def _send_all(self) -> None:
        while (found := self._orders.get()) is not None:
            order, file = found
            data = memoryview(frame(order))
            try:
                sent = socket.send_fds(self._socket, [data], [file]) if file >= 0 else 0
                self._socket.sendall(data[sent:])
            except OSError:
                return  # the process is gone


def _environment(memory_bytes: int) -> dict[str, str]:
    """Numpy is there for an address only. And glibc keeps the memory of objects: to give it back to the kernel and
    fault it in again takes CPU time on every read."""
    return {
        "OPENBLAS_NUM_THREADS": "1",
        "MALLOC_TRIM_THRESHOLD_": str(memory_bytes),
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # the most that glibc accepts
    }


class ProcessStore(Store):
    """Raises ObjectStoreError where the process cannot use the settings, OSError where it does not start."""

    slots = 0

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self.block_bytes = setup.block_bytes
        self.identity = Names(setup.cache, setup.settings.encryption_secret).root
        self.stall_seconds = stall_seconds(setup.settings)
        self._near: NearMemory | None = None
        self._decoder = msgspec.msgpack.Decoder(Answer)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._measured: SimpleQueue[Rate | None] = SimpleQueue()
        self._opened: SimpleQueue[str] = SimpleQueue()
        self._connection = self._launch()
        self._thread = threading.Thread(target=self._follow, name="kvbm-object-process", daemon=True)
        self._thread.start()
        try:
            problem = self._opened.get(timeout=OPEN_SECONDS)
        except Empty:
            problem = f"its process has not answered for {OPEN_SECONDS:g} s"
        if problem:
            self.close(0.0)
            raise ObjectStoreError(problem)

    @property
    def pid(self) -> int:
        return self._connection.process.pid

    def describe(self) -> str:
        return describe_settings(self._setup.settings)

    def attach(self, near: NearMemory) -> None:
        if near.file < 0:
            logger.warning("object store: not used, because another process cannot map this host memory")
            return
        with self._lock:
            self._connection.send(Attach(near.size), near.file)
            self._near = near

    def read(self, slots: Sequence[int], addresses: Sequence[int], tags: Sequence[bytes]) -> Operation:
        return self._submit("read", slots, addresses, tags)

    def write(self, slots: Sequence[int], addresses: Sequence[int], tags: Sequence[bytes]) -> Operation:
        return self._submit("write", slots, addresses, tags)

    def _submit(self, kind: str, slots: Sequence[int], addresses: Sequence[int], tags: Sequence[bytes]) -> Operation:
        operation = _Transfer(kind, slots, addresses, tags, self.block_bytes)
        if self._near is None:
            operation.fail("the object store has no memory to read to or write from")
        else:
            self._connection.transfer(operation, self._near.address)
        return operation

    def measure(self) -> Rate | None:
        self._connection.send(Measure())
        try:
            return self._measured.get(timeout=_MEASURE_SECONDS)
        except Empty:
            return None

    def close(self, timeout: float | None = None) -> bool:
        """Give up the requests that have not begun. Those that have begun end by their own deadline, or with the
        process: its memory is free afterwards in any case."""
        with self._lock:
            self._closing.set()
            connection = self._connection
        seconds = END_SECONDS if timeout is None else timeout
        connection.send(Close(seconds))
        try:
            connection.process.wait(seconds + _GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            logger.warning(
                "object store: requests are still under way at the end and are given up (KVBM_OBJECT_TIMEOUT_SECS=%g)",
                self._setup.settings.timeout_seconds,
            )
            connection.process.kill()
        self._thread.join()  # it takes in the last results
        connection.end()
        return True

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _launch(self) -> _Connection:
        connection = _Connection(self._setup.settings.memory_bytes)
        connection.send(self._setup)
        if self._near is not None:  # before any transfer
            connection.send(Attach(self._near.size), self._near.file)
        return connection

    def _follow(self) -> None:
        """Hear the process. One that dies on its own is started anew."""
        for attempt in range(1 + MAX_RESTARTS):
            connection = self._connection
            with contextlib.suppress(EOFError, OSError, msgspec.DecodeError):
                while True:
                    self._take(connection, connection.receive(self._decoder))
            if self._closing.is_set():
                break
            status = connection.end()
            self._opened.put(f"its process has ended (status {status})")
            self._measured.put(None)
            logger.warning("object store: its process has ended (status %d, start %d)", status, attempt + 1)
            if attempt == MAX_RESTARTS or self._closing.wait(1.0):
                break
            try:
                with self._lock:
                    if self._closing.is_set():
                        break
                    self._connection = self._launch()
            except OSError as error:
                logger.warning("object store: its process does not start: %s", error)
                break

    def _take(self, connection: _Connection, answer: Answer) -> None:
        if isinstance(answer, Ended):
            if (operation := connection.take(answer.id)) is not None:
                operation.end(answer)
        elif isinstance(answer, Said):
            logger.log(answer.level, answer.text)
        elif isinstance(answer, Opened):
            self._opened.put(answer.problem)
        elif isinstance(answer, Measured):
            self._measured.put(answer.rate)
