"""Loads under way, and how the long ones among those that no step waits for are submitted: part by part.

Submitting a long load takes the engine's thread milliseconds. A step that waits for it has nothing else to do. Beside
requests that decode it is done in parts, with every step as much as keeps the bus busy until the next, and the first of
them not in the step in which the engine has made room for thousands of blocks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from itertools import pairwise
from typing import NamedTuple

from kvbm.observe.nvtx import annotate
from kvbm.plans import LoadPlan, LoadResult, Tier
from kvbm.runtime.disk import Ascent, Send
from kvbm.transfer.base import Copier, Ticket, When

_LEAD = 2  # parts of long loads that are under way at a time: one arrives, and the next is there when it has
_LONG_STEP = 0.02  # seconds that a step takes, from which on some of it may go into submitting more of them
_LONG_STEP_SHARE = 0.1  # of it


class Part(NamedTuple):
    """A stretch of a load's blocks and the transfer that brings them."""

    first: int  # position in the plan of the first block
    blocks: int
    ticket: Ticket
    offset: int  # position in the transfer of that block
    share: float  # of the whole transfer, which may serve several loads

    @property
    def seconds(self) -> float:
        return self.ticket.seconds * self.share


class Rest(NamedTuple):
    """A stretch of a load's blocks whose transfer has not begun."""

    first: int
    slots: list[int]
    blocks: list[int]
    after: list[Ticket]


class Load:
    """A load under way."""

    def __init__(self, plan: LoadPlan) -> None:
        self.plan = plan
        self.parts: list[Part] = []
        self.rest: deque[Rest] = deque()
        self.lead = 0  # parts that may be under way at a time, where it comes in parts
        self.ascents: list[Ascent] = []  # what comes from disk
        self.send: Send | None = None  # how these go on to the engine
        self.bad: set[int] = set()  # positions known to be lost whatever the transfers say
        self.missed: set[int] = set()
        self.began = 0.0
        self.waited = 0.0  # seconds until the disk was given up
        self.expected = 0.0  # seconds that it would have taken at least, had it not been

    def divide(self, rest: Iterable[Rest]) -> None:
        """It comes in these parts."""
        self.rest.extend(rest)
        self.lead = _LEAD

    def spoil(self) -> None:
        """Nothing of it counts. What lies on disk is no worse for that."""
        self.rest.clear()
        first = 0
        for copy in self.plan.copies:
            positions = range(first, first + len(copy.blocks))
            (self.bad if copy.tier is Tier.HOST else self.missed).update(positions)
            first += len(copy.blocks)
        for ascent in self.ascents:
            ascent.give_up("the load has failed")

    def done(self) -> bool:
        if self.rest:
            return False
        return all(part.ticket.done() for part in self.parts) and all(ascent.done() for ascent in self.ascents)

    def lost(self) -> tuple[list[int], list[int]]:
        """(positions that turned out bad, positions that were missed); valid when done."""
        bad = set(self.bad)
        for part in self.parts:
            mine = range(part.offset, part.offset + part.blocks)
            bad.update(part.first + position - part.offset for position in part.ticket.bad if position in mine)
        bad.update(*(ascent.bad for ascent in self.ascents))
        return sorted(bad), sorted(self.missed.union(*(ascent.missed for ascent in self.ascents)) - bad)

    @property
    def owes(self) -> bool:
        """The disk still writes to its host slots."""
        return any(ascent.owes for ascent in self.ascents)

    def result(self) -> LoadResult:
        bad, missed = self.lost()
        near = sum(part.seconds for part in self.parts)
        if not self.ascents:
            return LoadResult(self.plan.id, bad, near, missed)
        read = [ascent for ascent in self.ascents if ascent.ended]
        far = max(a.ended for a in read) - min(a.began for a in read) if read else 0.0  # they are read side by side
        took = near + max(far, self.waited)
        by_tier = {tier: t for tier, t in ((Tier.HOST, near), (Tier.DISK, max(far, self.expected))) if t}
        return LoadResult(self.plan.id, bad, took, missed, self.owes, by_tier)


