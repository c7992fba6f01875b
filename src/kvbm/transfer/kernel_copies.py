"""Copies by kernel: any number of scattered pieces in one launch, on the current stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch

from kvbm.tiers.host.slab import HostSlab
from kvbm.transfer.kernels import Launcher, copy_numbers, copy_pieces, tile_of, word_of
from kvbm.transfer.layout import BlockLayout, Segment

# Found with benchmarks/gpu/copies.py: over the bus four programs of this shape reach all there is and more gain
# nothing; within the device's own memory more of them do.
_PROGRAMS = 4
_LOCAL_PROGRAMS = 64
_WARPS = 16
_TILE_BYTES = 64 << 10
_BATCH = 8192  # blocks of one launch; a longer transfer takes several
_NUMBERS = 1024  # of these, that one program brings
_NUMBERS_WARPS = 4
_BUFFERS = 128  # transfers that may be on their way before the next one has to wait: 16 MiB here and there


Numbers = Sequence[int] | np.ndarray


class KernelCopies:
    """Moves blocks between the engine's cache and the slab, or rows on the device. One thread at a time."""

    def __init__(self, layout: BlockLayout, slab: HostSlab, device: torch.device) -> None:
        self._slab = slab
        segments = layout.segments
        self.segments = len(segments)
        rows = [(s.address, s.stride, s.offset, s.layer) for s in segments]
        self._table = torch.tensor(rows, dtype=torch.int64, device=device)
        self._copy_pieces = Launcher(copy_pieces, _WARPS)
        self._launches: list[_Launch] = []
        first = 0
        for _, group in groupby(segments, key=lambda segment: segment.size):
            self._launches.append(_Launch(list(group), first, slab.slot_bytes, slab.address))
            first += self._launches[-1].segments
        self._zeros = torch.zeros(slab.slot_bytes, dtype=torch.uint8, pin_memory=True)
        pinned = torch.empty(_BUFFERS, 2 * _BATCH, dtype=torch.int64, pin_memory=True)
        copies = torch.empty(_BUFFERS, 2 * _BATCH, dtype=torch.int64, device=device)
        numbers = Launcher(copy_numbers, _NUMBERS_WARPS)
        self._buffers = deque(_IndexBuffer(*pair, numbers) for pair in zip(pinned, copies, strict=True))
        # How many pieces of each layer have ever arrived, counted by the kernel where it is told to.
        self.arrived = torch.zeros(len(layout.layers), dtype=torch.int32, device=device)

    def to_device(self, slots: Numbers, blocks: Numbers, first: int = 0, signal: bool = False) -> None:
        """Slots to blocks, from segment ``first`` on."""
        self._copy(slots, blocks, True, first=first, signal=signal)

    def to_host(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Blocks to slots."""
        self._copy(slots, blocks, False)

    def upload(self, blocks: Numbers) -> list[_IndexBuffer]:
        """Put row numbers and blocks on the device for any number of :meth:`from_rows`; :meth:`release` ends it."""
        parts = [blocks[i : i + _BATCH] for i in range(0, len(blocks), _BATCH)]
        return [self._upload(np.arange(len(part)), part) for part in parts]

    def from_rows(
        self, buffers: list[_IndexBuffer], start: int, end: int, address: int, row: int, first: int, last: int,
        signal: bool,
    ) -> None:  # fmt: skip
        """Segments ``first`` to ``last`` of uploaded blocks ``start`` to ``end``, from rows of ``row`` bytes on the
        device. ``address`` is where the first slot would begin, were the whole of it there."""
        self._rows(buffers, start, end, (address, row), (first, last), True, signal)

    def to_rows(self, buffers: list[_IndexBuffer], start: int, end: int, address: int, row: int) -> None:
        """Uploaded blocks ``start`` to ``end``, whole, to rows of ``row`` bytes on the device."""
        self._rows(buffers, start, end, (address, row), (0, self.segments), False, False)

    def _rows(
        self, buffers: list[_IndexBuffer], start: int, end: int, rows: tuple[int, int], segments: tuple[int, int],
        to_device: bool, signal: bool,
    ) -> None:  # fmt: skip
        while start < end:
            buffer, at = buffers[start // _BATCH], start % _BATCH
            count = min(end - start, buffer.count - at)
            self._launch(buffer, 0, buffer.count + at, count, rows, *segments, to_device, signal, _LOCAL_PROGRAMS)
            rows, start = (rows[0] + count * rows[1], rows[1]), start + count

    def release(self, buffers: list[_IndexBuffer]) -> None:
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
            self._launch(
                buffer, 0, buffer.count, buffer.count, host, first, self.segments, to_device, signal, _PROGRAMS
            )
            buffer.release()

    def _launch(
        self,
        buffer: _IndexBuffer,
        slots_at: int,
        blocks_at: int,
        count: int,
        host: tuple[int, int],
        first: int,
        last: int,
        to_device: bool,
        signal: bool,
        programs: int,
    ) -> None:
        for launch in self._launches:
            begin, end = max(first, launch.first), min(last, launch.first + launch.segments)
            if begin < end:
                self._copy_pieces.start(
                    min(programs, (end - begin) * count),
                    (self._table, buffer.device, self.arrived),
                    (slots_at, blocks_at, *host, begin, end - begin, count),
                    (launch.word, launch.words, launch.tile, to_device, signal),
                )

    def _upload(self, slots: Numbers, blocks: Numbers) -> _IndexBuffer:
        buffer = self._buffers[0]
        self._buffers.rotate(-1)
        buffer.fill(slots, blocks)
        return buffer


class _Launch:
    """Consecutive segments of equal size: what one kernel launch can move."""

    def __init__(self, segments: Sequence[Segment], first: int, slot_bytes: int, host: int) -> None:
        self.first = first
        self.segments = len(segments)
        size = segments[0].size
        numbers = [n for s in segments for n in (s.address, s.stride, s.offset)]
        word_bytes, self.word = word_of(size, slot_bytes, host, *numbers)
        self.words = size // word_bytes
        self.tile = tile_of(self.words, _TILE_BYTES // word_bytes)


class _IndexBuffer:
    """Slots and blocks of one transfer on their way to the device: memory made once, used again and again."""

    def __init__(self, pinned: torch.Tensor, device: torch.Tensor, copy_numbers: Launcher) -> None:
        self.device = device
        self._copy_numbers = copy_numbers
        self.count = 0
        self._pinned = pinned
        self._array = pinned.numpy()
        self._free = torch.cuda.Event()

    def fill(self, slots: Numbers, blocks: Numbers) -> None:
        # The transfer that had this buffer last was _BUFFERS transfers ago. Should it still be running, far too much is
        # under way, and waiting is right: the leader's limit on pending blocks is what prevents it.
        self._free.synchronize()
        count = self.count = len(slots)
        self._array[:count] = slots
        self._array[count : 2 * count] = blocks
        programs = -(-2 * count // _NUMBERS)
        self._copy_numbers.start(programs, (self.device,), (self._pinned.data_ptr(), 2 * count), (_NUMBERS,))

    def release(self) -> None:
        self._free.record()


def mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event, recorded now, that knows its time."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event
