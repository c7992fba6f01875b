"""Staged reads: blocks on their way from a staged tier to the engine, on one rank.

The tier's store reads into near slots, the copier goes on from there. Only the engine's thread calls copiers, so a
staged read advances whenever the worker is polled: the worker hands blocks that have been read to the copier, and where
blocks pass through fewer slots than there are blocks, it reads the next ones as slots become free. It reads everything
there is room for at once: the store sees the whole match ahead.

A store that hangs costs its blocks and nothing else. The worker *gives up* a load when nothing at all has come from the
store for ``stall_seconds`` (the store's, or the plan's if those are fewer), when the load passes its deadline, or as
soon as it falls behind the rate that would meet the deadline: the blocks that have come count, so stopping early loses
little. The request goes on without the others, and their near slots stay taken until the late reads have ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from kvbm.plans import Copy, TierName
from kvbm.tiers.base import Operation, Store

# How far a load may fall behind the rate that meets its deadline, as a part of the deadline. Blocks that have come
# count, so this is also how much longer such a request takes than one that is computed: 20 ms of a prompt of 32k
# tokens; less is the noise of a disk.
_LAG_TOLERANCE = 0.015


class Copying(Protocol):
    """A copy from near slots to the engine; see :class:`kvbm.transfer.base.Ticket`."""

    @property
    def bad(self) -> Sequence[int]: ...

    @property
    def reason(self) -> str: ...

    def done(self) -> bool: ...


Send = Callable[[list[int], list[int]], Copying]


class StagedStore:
    """One rank's store of a staged tier, and the near slab that its blocks pass through."""

    def __init__(
        self,
        tier: TierName,
        store: Store,
        slab_address: int,
        slot_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tier = tier
        self.slots = store.slots
        self.chunk_blocks = max(1, store.chunk_bytes // slot_bytes)
        self.stall_seconds = store.stall_seconds
        self.clock = clock
        self.heard_at = clock()  # when the store last finished a read, for a load or a move
        self.close_seconds: float | None = None  # how long :meth:`close` waits; None: as long as the store says
        self._store = store
        self._address = slab_address
        self._slot_bytes = slot_bytes

    def read(self, places: Sequence[int], near_slots: Sequence[int], tags: Sequence[bytes]) -> Operation:
        return self._store.read(places, self._addresses(near_slots), tags)

    def hear(self) -> None:
        """A read has ended."""
        self.heard_at = self.clock()

    def write(self, places: Sequence[int], near_slots: Sequence[int], tags: Sequence[bytes]) -> Operation:
        return self._store.write(places, self._addresses(near_slots), tags)

    def close(self) -> bool:
        """False when the store hangs: its operations may still use the slab."""
        return self._store.close(self.close_seconds)

    def _addresses(self, near_slots: Sequence[int]) -> list[int]:
        return [self._address + slot * self._slot_bytes for slot in near_slots]


def expected_if_late(reads: Sequence[StagedRead], deadline_seconds: float, now: float) -> float | None:
    """Seconds that all blocks would take at the present rate, if that misses the deadline; None while they keep up.

    Time counts from when the store has begun on them: before that it was reading for other requests. Blocks arrive a
    chunk at a time.
    """
    begun = [read.begun_at for read in reads if read.begun_at is not None]
    done, blocks = sum(read.blocks_read for read in reads), sum(read.blocks for read in reads)
    if not begun or done >= blocks:
        return None
    took = now - min(begun)
    chunk = max(read.chunk_blocks for read in reads)
    if took <= deadline_seconds * ((done + chunk) / blocks + _LAG_TOLERANCE):
        return None
    return max(deadline_seconds, took * blocks / done if done else 0.0)


class Stretch(NamedTuple):
    """Blocks of one staged tier, and the near slots they pass through: one each, or fewer that are used in turn."""

    positions: list[int]  # in the plan
    slots: list[int]
    blocks: list[int]
    via: list[int]
    tags: list[bytes]


def merge_copies(copies: Iterable[tuple[int, Copy]]) -> list[Stretch]:
    """Copies of one plan from one tier, with their first positions, in as few stretches as possible: a match may change
    tiers at every block, and a disk reads large chunks faster."""
    whole = Stretch([], [], [], [], [])
    stretches = [whole]
    for first, copy in copies:
        positions = list(range(first, first + len(copy.slots)))
        stretch = Stretch(positions, copy.slots, copy.blocks, copy.via, copy.tags)
        if len(copy.via) < len(copy.slots):
            stretches.append(stretch)
        else:
            for merged, part in zip(whole, stretch, strict=True):
                merged.extend(part)  # type: ignore[attr-defined]
    return [stretch for stretch in stretches if stretch.slots]


class _Chunk(msgspec.Struct, eq=False):
    """Blocks that are read together, and then copied together."""

    part: range  # of the stretch
    near_slots: list[int]
    before: _Chunk | None  # the chunk that uses these near slots first
    operation: Operation | None = None
    ticket: Copying | None = None
    over: bool = False


class StagedRead:
    """A stretch on its way to the engine."""

    def __init__(self, store: StagedStore, stretch: Stretch) -> None:
        self.store = store
        self._stretch = stretch
        self.bad: set[int] = set()  # positions that turned out wrong
        self.missed: set[int] = set()  # positions without a free slot, or past the deadline
        self.reasons: set[str] = set()
        self.given_up = False
        self.began = self.ended = 0.0  # first byte that was read, and last
        self.begun_at: float | None = None  # by the store's clock, when a poll saw that it has begun
        self.blocks_read = 0  # well or badly
        self.blocks = len(stretch.slots)
        self.chunk_blocks = 0
        self._left: list[_Chunk] = []
        self._owed: list[_Chunk] = []  # reads that were given up and go on
        blocks, near_slots = len(stretch.slots), stretch.via
        if not near_slots:
            self.missed.update(stretch.positions)
            self.reasons.add("no staging slot was free")
            return
        turns = len(near_slots) < blocks  # in two halves, so that one is read while the other is copied
        size = min(store.chunk_blocks, max(1, len(near_slots) // 2) if turns else blocks)
        self.chunk_blocks = size
        groups = len(near_slots) // size
        for start in range(0, blocks, size):
            part, turn = range(start, min(start + size, blocks)), len(self._left)
            at = turn % groups * size if turns else start
            before = self._left[turn - groups] if turns and turn >= groups else None
            self._left.append(_Chunk(part, near_slots[at : at + len(part)], before))

    def advance(self, send: Send) -> None:
        """Read as many blocks as there are free slots for, and hand those that have come to the copier. Never waits."""
        slots, tags = self._stretch.slots, self._stretch.tags
        arrived: list[_Chunk] = []
        for chunk in self._left:
            if chunk.operation is None and not self.given_up and (chunk.before is None or chunk.before.over):
                part = slice(chunk.part.start, chunk.part.stop)
                chunk.operation = self.store.read(slots[part], chunk.near_slots, tags[part])
                chunk.before = None
            if self.begun_at is None and chunk.operation is not None and chunk.operation.began:
                self.begun_at = self.store.clock()
            if chunk.operation is not None and chunk.ticket is None and chunk.operation.done():
                self._take_in(chunk, chunk.operation)
                arrived.append(chunk)
        self._send(arrived, send)
        for chunk in self._left:
            if chunk.ticket is not None and chunk.ticket.done():
                self._settle(chunk, chunk.ticket)
        self._left = [chunk for chunk in self._left if not chunk.over]

    def _take_in(self, chunk: _Chunk, operation: Operation) -> None:
        self._hear(chunk, operation)
        self.began = min(self.began or operation.began, operation.began)
        self.ended = max(self.ended, operation.ended)
        self.blocks_read += len(chunk.part)

    def _send(self, chunks: list[_Chunk], send: Send) -> None:
        """Hand what a poll has found to the copier at once: each call takes the engine's thread some time."""
        near_slots: list[int] = []
        blocks: list[int] = []
        for chunk in chunks:
            good = [i for i in range(len(chunk.part)) if self._position(chunk, i) not in self.bad]
            near_slots += [chunk.near_slots[i] for i in good]
            blocks += [self._stretch.blocks[chunk.part[i]] for i in good]
            chunk.over = not good
        chunks = [chunk for chunk in chunks if not chunk.over]
        if not chunks:
            return
        ticket: Copying | None = None
        try:
            ticket = send(near_slots, blocks)
        except Exception as error:
            self.reasons.add(f"{type(error).__name__}: {error}")
        for chunk in chunks:
            chunk.ticket, chunk.over = ticket, ticket is None
            if ticket is None:
                self.missed.update(position for position in self._positions(chunk) if position not in self.bad)

    def _settle(self, chunk: _Chunk, ticket: Copying) -> None:
        chunk.over = True
        if ticket.bad:
            # Which of them does not matter: the store's blocks are good, and the request computes from the first on.
            self.missed.update(self._positions(chunk))
            self.reasons.add(ticket.reason)

    def _hear(self, chunk: _Chunk, operation: Operation) -> None:
        self.store.hear()
        self.bad.update(self._position(chunk, i) for i in operation.bad)
        if operation.reason:
            self.reasons.add(operation.reason)

    def give_up(self, reason: str) -> None:
        """Stop waiting for blocks that have not been read by now. Those that have been are still copied to the end."""
        if self.given_up:
            return
        self.given_up = True
        unread = [chunk for chunk in self._left if chunk.ticket is None]
        if unread:
            self.reasons.add(reason)
        for chunk in unread:
            self.missed.update(self._positions(chunk))
        self._owed = [chunk for chunk in unread if chunk.operation is not None]
        for chunk in self._owed:
            assert chunk.operation is not None
            chunk.operation.cancel()
        self._left = [chunk for chunk in self._left if chunk.ticket is not None]

    def done(self) -> bool:
        return not self._left

    @property
    def owes(self) -> bool:
        """Whether reads that were given up are still under way, as of the last :meth:`collect`."""
        return bool(self._owed)

    def collect(self) -> None:
        """Take in reads that were given up and have ended. Their blocks have not gone on to the engine, but lie in near
        slots and may stay there. The others are not known to be bad: most were never read."""
        for chunk in self._owed:
            operation = chunk.operation
            if operation is not None and operation.done():
                chunk.over = True
                self.store.hear()
                absent = set(operation.bad)
                self.missed.difference_update(
                    self._position(chunk, i) for i in range(len(chunk.part)) if i not in absent
                )
        self._owed = [chunk for chunk in self._owed if not chunk.over]

    def _position(self, chunk: _Chunk, i: int) -> int:
        return self._stretch.positions[chunk.part[i]]

    def _positions(self, chunk: _Chunk) -> list[int]:
        return self._stretch.positions[chunk.part.start : chunk.part.stop]