class Submission:
    """Hands loads to the copier, whole or part by part, and knows what the copier has begun to bring near."""

    def __init__(self, copier: Copier, loads: Collection[Load]) -> None:
        """``loads``: those under way, as they are at any moment, the oldest first."""
        self._copier = copier
        self._loads = loads
        self._near: list[int] = []  # slots that the copier has begun to bring near
        self._polled = time.monotonic()
        self._submits_until = 0.0  # parts, however many are under way
        self.steps_are_long = True  # as far as is known

    @property
    def keeps_up(self) -> bool:
        """Parts of long loads are under way, so that the bus has enough to do."""
        return self._under_way() >= _LEAD

    def prefetch(self, slots: list[int], tokens: int, whole: bool) -> bool:
        """See :meth:`kvbm.transfer.base.Copier.prefetch`. Not while a load has parts to come: the next would end it."""
        if any(load.rest for load in self._loads):
            return False
        with annotate("copier.prefetch"):
            begun = self._copier.prefetch(slots, tokens, whole)
        if begun:
            self._near = slots
        return begun

    def end_prefetch(self) -> None:
        self._near = []
        self._copier.end_prefetch()

    def submit(self, slots: list[int], blocks: list[int], after: Iterable[Ticket], when: When, tokens: int) -> Ticket:
        """A load as a whole."""
        self._near = []  # whatever it was, it is used now or has been given up
        with annotate("copier.load"):
            return self._copier.load(slots, blocks, after, when, tokens)

    def cuts(self, slots: list[int]) -> list[tuple[int, int]]:
        """The parts in which a load outside of the step goes to the copier, from where to where: as equal as can be.
        What has been fetched as one is placed as one, or it would have to be fetched again; what is left follows."""
        near = len(self._near) if slots[: len(self._near)] == self._near else 0
        count, portion = len(slots) - near, self._copier.portion
        parts = -(-count // portion) if portion else min(count, 1)
        ends = [near + count * i // parts for i in range(1, parts + 1)]
        return list(pairwise([0, near, *ends] if near else [0, *ends]))

    def step_ended(self) -> None:
        """Beside steps that take long a load is nothing, and in parts it would take several of them."""
        now = time.monotonic()
        step, self._polled = now - self._polled, now
        self.steps_are_long = step >= _LONG_STEP
        self._submits_until = now + _LONG_STEP_SHARE * step if self.steps_are_long else now

    def take_in(self, load: Load, rest: Iterable[Rest], failed: Callable[[Load, Exception], None]) -> None:
        """A load that comes in these parts. Beside short steps the first of them waits for the next step: in this one
        the engine has made room for the blocks, which took long enough. Unless it is near by now."""
        load.divide(rest)
        if self.steps_are_long or self._near:
            self.go_on(failed)

    def go_on(self, failed: Callable[[Load, Exception], None]) -> None:
        """Submit as many parts as keep the bus busy until the next step. One load after the other: the first to arrive
        is answered while the second is on its way. ``failed``: is told of a load of which a part could not be."""
        for load in [load for load in self._loads if load.rest]:
            try:
                self._submit_parts(load)
            except Exception as error:
                failed(load, error)
            if load.rest:
                return

    def _submit_parts(self, load: Load) -> None:
        under_way = self._under_way()
        if load.parts and not under_way:
            load.lead *= 2  # steps are long: the bus had nothing to do
        due = load.lead - under_way
        if load.lead == _LEAD and not self._near:
            due = min(due, 1)  # as far as is known it takes longer than a step; what is near has come part of the way
        while load.rest and (due > 0 or time.monotonic() < self._submits_until):
            first, slots, blocks, after = load.rest.popleft()
            ticket = self.submit(slots, blocks, after, When.LATER, load.plan.tokens)
            load.parts.append(Part(first, len(blocks), ticket, 0, 1.0))
            due -= 1

    def _under_way(self) -> int:
        tickets = [part.ticket for load in self._loads if load.lead for part in load.parts]
        return sum(not _is_over(ticket) for ticket in tickets)


def _is_over(ticket: Ticket) -> bool:
    """As far as the bus goes. Of a ticket that cannot say so its own load will hear."""
    try:
        return ticket.done()
    except Exception:
        return True
