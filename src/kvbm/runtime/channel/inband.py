"""The channel of an engine that carries the bytes itself, in both directions and in step with itself.

Plain msgpack of the messages since the last :meth:`pack`; no threads, no state beyond that, engine thread only. Bytes
that cannot be read raise: both ends are one installation, so that is a fault of the program, and a plan passed over in
silence would never be answered.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Generic, TypeVar

import msgspec

from kvbm.plans import Report, StepPlan, decode_reports
from kvbm.runtime.channel.base import LeaderChannel, WorkerChannel

_encode = msgspec.msgpack.Encoder().encode
_decode_steps = msgspec.msgpack.Decoder(list[StepPlan]).decode

Out = TypeVar("Out")
In = TypeVar("In")


class _InBand(Generic[Out, In]):
    """Both ends: messages that wait to be packed, and unpacked messages that wait to be received."""

    def __init__(self) -> None:
        self._outgoing: list[Out] = []
        self._incoming: list[In] = []
        self._closed = False

    @abstractmethod
    def _decode(self, payload: bytes) -> list[In]: ...

    def pack(self) -> bytes:
        """The bytes that the engine must carry to the other side in this step; empty without messages."""
        payload = _encode(self._outgoing) if self._outgoing else b""
        self._outgoing.clear()
        return payload

    def unpack(self, payload: bytes) -> None:
        """Take in the bytes that the other side has packed. At the leader once for each rank, in any order."""
        if payload and not self._closed:
            self._incoming += self._decode(payload)

    def _put(self, message: Out) -> None:
        if message and not self._closed:
            self._outgoing.append(message)

    def _take(self) -> list[In]:
        taken, self._incoming = self._incoming, []
        return taken

    def close(self) -> None:
        self._closed = True
        self._outgoing.clear()
        self._incoming.clear()


class InBandLeader(_InBand[StepPlan, Report], LeaderChannel):
    """The leader's end. A rank that dies takes the engine with it, so none is ever lost here."""

    def _decode(self, payload: bytes) -> list[Report]:
        return decode_reports(payload)

    def send(self, plan: StepPlan) -> None:
        self._put(plan)

    def receive(self) -> list[Report]:
        return self._take()

    def lost_ranks(self) -> dict[int, str]:
        return {}


class InBandWorker(_InBand[Report, StepPlan], WorkerChannel):
    """One rank's end. ``receive`` has nothing to wait for: the plans of a step come with the step."""

    def _decode(self, payload: bytes) -> list[StepPlan]:
        return _decode_steps(payload)

    def send(self, report: Report) -> None:
        self._put(report)

    def receive(self, timeout: float = 0.0) -> list[StepPlan]:
        return self._take()
