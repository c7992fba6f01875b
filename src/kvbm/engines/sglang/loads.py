"""Pages on their way back: a load that one call of SGLang carries out from its first byte to its last.

The thread that calls drives the staged reads of its own load, so no other thread has to be woken for a page. It gives
up a disk that hangs or takes longer than computing; the reads that go on write to KVBM's slab, and never to a page.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from kvbm.engines.sglang.pages import Page, scatter
from kvbm.plans import LoadPlan, TierName
from kvbm.runtime.loads import Load, Part
from kvbm.tiers.base import Operation, Store
from kvbm.tiers.registry import NEAR
from kvbm.tiers.staged_read import StagedRead, StagedStore, expected_if_late, merge_copies
from kvbm.transfer.base import Slab, Ticket

POLL_SECONDS = 0.02  # between two looks at reads and writes under way


class AwaitedStore(StagedStore):
    """A store whose caller waits for the oldest operation that is under way."""

    def __init__(self, tier: TierName, store: Store, slab: Slab) -> None:
        super().__init__(tier, store, slab.address, slab.slot_bytes)
        self._under_way: deque[Operation] = deque()

    def read(self, places: Sequence[int], near_slots: Sequence[int], tags: Sequence[bytes]) -> Operation:
        self._under_way.append(operation := super().read(places, near_slots, tags))
        return operation

    def write(self, places: Sequence[int], near_slots: Sequence[int], tags: Sequence[bytes]) -> Operation:
        self._under_way.append(operation := super().write(places, near_slots, tags))
        return operation

    @property
    def oldest(self) -> Operation | None:
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft()
        return self._under_way[0] if self._under_way else None


def oldest(stores: Iterable[AwaitedStore]) -> Operation | None:
    """An operation that is under way."""
    return next((operation for store in stores if (operation := store.oldest) is not None), None)


class _Copied(Ticket):
    """A copy from host memory to pages. It is over when the call that makes it returns."""

    seconds = 0.0

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


class PageLoad(Load):
    """``pages``: the target of each block of the plan. ``stores``: of the staged tiers."""

    def __init__(
        self, plan: LoadPlan, pages: Sequence[Page], slab: Slab, stores: Mapping[TierName, Store], patience: float
    ) -> None:
        """``patience``: seconds without a byte from a store after which its reads are given up."""
        super().__init__(plan, NEAR.name)
        self._pages = pages
        self._slab = slab
        self._patience = patience
        self._stores: list[AwaitedStore] = []
        self.began = time.monotonic()
        for tier in dict.fromkeys(copy.tier for copy in plan.copies if copy.tier != NEAR.name):
            self._stores.append(AwaitedStore(tier, stores[tier], slab))
            stretches = merge_copies((copy.blocks[0], copy) for copy in plan.copies if copy.tier == tier)
            self.staged += [StagedRead(self._stores[-1], stretch) for stretch in stretches]

    @property
    def reasons(self) -> set[str]:
        """Why pages did not arrive."""
        return {f"{read.store.tier} load: {reason}" for read in self.staged for reason in read.reasons if reason}

    def carry_out(self) -> None:
        """Returns when every page has arrived or is given up."""
        self.began = time.monotonic()
        for copy in self.plan.copies:  # while the disk reads
            if copy.tier == NEAR.name:
                ticket = self._send(copy.slots, copy.blocks)
                self.parts.append(Part(copy.blocks[0], len(copy.blocks), ticket, 0, 1.0))
        self.advance()
        while not self.done():
            if (operation := oldest(self._stores)) is not None:
                operation.wait(POLL_SECONDS)
            self.advance()
            if not self.done() and (reason := self._why_late()):
                self.give_up(reason)

    def give_up(self, reason: str) -> None:
        for read in self.staged:
            read.give_up(f"gave up waiting for the {read.store.tier} tier: {reason}")

    def advance(self) -> None:
        """Start the reads that there is room for, and copy the pages that have been read."""
        for read in self.staged:
            read.advance(self._send)

    def _why_late(self) -> str:
        """Empty while the load keeps up."""
        now, deadline = time.monotonic(), self.plan.deadline_seconds
        waited = now - self.began
        expected = expected_if_late(self.staged, deadline, now) if deadline else None
        if expected is not None or (deadline and waited > deadline):
            reason = "slower than computing"
        elif now - max(self.began, *(store.heard_at for store in self._stores)) > self._patience:
            reason = f"nothing came for {self._patience:g} s"
        else:
            return ""
        self.waited, self.expected = waited, max(waited, expected or 0.0)
        return reason

    def _send(self, slots: Sequence[int], blocks: Sequence[int]) -> _Copied:
        began = time.monotonic()
        # SGLang uses no page behind one that did not arrive.
        end = min((position for read in self.staged for position in read.bad | read.missed), default=len(self._pages))
        for slot, block in zip(slots, blocks, strict=True):
            if block < end:
                scatter(self._slab.address + slot * self._slab.slot_bytes, self._pages[block])
        return _Copied(time.monotonic() - began)
