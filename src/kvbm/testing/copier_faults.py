"""A copier that fails where the rules of ``KVBM_INJECT_FAULTS`` tell it to (:mod:`kvbm.testing.fault_rules`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from kvbm.testing.fault_rules import COPY_KINDS, Fault
from kvbm.transfer.base import Copier, Ticket, When

LOAD_DELAY_SECONDS = 0.1
STORE_DELAY_SECONDS = 1.0


class FaultyCopier(Copier):
    """Stands in front of a real copier."""

    def __init__(self, inner: Copier, faults: list[Fault], rank: int) -> None:
        self.name = f"faulty {inner.name}"
        self.portion = inner.portion
        self._inner = inner
        self._faults = faults
        self._rank = rank
        self._counts = dict.fromkeys(COPY_KINDS, 0)

    def _strikes(self, kind: str) -> bool:
        self._counts[kind] += 1
        return any(fault.strikes(kind, self._rank, self._counts[kind]) for fault in self._faults)

    def begin_step(self, tickets: Iterable[Ticket]) -> None:
        self._inner.begin_step([_real(ticket) for ticket in tickets])

    def load(
        self, slots: Sequence[int], blocks: Sequence[int], after: Iterable[Ticket], when: When, tokens: int = 0
    ) -> Ticket:
        bad = [position for position in range(len(blocks)) if self._strikes("load")]
        zeroed = self._strikes("zeros")
        good = [position for position in range(len(blocks)) if position not in bad]
        sources = [_real(ticket) for ticket in after]

        def begin() -> Ticket:
            ticket = self._inner.load([slots[i] for i in good], [blocks[i] for i in good], sources, when, tokens)
            if zeroed or bad:
                ticket.wait()  # so that what is scribbled now is not overwritten by the real block
                self.scribble(blocks if zeroed else [blocks[position] for position in bad])
            return _Spoiled(ticket, bad, "injected load fault") if bad else ticket

        if not self._strikes("slow"):
            return begin()
        late = _Late(begin, LOAD_DELAY_SECONDS)
        if when is not When.LATER:
            late.wait_until_due()
            late.begin()
        return late

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> Ticket:
        spoiled = self._strikes("store")

        def begin() -> Ticket:
            ticket = self._inner.store(blocks, slots)
            return _Spoiled(ticket, range(len(blocks)), "injected store fault") if spoiled else ticket

        return _Late(begin, STORE_DELAY_SECONDS) if self._strikes("slow-store") else begin()

    def begin_load(self) -> None:
        self._inner.begin_load()

    def wait_layer(self, layer: str) -> None:
        self._inner.wait_layer(layer)

    def end_load(self, ticket: Ticket) -> bool:
        return self._inner.end_load(ticket.inner if isinstance(ticket, _Spoiled) else ticket)

    def scribble(self, blocks: Sequence[int]) -> None:
        if blocks:
            self._inner.scribble(blocks)

    def close(self) -> None:
        self._inner.close()


def _real(ticket: Ticket) -> Ticket:
    """The ticket of the wrapped copier. A delayed transfer begins now."""
    if isinstance(ticket, _Late):
        return _real(ticket.begin())
    return ticket.inner if isinstance(ticket, _Spoiled) else ticket


class _Late(Ticket):
    """A transfer that has not begun yet. It begins in the thread that asks for it, as copiers expect."""

    def __init__(self, begin: Callable[[], Ticket], delay: float) -> None:
        self._begin = begin
        self._at = time.monotonic() + delay
        self._inner: Ticket | None = None

    def begin(self) -> Ticket:
        if self._inner is None:
            self._inner = self._begin()
        return self._inner

    def done(self) -> bool:
        return time.monotonic() >= self._at and self.begin().done()

    def wait_until_due(self) -> None:
        time.sleep(max(0.0, self._at - time.monotonic()))

    def wait(self) -> None:
        self.wait_until_due()
        self.begin().wait()

    @property
    def bad(self) -> Sequence[int]:
        return self.begin().bad

    @property
    def unpackable(self) -> Sequence[int]:
        return self.begin().unpackable

    @property
    def reason(self) -> str:
        return self.begin().reason


class _Spoiled(Ticket):
    bad: Sequence[int] = ()
    reason = ""

    def __init__(self, inner: Ticket, bad: Sequence[int], reason: str) -> None:
        self.inner = inner
        self.bad, self.reason = bad, reason

    def done(self) -> bool:
        return self.inner.done()

    def wait(self) -> None:
        self.inner.wait()

    @property
    def unpackable(self) -> Sequence[int]:
        return self.inner.unpackable
