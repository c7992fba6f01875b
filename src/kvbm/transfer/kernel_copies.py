"""Copies by kernel: any number of scattered pieces in one launch, on the current stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import torch

from kvbm.transfer.base import Slab, Ticket
from kvbm.transfer.kernels import Launcher, copy_numbers, copy_pieces, tile_of, word_of
from kvbm.transfer.layout import BlockLayout, Segment
from kvbm.transfer.packing import Tile
from kvbm.transfer.packing_kernels import unpack_pieces

# From benchmarks/gpu/copies.py: over the bus four programs of this shape reach the full bandwidth, and more gain
# nothing. Within device memory more programs are faster.
_PROGRAMS = 4
_LOCAL_PROGRAMS = 64
_WARPS = 16
_TILE_BYTES = 64 << 10
# A program that unpacks has one tile on the way instead of 64 KiB (benchmarks/gpu/packing.py).
_UNPACK_PROGRAMS = 32
LOCAL_UNPACK_PROGRAMS = 264
UNPACK_WARPS = 8
_BATCH = 8192  # maximum blocks of one launch; a longer transfer takes several launches
_NUMBERS = 1024  # slot and block numbers that one program copies
_NUMBERS_WARPS = 4
_BUFFERS = 128  # maximum transfers in flight before the next one waits: 16 MiB on the host and on the device


Numbers = Sequence[int] | np.ndarray


class KernelCopies:
    """Moves blocks between the engine's cache and the slab or rows of a device buffer. For one thread at a time.

    Packed blocks are unpacked on their way to the engine's cache. The other way is not for them
    (:mod:`~kvbm.transfer.packed_stores`).
    """

    def __init__(self, layout: BlockLayout, slab: Slab, device: torch.device) -> None:
        self._slab = slab
        segments = layout.segments
        self.segments = len(segments)
        self._table = segment_table(layout, device)
        self._is_packed = layout.tile_values > 0
        self._programs, self._local_programs = _PROGRAMS, _LOCAL_PROGRAMS
        self._launches: list[tuple[int, int, tuple[object, ...]]] = []  # first of equal segments, end, constants
        if self._is_packed:
            self._programs, self._local_programs = _UNPACK_PROGRAMS, LOCAL_UNPACK_PROGRAMS
        self._launcher = Launcher(unpack_pieces, UNPACK_WARPS) if self._is_packed else Launcher(copy_pieces, _WARPS)
        for first, group in equal_segments(layout):
            if self._is_packed:
                constants: tuple[object, ...] = tile_constants(group[0], layout.tile_values)
            else:
                constants = copy_constants(group, slab)
            self._launches.append((first, first + len(group), constants))
        self._zeros = torch.zeros(slab.slot_bytes, dtype=torch.uint8, pin_memory=True)
        pinned = torch.empty(_BUFFERS, 2 * _BATCH, dtype=torch.int64, pin_memory=True)
        copies = torch.empty(_BUFFERS, 2 * _BATCH, dtype=torch.int64, device=device)
        numbers = Launcher(copy_numbers, _NUMBERS_WARPS)
        self._buffers = deque(IndexBuffer(*pair, numbers) for pair in zip(pinned, copies, strict=True))
        # Pieces of each layer that have arrived since the start. The kernel counts them if ``signal`` is set.
        self.arrived = torch.zeros(len(layout.layers), dtype=torch.int32, device=device)

    def to_device(self, slots: Numbers, blocks: Numbers, first: int = 0, signal: bool = False) -> None:
        """Copy slots to blocks, from segment ``first`` on."""
        self._copy(slots, blocks, True, first=first, signal=signal)

    def to_host(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy blocks to slots."""
        self._copy(slots, blocks, False)

    def upload(self, blocks: Numbers) -> list[IndexBuffer]:
        """Copy row and block numbers to the device, for calls of :meth:`from_rows` until :meth:`release`."""
        parts = [blocks[i : i + _BATCH] for i in range(0, len(blocks), _BATCH)]
        return [self._upload(np.arange(len(part)), part) for part in parts]

    def from_rows(
        self, buffers: list[IndexBuffer], start: int, end: int, address: int, row: int, first: int, last: int,
        signal: bool, gently: bool = False,
    ) -> None:  # fmt: skip
        """Copy segments ``first`` to ``last`` of uploaded blocks ``start`` to ``end`` from rows of ``row`` bytes on the
        device. ``address`` is the address that segment 0 of the first row would have. ``gently``: leave room on the
        GPU to others."""
        programs = _LOCAL_PROGRAMS if gently else self._local_programs
        self._rows(buffers, start, end, (address, row), (first, last), True, signal, programs)

    def to_rows(self, buffers: list[IndexBuffer], start: int, end: int, address: int, row: int) -> None:
        """Copy all segments of uploaded blocks ``start`` to ``end`` to rows of ``row`` bytes on the device."""
        self._rows(buffers, start, end, (address, row), (0, self.segments), False, False, _LOCAL_PROGRAMS)

    def _rows(
        self, buffers: list[IndexBuffer], start: int, end: int, rows: tuple[int, int], segments: tuple[int, int],
        to_device: bool, signal: bool, programs: int,
    ) -> None:  # fmt: skip
        while start < end:
            buffer, at = buffers[start // _BATCH], start % _BATCH
            count = min(end - start, buffer.count - at)
            self._launch(buffer, buffer.count + at, count, rows, segments, to_device, signal, programs)
            rows, start = (rows[0] + count * rows[1], rows[1]), start + count

    def release(self, buffers: list[IndexBuffer]) -> None:
        for buffer in buffers:
            buffer.release()

    def zero(self, blocks: Sequence[int]) -> None:
        self._copy([0] * len(blocks), blocks, True, host=(self._zeros.data_ptr(), 0))

    def _copy(
        self,
        slots: Numbers,
        blocks: Numbers,
        to_device: bool,
        first: int = 0,
        signal: bool = False,
        host: tuple[int, int] | None = None,  # another slab: address, bytes a slot
    ) -> None:
        host = host or (self._slab.address, self._slab.slot_bytes)
        for i in range(0, len(slots), _BATCH):
            buffer = self._upload(slots[i : i + _BATCH], blocks[i : i + _BATCH])
            segments = (first, self.segments)
            self._launch(buffer, buffer.count, buffer.count, host, segments, to_device, signal, self._programs)
            buffer.release()

    def _launch(
        self, buffer: IndexBuffer, blocks_at: int, count: int, host: tuple[int, int], segments: tuple[int, int],
        to_device: bool, signal: bool, programs: int,
    ) -> None:  # fmt: skip
        if self._is_packed and not to_device:
            raise ValueError("packed blocks cannot be copied as they are")
        direction = () if self._is_packed else (to_device,)
        for first, last, constants in self._launches:
            begin, end = max(segments[0], first), min(segments[1], last)
            if begin < end:
                self._launcher.start(
                    min(programs, (end - begin) * count),
                    (self._table, buffer.device, self.arrived),
                    (0, blocks_at, *host, begin, end - begin, count),
                    (*constants, *direction, signal),
                )

    def _upload(self, slots: Numbers, blocks: Numbers) -> IndexBuffer:
        buffer = self._buffers[0]
        self._buffers.rotate(-1)
        buffer.fill(slots, blocks)
        return buffer


def segment_table(layout: BlockLayout, device: torch.device) -> torch.Tensor:
    """The segments as a kernel needs them."""
    rows = [(s.address, s.stride, s.offset, s.layer) for s in layout.segments]
    return torch.tensor(rows, dtype=torch.int64, device=device)


def equal_segments(layout: BlockLayout) -> Iterator[tuple[int, list[Segment]]]:
    """(first of them, consecutive segments of equal size), which one kernel launch can move."""
    first = 0
    for _, group in groupby(layout.segments, key=lambda segment: segment.size):
        segments = list(group)
        yield first, segments
        first += len(segments)


def copy_constants(segments: Sequence[Segment], slab: Slab) -> tuple[object, ...]:
    """Of the copy kernel for equal segments: the word, words of a piece, and words that are moved at a time."""
    size = segments[0].size
    numbers = [n for s in segments for n in (s.address, s.stride, s.offset)]
    word_bytes, word = word_of(size, slab.slot_bytes, slab.address, *numbers)
    return word, size // word_bytes, tile_of(size // word_bytes, _TILE_BYTES // word_bytes)


def tile_constants(segment: Segment, tile_values: int) -> tuple[int, int, int, int]:
    """Of a kernel that packs or unpacks: tiles of a piece, values of a tile, its packed bytes and their alignment."""
    tile = Tile(tile_values)
    return segment.size // tile.raw_size, tile.values, tile.size, min(16, tile.size & -tile.size)


class IndexBuffer:
    """Slot and block numbers of one transfer, in pinned memory and on the device. Allocated once and reused."""

    def __init__(self, pinned: torch.Tensor, device: torch.Tensor, copy_numbers: Launcher) -> None:
        self.device = device
        self._copy_numbers = copy_numbers
        self.count = 0
        self._pinned = pinned
        self._array = pinned.numpy()
        self._free = torch.cuda.Event()

    def fill(self, slots: Numbers, blocks: Numbers) -> None:
        # The last transfer in this buffer was _BUFFERS transfers ago. If it is still running, too much is in flight and
        # waiting is right. The leader's limit on pending blocks prevents that.
        self._free.synchronize()
        count = self.count = len(slots)
        self._array[:count] = slots
        self._array[count : 2 * count] = blocks
        programs = -(-2 * count // _NUMBERS)
        self._copy_numbers.start(programs, (self.device,), (self._pinned.data_ptr(), 2 * count), (_NUMBERS,))

    def release(self) -> None:
        self._free.record()


class EventTicket(Ticket):
    """A transfer that ends with an event on a stream."""

    def __init__(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        self._began = began
        self._ended = ended
        self.unasked: set[int] = set()  # layers of a load for which attention has not called wait_layer
        self._over = False

    def done(self) -> bool:
        self._over = self._over or self._ended.query()
        return self._over

    def wait(self) -> None:
        self._ended.synchronize()

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Make work that is submitted to the stream after this call wait for the transfer."""
        stream.wait_event(self._ended)

    @property
    def seconds(self) -> float:
        return float(self._began.elapsed_time(self._ended)) / 1e3


def mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Record an event with a timestamp on the stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event
