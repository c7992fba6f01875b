"""Blocks on their way between the disk and the engine, on one rank.

The disk reads into host slots, the copier goes on from there. Copiers are called from the engine's thread only, so a
load from disk advances whenever the worker is polled: what has been read is handed to the copier, and where the blocks
pass through fewer slots than there are blocks, the next ones are read as slots become free. Everything there is room
for is read at once: the disk sees the whole match ahead.

A disk that hangs costs its blocks and nothing else. A load is *given up* when nothing at all has come from the disk for
``patience`` seconds, when the load takes longer than its plan allows, or as soon as it falls behind what it takes to be
in time: the blocks that have come count, so little is lost by stopping early. The request goes on without the rest, and
the host slots stay taken until the late reads have ended.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from kvbm.config import Config
from kvbm.plans import Copy
from kvbm.storage import bounded
from kvbm.storage.disk import DiskFile, Operation
from kvbm.storage.faults import disk_io
from kvbm.transfer.base import Ticket

# Read as one: large enough for full speed, small enough for the copy of one part to run under the reading of the next.
_CHUNK_BYTES = 32 << 20
# A load is given up when it is so much of its time behind. What has come counts, so this is also how much longer such a
# request takes than one that is computed; 20 ms of a prompt of 32k tokens, where less is the noise of a disk.
_BEHIND = 0.015
# Read at start to see how fast the disk is: enough to tell, and over in a moment.
_MEASURED_BYTES = 64 << 20
_MEASURE_SECONDS = 3.0
# Host slots that blocks pass through, where no host tier is asked for.
_FEWEST_BOUNCE_SLOTS = 8

Send = Callable[[list[int], list[int]], Ticket]


def open_file(config: Config, path: Path, slots: int, slot_bytes: int, rank: int, patience: float) -> DiskFile:
    """A rank's file as the settings want it. ``patience``: for whoever still holds it."""
    return DiskFile(
        path,
        slots,
        slot_bytes,
        allocator=config.disk_allocator_type,
        direct=not config.disk_disable_o_direct,
        zerofill=config.disk_zerofill_fallback,
        threads=config.disk_threads,
        patience=patience,
        io=disk_io(config.inject_faults, rank),
    )


