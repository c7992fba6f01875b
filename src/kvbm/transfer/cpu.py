"""The copier for engines with a KV cache in CPU memory.

A run of neighbouring blocks, in either direction, is one strided numpy assignment, which releases the interpreter while
it copies. Packed blocks are packed and unpacked by numpy. Loads and stores have a thread each, so a request that waits
for its load never queues behind an offload.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvbm.gil import notify
from kvbm.transfer.base import Copier, Slab, Ticket, When, describe_error
from kvbm.transfer.layout import BlockLayout, Segment
from kvbm.transfer.packing import Tile, pack, unpack

Bytes = npt.NDArray[np.uint8]


class Outcome(NamedTuple):
    """How a transfer on a thread has ended; see :class:`~kvbm.transfer.base.Ticket`."""

    bad: Sequence[int] = ()
    reason: str = ""
    seconds: float = 0.0
    unpackable: Sequence[int] = ()


class FutureTicket(Ticket):
    """A transfer on a thread. If the thread raises, all ``blocks`` are bad."""

    def __init__(self, future: Future[Outcome], blocks: int) -> None:
        self._future = future
        self._blocks = blocks

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.exception()

    @property
    def _outcome(self) -> Outcome:
        error = self._future.exception()
        return self._future.result() if error is None else Outcome(range(self._blocks), describe_error(error))

    @property
    def bad(self) -> Sequence[int]:
        return self._outcome.bad

    @property
    def unpackable(self) -> Sequence[int]:
        return self._outcome.unpackable

    @property
    def reason(self) -> str:
        return self._outcome.reason

    @property
    def seconds(self) -> float:
        return self._outcome.seconds


class CpuCopier(Copier):
    def __init__(self, layout: BlockLayout, slab: Slab) -> None:
        self._slab = slab  # the arrays below are views of its memory and do not keep it alive themselves
        kind = _PackedPieces if layout.tile_values else _Pieces
        self.name = "packed, cpu" if layout.tile_values else "cpu"
        self._pieces = [kind(layout, slab, segment) for segment in layout.merged()]
        self._loads = ThreadPoolExecutor(1, thread_name_prefix="kvbm-load")
        self._stores = ThreadPoolExecutor(1, thread_name_prefix="kvbm-store")
        self._under_way: set[Future[Outcome]] = set()

    def load(
        self, slots: Sequence[int], blocks: Sequence[int], after: Iterable[Ticket], when: When, tokens: int = 0
    ) -> Ticket:
        waiting = list(after)

        def copy() -> Outcome:
            for ticket in waiting:
                ticket.wait()
            began = time.perf_counter()
            for some_slots, some_blocks in runs(slots, blocks):
                for pieces in self._pieces:
                    pieces.load(some_slots, some_blocks)
            return Outcome(seconds=time.perf_counter() - began)

        ticket = FutureTicket(self._follow(self._loads.submit(copy)), len(blocks))
        if when is not When.LATER:
            # The forward pass runs on the same cores, so overlapping it with the copy gains nothing.
            ticket.wait()
        return ticket

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> Ticket:
        def copy() -> Outcome:
            began = time.perf_counter()
            unpackable: list[int] = []
            at = 0
            for some_slots, some_blocks in runs(slots, blocks):
                left_out = set().union(*(pieces.store(some_slots, some_blocks) for pieces in self._pieces))
                unpackable.extend(sorted(at + row for row in left_out))
                at += len(some_slots)
            return Outcome(seconds=time.perf_counter() - began, unpackable=unpackable)

        return FutureTicket(self._follow(self._stores.submit(copy)), len(blocks))

    def _follow(self, future: Future[Outcome]) -> Future[Outcome]:
        self._under_way.add(future)
        future.add_done_callback(self._ended)
        return future

    def _ended(self, future: Future[Outcome]) -> None:
        """With the last one: an engine that waits for several would take the core for a step after each."""
        self._under_way.discard(future)
        if not self._under_way:
            notify()

    def begin_step(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            ticket.wait()

    def scribble(self, blocks: Sequence[int]) -> None:
        for pieces in self._pieces:
            for block in blocks:
                pieces.engine[block] = 0

    def close(self) -> None:
        self._loads.shutdown()
        self._stores.shutdown()
        self._pieces.clear()
        self._slab.close()


class _Pieces:
    """The same segment of every block: in the engine's memory and in the slots."""

    def __init__(self, layout: BlockLayout, slab: Slab, segment: Segment) -> None:
        self.engine = view_rows(segment.address, layout.num_blocks, segment.stride, segment.size)
        self.slots = view_rows(slab.address + segment.offset, slab.slots, slab.slot_bytes, segment.slot_size)

    def load(self, slots: range, blocks: range) -> None:
        self.engine[rows(blocks)] = self.slots[rows(slots)]

    def store(self, slots: range, blocks: range) -> Iterable[int]:
        """Returns the places in the run, from 0 on, of blocks that cannot be packed."""
        self.slots[rows(slots)] = self.engine[rows(blocks)]
        return ()


class _PackedPieces(_Pieces):
    def __init__(self, layout: BlockLayout, slab: Slab, segment: Segment) -> None:
        super().__init__(layout, slab, segment)
        tile = Tile(layout.tile_values)
        self._values = self.engine.view(np.uint16).reshape(layout.num_blocks, -1, tile.values)
        self._packed = self.slots.reshape(slab.slots, -1, tile.size)

    def load(self, slots: range, blocks: range) -> None:
        for slot, block in zip(slots, blocks, strict=True):
            unpack(self._packed[slot], self._values[block])

    def store(self, slots: range, blocks: range) -> Iterable[int]:
        pairs = enumerate(zip(slots, blocks, strict=True))
        return [place for place, (slot, block) in pairs if len(pack(self._values[block], self._packed[slot]))]


def runs(slots: Sequence[int], blocks: Sequence[int]) -> Iterator[tuple[range, range]]:
    """Slots and blocks in runs, in which both count up or down by one: an engine gives its blocks out in any order."""
    first = 0
    while first < len(slots):
        end, steps = first + 1, (1, 1)
        if end < len(slots):
            steps = slots[end] - slots[first], blocks[end] - blocks[first]
            if abs(steps[0]) != 1 or abs(steps[1]) != 1:
                steps = 1, 1
        while end < len(slots) and (slots[end] - slots[end - 1], blocks[end] - blocks[end - 1]) == steps:
            end += 1
        yield _run(slots[first], steps[0], end - first), _run(blocks[first], steps[1], end - first)
        first = end


def _run(first: int, step: int, count: int) -> range:
    return range(first, first + step * count, step)


def rows(run: range) -> slice:
    return slice(run.start, run.stop if run.stop >= 0 else None, run.step)


def view_rows(address: int, rows: int, stride: int, size: int) -> Bytes:
    """``rows`` byte ranges of ``size`` bytes, ``stride`` apart, as an array over memory that the caller keeps alive."""
    span = stride * (rows - 1) + size
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * span).from_address(address))
    return np.lib.stride_tricks.as_strided(memory, (rows, size), (stride, 1))
