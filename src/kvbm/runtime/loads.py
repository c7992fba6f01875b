"""Loads under way, and how a long load that no step waits for is submitted: part by part.

Submitting a long load takes the engine's thread milliseconds. A step that waits for it has nothing else to do. Beside
decoding requests the worker submits it in parts, and each step enough of them to keep the bus busy until the next. The
first part does not go into the step in which the engine allocates thousands of blocks: that step is long already.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from itertools import pairwise
from typing import NamedTuple

from kvbm.plans import LoadPlan, LoadResult, TierName
from kvbm.tiers.staged_read import Send, StagedRead
from kvbm.tracing import annotate
from kvbm.transfer.base import Copier, Ticket, When

_LEAD = 2  # parts of long loads that are under way at a time: the second begins when the first has arrived
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
    """A load under way. ``near_tier``: the tier that the copier reaches; others come by staged reads."""

    def __init__(self, plan: LoadPlan, near_tier: TierName) -> None:
        self.plan = plan
        self._near_tier = near_tier
        self.parts: list[Part] = []
        self.rest: deque[Rest] = deque()
        self.lead = 0  # parts that may be under way at a time, where it comes in parts
        self.staged: list[StagedRead] = []
        self.send: Send | None = None  # how staged blocks go on to the engine
        self.bad: set[int] = set()  # positions that are lost even if their transfers succeed
        self.missed: set[int] = set()
        self.began = 0.0
        self.waited = 0.0  # seconds until its staged reads were given up
        self.expected = 0.0  # seconds that they would have taken at least

    def spoil(self) -> None:
        """Count none of its blocks as arrived. Blocks of staged tiers are not bad for that, only missed."""
        self.rest.clear()
        first = 0
        for copy in self.plan.copies:
            positions = range(first, first + len(copy.blocks))
            (self.bad if copy.tier == self._near_tier else self.missed).update(positions)
            first += len(copy.blocks)
        for read in self.staged:
            read.give_up("the load has failed")

    def done(self) -> bool:
        if self.rest:
            return False
        return all(part.ticket.done() for part in self.parts) and all(read.done() for read in self.staged)

    def lost(self) -> tuple[list[int], list[int]]:
        """(positions that turned out bad, positions that were missed); valid when done."""
        bad = set(self.bad)
        for part in self.parts:
            mine = range(part.offset, part.offset + part.blocks)
            bad.update(part.first + position - part.offset for position in part.ticket.bad if position in mine)
        bad.update(*(read.bad for read in self.staged))
        return sorted(bad), sorted(self.missed.union(*(read.missed for read in self.staged)) - bad)

    @property
    def late(self) -> list[TierName]:
        """Tiers that still write to its near slots."""
        return list(dict.fromkeys(read.store.tier for read in self.staged if read.owes))

    @property
    def is_submitted(self) -> bool:
        """All of it is with the copier, which has taken it without a fault."""
        return not (self.rest or self.staged or self.bad or self.missed)

    @property
    def blocks_left(self) -> int:
        """Blocks that the copier has not brought yet."""
        return sum(part.blocks for part in self.parts if not part.ticket.done())

    @property
    def block_seconds(self) -> float:
        """How long a block of those took that have come; 0 if none has."""
        done = [part for part in self.parts if part.ticket.done()]
        return sum(part.seconds for part in done) / max(1, sum(part.blocks for part in done))

    def late_result(self) -> LoadResult | None:
        """Of a load whose given-up reads have ended by now: its near slots are free. None while one goes on."""
        for read in self.staged:
            read.collect()
        if self.late:
            return None
        bad: set[int] = set().union(*(read.bad for read in self.staged))
        missed = self.missed.union(*(read.missed for read in self.staged))
        return LoadResult(self.plan.id, sorted(bad), missed=sorted(missed))

    def result(self) -> LoadResult:
        bad, missed = self.lost()
        near = sum(part.seconds for part in self.parts)
        if not self.staged:
            return LoadResult(self.plan.id, bad, near, missed)
        by_tier: dict[TierName, float] = {self._near_tier: near} if near else {}
        longest = self.waited
        for tier in dict.fromkeys(read.store.tier for read in self.staged):
            read = [read for read in self.staged if read.store.tier == tier and read.ended]
            far = max(r.ended for r in read) - min(r.began for r in read) if read else 0.0  # they are read side by side
            longest = max(longest, far)
            if took := max(far, self.expected):
                by_tier[tier] = took
        return LoadResult(self.plan.id, bad, near + longest, missed, self.late, by_tier)


class Submission:
    """Hands loads to the copier, whole or part by part, and knows which slots the copier prefetches."""

    def __init__(self, copier: Copier, loads: Collection[Load]) -> None:
        """``loads``: those under way, as they are at any moment, the oldest first."""
        self._copier = copier
        self._loads = loads
        self._prefetched: list[int] = []  # slots that the copier has begun to prefetch
        self._polled = time.monotonic()
        self._spare = 0.0  # seconds until the end of the next step for parts, however many are under way
        self._submits_until = 0.0
        self.steps_are_long = True  # as far as is known
        self._last_step = self.step_seconds = 0.0  # the shorter one of the last two steps

    def prefetch(self, slots: list[int], tokens: int) -> bool:
        """See :meth:`kvbm.transfer.base.Copier.prefetch`. Not while a load has parts to come: the next would end it."""
        if any(load.rest for load in self._loads):
            return False
        with annotate("copier.prefetch"):
            begun = self._copier.prefetch(slots, tokens)
        if begun:
            self._prefetched = slots
        return begun

    def end_prefetch(self) -> None:
        self._prefetched = []
        self._copier.end_prefetch()

    def submit(self, slots: list[int], blocks: list[int], after: Iterable[Ticket], when: When, tokens: int) -> Ticket:
        """A load as a whole."""
        self._prefetched = []  # the load uses it now, or it has been given up
        with annotate("copier.load"):
            return self._copier.load(slots, blocks, after, when, tokens)

    def cuts(self, slots: list[int]) -> list[tuple[int, int]]:
        """The parts in which a load outside of the step goes to the copier, from where to where: as equal as can be.
        Slots that were prefetched together are placed together, or they would be fetched again; the others follow."""
        near = len(self._prefetched) if slots[: len(self._prefetched)] == self._prefetched else 0
        count, portion = len(slots) - near, self._copier.portion
        parts = -(-count // portion) if portion else min(count, 1)
        ends = [near + count * i // parts for i in range(1, parts + 1)]
        return list(pairwise([0, near, *ends] if near else [0, *ends]))

    def step_ended(self) -> None:
        """Measure the step. A long one leaves time to submit more parts: one for each step would take too long."""
        now = time.monotonic()
        step, self._polled = now - self._polled, now
        self._last_step, self.step_seconds = step, min(step, self._last_step)
        self.steps_are_long = step >= _LONG_STEP
        self._spare = _LONG_STEP_SHARE * step if self.steps_are_long else 0.0

    def take_in(self, load: Load, rest: Iterable[Rest], failed: Callable[[Load, Exception], None]) -> None:
        """A load that comes in these parts. Beside short steps the first part waits for the next step, because the
        engine has spent this one on allocating the blocks. A prefetched part does not wait."""
        load.rest.extend(rest)
        load.lead = _LEAD
        if self.steps_are_long or self._prefetched:
            self.go_on(failed)

    def go_on(self, failed: Callable[[Load, Exception], None]) -> None:
        """Submit as many parts as keep the bus busy until the next step. One load after the other: the first to arrive
        is answered while the second is on its way. ``failed``: is called with a load that has a failed part."""
        self._submits_until = time.monotonic() + self._spare
        for load in [load for load in self._loads if load.rest]:
            try:
                self._submit_parts(load)
            except Exception as error:
                failed(load, error)
            if load.rest:
                break
        self._spare = max(0.0, self._submits_until - time.monotonic())

    def _submit_parts(self, load: Load) -> None:
        under_way = self._under_way()
        if load.parts and not under_way:
            load.lead *= 2  # steps are long: the bus had nothing to do
        due = load.lead - under_way
        if load.lead == _LEAD and not self._prefetched:
            due = min(due, 1)  # a part is expected to take longer than a step, unless it was prefetched
        while load.rest and (due > 0 or time.monotonic() < self._submits_until):
            first, slots, blocks, after = load.rest.popleft()
            ticket = self.submit(slots, blocks, after, When.LATER, load.plan.tokens)
            load.parts.append(Part(first, len(blocks), ticket, 0, 1.0))
            due -= 1

    def _under_way(self) -> int:
        tickets = [part.ticket for load in self._loads if load.lead for part in load.parts]
        return sum(not _is_over(ticket) for ticket in tickets)


def _is_over(ticket: Ticket) -> bool:
    """Whether the bus is done with it. Errors are reported by the load that owns the ticket."""
    try:
        return ticket.done()
    except Exception:
        return True
