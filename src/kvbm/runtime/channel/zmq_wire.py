"""What travels over ZeroMQ, and how a gap is noticed and repaired.

The leader binds PUB and PULL, each worker connects SUB and PUSH. A message is four frames: an 8-byte big-endian number,
the name of a function, its sender (protocol, rank, session), and a msgpack payload::

    leader -> workers                                      worker -> leader
    hello   0     -        send your Hello                 hello   0    Hello    me
    agreed  0     Agreed   allocate this                   ready   0    -        allocated
    refused 0     text     give up, and why                failed  0    text     cannot go on, and why
    plan    n     StepPlan the n-th plan                   report  n    [Report] the n-th report
    ping    last  Ping     I live; heard so far            beat    last Beat     I live; heard so far

Sessions are random. A worker obeys only the leader that has admitted it, and a leader believes only the workers it has
admitted, so two engines that were given the same ports cannot move each other's blocks. Neither side can be restarted
alone.

PUB drops what a slow or reconnecting subscriber cannot take, so plans and reports are numbered and kept until the other
side has *taken* them, and a side that sees a gap asks for everything after it again. Pings and beats carry the last
number sent, so that a gap shows even if nothing follows it. Both directions hold at most ``WINDOW`` messages: a rank
that has left so many plans untaken is lost; reports beyond it are merged into one.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Iterator

import msgspec

from kvbm.runtime.channel.base import Agreement


class Agreed(msgspec.Struct, frozen=True, array_like=True):
    agreement: Agreement
    workers: list[bytes]  # the admitted senders, by rank


class Ping(msgspec.Struct, frozen=True, array_like=True):
    arrived: list[int]  # reports of each rank up to this number are in
    taken: list[int]  # ... and were given to the leader: no need to keep them
    again: list[int]  # ranks with a gap: send everything after `arrived` again
    lost: list[int]  # ranks that are given up


class Beat(msgspec.Struct, frozen=True, array_like=True):
    arrived: int
    taken: int
    again: bool


encode = msgspec.msgpack.Encoder().encode
decode_agreed = msgspec.msgpack.Decoder(Agreed).decode
decode_ping = msgspec.msgpack.Decoder(Ping).decode
decode_beat = msgspec.msgpack.Decoder(Beat).decode

# What reading a message may raise: it is then dropped, and counted.
UNREADABLE = (ValueError, LookupError, RecursionError, msgspec.MsgspecError)

_PROTOCOL = 1
_NUMBER = struct.Struct(">Q")
_SENDER = struct.Struct(">BIQ")  # protocol, rank, session


def new_sender(rank: int) -> bytes:
    return _SENDER.pack(_PROTOCOL, rank, int.from_bytes(os.urandom(8), "big"))


def rank_of(sender: bytes) -> int:
    rank: int = _SENDER.unpack(sender)[1]
    return rank


def write(number: int, function: bytes, sender: bytes, payload: bytes) -> list[bytes]:
    return [_NUMBER.pack(number), function, sender, payload]


def read(frames: list[bytes]) -> tuple[int, bytes, bytes, bytes]:
    """(number, function, sender, payload). Raises ValueError for a message of another protocol."""
    if len(frames) != 4 or len(frames[0]) != _NUMBER.size or len(frames[2]) != _SENDER.size:
        raise ValueError(f"{len(frames)} frames of {[len(frame) for frame in frames[:8]]} bytes are no message of KVBM")
    number, function, sender, payload = frames
    if sender[0] != _PROTOCOL:
        raise ValueError(
            f"the sender speaks version {sender[0]} of the protocol and this side {_PROTOCOL}; install the same "
            "release of kvbm everywhere"
        )
    return _NUMBER.unpack(number)[0], function, sender, payload


class Outbox:
    """Numbered messages that the other side has not taken yet."""

    def __init__(self) -> None:
        self.last = 0
        self._kept: deque[bytes] = deque()

    def add(self, payload: bytes) -> int:
        self._kept.append(payload)
        self.last += 1
        return self.last

    def taken(self, number: int) -> None:
        while self._kept and self.last - len(self._kept) < number:
            self._kept.popleft()

    def after(self, number: int) -> Iterator[tuple[int, bytes]]:
        first = self.last - len(self._kept) + 1
        return ((at, payload) for at, payload in enumerate(self._kept, first) if at > number)

    def __len__(self) -> int:
        return len(self._kept)


class Inbox:
    """How far the other side's numbered messages are in."""

    def __init__(self) -> None:
        self.arrived = 0
        self.given = 0  # of those, what the caller has received
        self.gap = False

    def is_next(self, number: int) -> bool:
        self.gap = number > self.arrived + 1
        return number == self.arrived + 1

    def announced(self, last: int) -> None:
        # Messages keep their order, so what was sent before this announcement would be here.
        self.gap = last > self.arrived