def bounce_slots(config: Config, slot_bytes: int) -> int:
    """Slots of host memory that is but the way to the disk."""
    return max(_FEWEST_BOUNCE_SLOTS, (config.disk_bounce_mb << 20) // slot_bytes)


class Disk:
    """One rank's disk, and the host slab that its blocks pass through."""

    def __init__(
        self, file: DiskFile, slab_address: int, patience: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.slots = file.slots
        self.chunk_blocks = max(1, _CHUNK_BYTES // file.slot_bytes)
        self.patience = patience
        self.clock = clock
        self.heard_at = clock()  # when something came from the disk last
        self.close_seconds: float | None = None  # that the end waits for the disk, if not as long as usual
        self._file = file
        self._address = slab_address

    def read(self, slots: Sequence[int], hosts: Sequence[int], tags: Sequence[bytes]) -> Operation:
        return self._file.read(slots, self._addresses(hosts), tags)

    def write(self, slots: Sequence[int], hosts: Sequence[int], tags: Sequence[bytes]) -> Operation:
        return self._file.write(slots, self._addresses(hosts), tags)

    def close(self) -> bool:
        """False when the disk hangs: then the slab must stay where it is."""
        return self._file.close(self.close_seconds)

    def _addresses(self, hosts: Sequence[int]) -> list[int]:
        return [self._address + slot * self._file.slot_bytes for slot in hosts]


def measure(file: DiskFile) -> tuple[float, float] | None:
    """(bytes a second, seconds that any read takes) of a disk, before it serves anybody; None when it does not answer.

    Reads what is there from the engine before, or a little that is written for it: a place that was never written is
    read without asking the disk. The blocks in it are not named by any index, and nobody finds them.
    """
    blocks = max(1, min(file.slots // 8, _MEASURED_BYTES // file.slot_bytes))
    memory = mmap.mmap(-1, blocks * file.slot_bytes)
    first = (ctypes.c_char * len(memory)).from_buffer(memory)
    places = [ctypes.addressof(first) + i * file.slot_bytes for i in range(blocks)]
    slots = file.held(blocks)
    if len(slots) < blocks and not file.kept:
        slots = list(range(blocks))
        if not _over(file.write(slots, places, [b""] * blocks), memory):
            return None
    took = []
    for part in (slots[:1], slots):
        read = file.read(part, places[: len(part)], [b""] * len(part))
        if not _over(read, memory):
            return None
        took.append(read.seconds)
    if not slots or min(took) <= 0:
        return None
    rate = len(slots) * file.slot_bytes / took[1]
    return rate, max(0.0, took[0] - file.slot_bytes / rate)


def _over(operation: Operation, memory: object) -> bool:
    if operation.wait(_MEASURE_SECONDS):
        return True
    operation.cancel()  # what was only to be tried shall not come on top of blocks later
    bounded.keep_until_exit(memory)  # the disk may still write to it
    return False


def behind(ascents: Sequence[Ascent], within: float, now: float) -> float | None:
    """Seconds that all blocks would take at the present rate, where they fall behind what it takes to be in time; None
    while they keep up.

    Time counts from when the disk has begun on them: before that it was reading for others. Blocks are seen a chunk at
    a time.
    """
    begun = [ascent.begun_at for ascent in ascents if ascent.begun_at is not None]
    read, blocks = sum(ascent.read for ascent in ascents), sum(ascent.blocks for ascent in ascents)
    if not begun or read >= blocks:
        return None
    took = now - min(begun)
    chunk = max(ascent.chunk_blocks for ascent in ascents)
    if took <= within * ((read + chunk) / blocks + _BEHIND):
        return None
    return max(within, took * blocks / read if read else 0.0)


class Stretch(NamedTuple):
    """Blocks that come from disk, and the host slots they pass through: one each, or fewer that are used in turn."""

    positions: list[int]  # in the plan
    slots: list[int]
    blocks: list[int]
    via: list[int]
    tags: list[bytes]


def joined(copies: Iterable[tuple[int, Copy]]) -> list[Stretch]:
    """Copies of one plan, with their first positions, in as few stretches as can be: a match may change tiers at every
    block, and a disk likes to read much at a time."""
    whole = Stretch([], [], [], [], [])
    stretches = [whole]
    for first, copy in copies:
        positions = list(range(first, first + len(copy.slots)))
        stretch = Stretch(positions, copy.slots, copy.blocks, copy.via, copy.tags)
        if len(copy.via) < len(copy.slots):
            stretches.append(stretch)
        else:
            for all_of_them, these in zip(whole, stretch, strict=True):
                all_of_them.extend(these)  # type: ignore[attr-defined]
    return [stretch for stretch in stretches if stretch.slots]


class _Chunk:
    """Blocks that are read together, and then copied together."""

    __slots__ = ("before", "hosts", "operation", "over", "part", "ticket")

    def __init__(self, part: range, hosts: list[int], before: _Chunk | None) -> None:
        self.part = part  # of the stretch
        self.hosts = hosts
        self.before = before  # whose host slots these are: must be over first
        self.operation: Operation | None = None
        self.ticket: Ticket | None = None
        self.over = False


class Ascent:
    """A stretch on its way up."""

    def __init__(self, disk: Disk, stretch: Stretch) -> None:
        self._disk = disk
        self._stretch = stretch
        self.bad: set[int] = set()  # positions that turned out wrong
        self.missed: set[int] = set()  # positions that there was no room or no time for
        self.reasons: set[str] = set()
        self.given_up = False
        self.began = self.ended = 0.0  # first byte that was read, and last
        self.begun_at: float | None = None  # by the clock of the disk, when it was seen to have begun
        self.read = 0  # blocks that the disk is done with
        self.blocks = len(stretch.slots)
        self.chunk_blocks = 0
        self._left: list[_Chunk] = []
        self._owed: list[_Chunk] = []  # reads that were given up and go on
        blocks, hosts = len(stretch.slots), stretch.via
        if not hosts:
            self.missed.update(stretch.positions)
            self.reasons.add("no host slot was free to pass through")
            return
        turns = len(hosts) < blocks  # in two halves, so that one is read while the other is copied
        size = min(disk.chunk_blocks, max(1, len(hosts) // 2) if turns else blocks)
        self.chunk_blocks = size
        groups = len(hosts) // size
        for start in range(0, blocks, size):
            part, turn = range(start, min(start + size, blocks)), len(self._left)
            at = turn % groups * size if turns else start
            before = self._left[turn - groups] if turns and turn >= groups else None
            self._left.append(_Chunk(part, hosts[at : at + len(part)], before))

    def advance(self, send: Send) -> None:
        """Read what there is room for, hand what has been read to the copier. Never waits."""
        slots, tags = self._stretch.slots, self._stretch.tags
        for chunk in self._left:
            if chunk.operation is None and not self.given_up and (chunk.before is None or chunk.before.over):
                part = slice(chunk.part.start, chunk.part.stop)
                chunk.operation = self._disk.read(slots[part], chunk.hosts, tags[part])
                chunk.before = None
            if self.begun_at is None and chunk.operation is not None and chunk.operation.began:
                self.begun_at = self._disk.clock()
            if chunk.operation is not None and chunk.ticket is None and chunk.operation.done():
                self._take_in(chunk, chunk.operation, send)
            if chunk.ticket is not None and chunk.ticket.done():
                self._settle(chunk, chunk.ticket)
        self._left = [chunk for chunk in self._left if not chunk.over]

    def _take_in(self, chunk: _Chunk, operation: Operation, send: Send) -> None:
        self._hear(chunk, operation)
        self.began = min(self.began or operation.began, operation.began)
        self.ended = max(self.ended, operation.ended)
        self.read += len(chunk.part)
        good = [i for i in range(len(chunk.part)) if self._position(chunk, i) not in self.bad]
        if not good:
            chunk.over = True
            return
        try:
            blocks = [self._stretch.blocks[chunk.part[i]] for i in good]
            chunk.ticket = send([chunk.hosts[i] for i in good], blocks)
        except Exception as error:
            self.reasons.add(f"{type(error).__name__}: {error}")
            self.missed.update(self._position(chunk, i) for i in good)
            chunk.over = True

    def _settle(self, chunk: _Chunk, ticket: Ticket) -> None:
        chunk.over = True
        if ticket.bad:
            # Which of them does not matter: what lies on disk is good, and the request computes from the first on.
            self.missed.update(self._positions(chunk))
            self.reasons.add(ticket.reason)

    def _hear(self, chunk: _Chunk, operation: Operation) -> None:
        """A read has ended."""
        self._disk.heard_at = self._disk.clock()
        self.bad.update(self._position(chunk, i) for i in operation.bad)
        if operation.reason:
            self.reasons.add(operation.reason)

    def give_up(self, reason: str) -> None:
        """Whatever has not been read by now is not waited for. What has been is still copied to its end."""
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
        """Reads that were given up are still under way, as far as has been looked."""
        return bool(self._owed)

    def collect(self) -> None:
        """Take in reads that were given up and have ended. What they brought has not gone on to the engine, but it lies
        in its host slot and may stay there. Of the rest nobody knows whether it is bad: most was not even read."""
        for chunk in self._owed:
            operation = chunk.operation
            if operation is not None and operation.done():
                chunk.over = True
                self._disk.heard_at = self._disk.clock()
                absent = set(operation.bad)
                self.missed.difference_update(
                    self._position(chunk, i) for i in range(len(chunk.part)) if i not in absent
                )
        self._owed = [chunk for chunk in self._owed if not chunk.over]

    def _position(self, chunk: _Chunk, i: int) -> int:
        return self._stretch.positions[chunk.part[i]]

    def _positions(self, chunk: _Chunk) -> list[int]:
        return self._stretch.positions[chunk.part.start : chunk.part.stop]
