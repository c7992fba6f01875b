"""The process that makes a rank's requests to the object store.

    python -m kvbm.tiers.objects.process FILE      # a file handle: a socket to the rank

Requests, checksums and encryption take the interpreter for themselves. In threads of the engine's process they delay
its steps (benchmarks/object_engine.py steps), so a rank starts this process instead (:mod:`.process_store`). It maps
the near tier's memory and reads and writes blocks in place. The rank sends :class:`Transfer` messages and gets an
:class:`Ended` for each. When the socket closes, the rank is gone or has no use for the results: the process ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import signal
import socket
import struct
import sys
import threading
from typing import Any

import msgspec

from kvbm.core.rate import Rate
from kvbm.tiers.base import Operation
from kvbm.tiers.objects.client import Client, ObjectStoreError
from kvbm.tiers.objects.format import Codec, Names
from kvbm.tiers.objects.settings import ObjectSettings
from kvbm.tiers.objects.store import ObjectStore, describe_cache

NICENESS = 10
_LENGTH = struct.Struct("<I")


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The first message to the process."""

    settings: ObjectSettings
    cache: dict[str, str | int]  # names the cache
    rank: int
    ranks: int
    block_bytes: int
    log_level: int

    def open_store(self) -> ObjectStore:
        """Raises ObjectStoreError, and others, where the settings cannot be used. A store that does not answer now is
        opened all the same: it is used once it answers."""
        client = Client(self.settings, f"object store (rank {self.rank})")
        names = Names(self.cache, self.settings.encryption_secret)
        codec = Codec(names.scope, self.settings.encryption_secret)
        store = ObjectStore(client, names, codec, self.rank, self.block_bytes)
        try:
            client.check()
            if self.rank == 0:  # for `kvbm cache list`
                describe_cache(client, names, self.cache, self.ranks, self.block_bytes)
        except ObjectStoreError as error:
            client.suspend(str(error))
        return store


class Attach(msgspec.Struct, frozen=True, tag=True):
    """The near tier's memory, whose file comes with the message."""

    size: int


class Transfer(msgspec.Struct, frozen=True, tag=True):
    id: int
    is_write: bool
    places: list[int]
    offsets: list[int]  # in the near tier's memory
    tags: list[bytes]


class Cancel(msgspec.Struct, frozen=True, tag=True):
    id: int


class Measure(msgspec.Struct, frozen=True, tag=True):
    pass


class Close(msgspec.Struct, frozen=True, tag=True):
    seconds: float | None


Order = Setup | Attach | Transfer | Cancel | Measure | Close


class Opened(msgspec.Struct, frozen=True, tag=True):
    problem: str = ""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A transfer is over: no byte of it is touched any more."""

    id: int
    bad: list[int]
    reason: str
    began: float  # by the monotonic clock, which all processes of a machine share
    ended: float


class Measured(msgspec.Struct, frozen=True, tag=True):
    rate: Rate | None


class Said(msgspec.Struct, frozen=True, tag=True):
    """A line for the rank's log."""

    level: int
    text: str


Answer = Opened | Ended | Measured | Said

encode = msgspec.msgpack.Encoder().encode


def frame(message: Any) -> bytes:
    data = encode(message)
    return _LENGTH.pack(len(data)) + data


def receive(connection: socket.socket, decoder: msgspec.msgpack.Decoder[Any]) -> tuple[Any, int]:
    """(the next message, the file that came with it or -1). Raises EOFError when the other end is gone."""
    head, files, _, _ = socket.recv_fds(connection, _LENGTH.size, 1, socket.MSG_WAITALL)
    if len(head) < _LENGTH.size:
        raise EOFError
    data = bytearray(_LENGTH.unpack(head)[0])
    view, at = memoryview(data), 0
    while at < len(data):
        count = connection.recv_into(view[at:])
        if not count:
            raise EOFError
        at += count
    return decoder.decode(data), files[0] if files else -1


class _Reporting(Operation):
    """Tells the rank when it is over."""

    def __init__(self, order: Transfer, base: int, size: int, process: Process) -> None:
        kind = "write" if order.is_write else "read"
        super().__init__(kind, order.places, [base + offset for offset in order.offsets], order.tags, size)
        self._id = order.id
        self._process = process

    def end_part(self, bad: Any, reason: str) -> bool:
        is_last = super().end_part(bad, reason)
        if is_last:
            self._process.ended(self._id, Ended(self._id, self.bad, self.reason, self.began, self.ended))
        return is_last


class Process:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._operations: dict[int, Operation] = {}
        self._store: ObjectStore | None = None
        self._map: mmap.mmap | None = None
        self._base = 0

    def run(self) -> None:
        decoder = msgspec.msgpack.Decoder(Order)
        while True:
            order, file = receive(self._connection, decoder)
            if isinstance(order, Transfer):
                self._transfer(order)
            elif isinstance(order, Cancel):
                if (operation := self._operations.get(order.id)) is not None:
                    operation.cancel()
            elif isinstance(order, Attach):
                self._attach(order.size, file)
            elif isinstance(order, Measure):
                assert self._store is not None
                self.say(Measured(self._store.measure()))
            elif isinstance(order, Setup):
                self._open(order)
            else:
                if self._store is not None:
                    self._store.close(order.seconds)
                return

    def say(self, answer: Answer) -> None:
        with self._sending:
            self._connection.sendall(frame(answer))

    def ended(self, number: int, answer: Ended) -> None:
        self._operations.pop(number, None)
        try:
            self.say(answer)
        except OSError:  # the rank is gone, and its memory is this process's own now
            os._exit(0)

    def _open(self, setup: Setup) -> None:
        logger = logging.getLogger("kvbm")
        logger.setLevel(setup.log_level)
        logger.propagate = False
        logger.addHandler(_Forward(self))
        try:
            self._store = setup.open_store()
        except BaseException as error:  # obstore panics at some settings, which is no Exception
            known = isinstance(error, ObjectStoreError)
            self.say(Opened(str(error) if known else f"{type(error).__name__}: {error}"))
        else:
            self.say(Opened())

    def _attach(self, size: int, file: int) -> None:
        if file < 0:
            raise OSError("the near tier's memory is gone")  # mmap would take -1 for memory of this process alone
        self._map = mmap.mmap(file, size, flags=mmap.MAP_SHARED)
        os.close(file)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def _transfer(self, order: Transfer) -> None:
        assert self._store is not None
        assert self._map is not None
        operation = self._operations[order.id] = _Reporting(order, self._base, self._store.block_bytes, self)
        self._store.submit(operation)


class _Forward(logging.Handler):
    def __init__(self, process: Process) -> None:
        super().__init__()
        self._process = process

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            self._process.say(Said(record.levelno, record.getMessage()))


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # they are for the engine, which flushes its blocks
        signal.signal(number, signal.SIG_IGN)
    # The engine's threads go first on a core that both want; on a core that is free this changes nothing.
    os.nice(NICENESS)
    connection = socket.socket(fileno=int(sys.argv[1]))
    with contextlib.suppress(EOFError, OSError):
        Process(connection).run()
    os._exit(0)  # requests that are under way are of no use any more


if __name__ == "__main__":
    main()
