"""Stores of packed blocks: a kernel packs them into a buffer on the device, and the copy engine takes them to slots.

A packed slot is one piece, so the copy engine gets one copy for each block instead of one for each layer. The kernel
reads device memory and writes device memory: at full width it takes a tenth of a millisecond for a buffer, which is
less of the multiprocessors' time than a few programs take that wait for memory. Packing straight into host memory would
occupy its multiprocessors for as long as the bus takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from kvbm.transfer.base import Slab
from kvbm.transfer.cuda_calls import BatchCopy
from kvbm.transfer.engine_copies import MAX_CALL_BYTES, EngineCopies, IssuedTicket
from kvbm.transfer.kernel_copies import IndexBuffer, equal_segments, segment_table, tile_constants
from kvbm.transfer.kernels import Launcher, copy_numbers
from kvbm.transfer.layout import BlockLayout
from kvbm.transfer.packing_kernels import pack_pieces

BUFFER_BYTES = 64 << 20
PACK_WARPS = 4  # benchmarks/gpu/packing.py
_NUMBERS_WARPS = 4
_INDEX_BUFFERS = 4
_MAX_CALL_SLOTS = 2048  # a call blocks the driver for other threads, 0.8 µs for each slot


class PackedTicket(IssuedTicket):
    """``flags``: not zero for a slot whose block does not fit."""

    def __init__(self, slots: Sequence[int], flags: np.ndarray) -> None:
        super().__init__(len(slots))
        self._slots = np.asarray(slots, np.int64)
        self._flags = flags

    @property
    def unpackable(self) -> Sequence[int]:
        positions: list[int] = np.flatnonzero(self._flags[self._slots]).tolist()
        return positions


class PackedStores(EngineCopies):
    def __init__(self, layout: BlockLayout, slab: Slab, device: torch.device, priority: int, batch: BatchCopy) -> None:
        self._slab = slab
        self._block_bytes = layout.block_bytes
        free, _ = torch.cuda.mem_get_info(device)
        self._rows = max(1, min(BUFFER_BYTES, free // 4) // layout.block_bytes)
        self._buffer = torch.empty(self._rows, layout.block_bytes, dtype=torch.uint8, device=device)
        # A slot belongs to one store at a time, so a number for each slot is enough.
        self._pinned_flags = torch.zeros(slab.slots, dtype=torch.int32, pin_memory=True)
        self._flags = self._pinned_flags.numpy()
        pinned = torch.empty(_INDEX_BUFFERS, 2 * self._rows, dtype=torch.int64, pin_memory=True)
        copies = torch.empty(_INDEX_BUFFERS, 2 * self._rows, dtype=torch.int64, device=device)
        numbers = Launcher(copy_numbers, _NUMBERS_WARPS)
        self._indices = deque(IndexBuffer(*pair, numbers) for pair in zip(pinned, copies, strict=True))
        self._table = segment_table(layout, device)
        self._kernel = Launcher(pack_pieces, PACK_WARPS)
        self._launches = [
            (first, len(group), tile_constants(group[0], layout.tile_values)) for first, group in equal_segments(layout)
        ]
        super().__init__(layout, slab, device, priority, batch)

    def _ticket(self, slots: Sequence[int]) -> IssuedTicket:
        return PackedTicket(slots, self._flags)

    def _issue(self, blocks: np.ndarray, slots: np.ndarray) -> None:
        self._flags[slots] = 0
        for start in range(0, len(blocks), self._rows):
            part = slice(start, start + self._rows)
            with torch.cuda.stream(self._relay.stream):
                self._pack(blocks[part], slots[part])
            self._copy_out(slots[part])

    def _pack(self, blocks: np.ndarray, slots: np.ndarray) -> None:
        """Pack blocks into the rows of the buffer, on the current stream."""
        indices = self._indices[0]
        self._indices.rotate(-1)
        indices.fill(slots, blocks)
        count = len(blocks)
        for first, segments, constants in self._launches:
            self._kernel.start(
                segments * count,
                (self._table, indices.device),
                (0, count, self._buffer.data_ptr(), self._block_bytes, self._pinned_flags.data_ptr(), first, segments,
                 count),
                constants,
            )  # fmt: skip
        indices.release()

    def _copy_out(self, slots: np.ndarray) -> None:
        targets = self._slab.address + slots * self._slab.slot_bytes
        sources = self._buffer.data_ptr() + np.arange(len(slots), dtype=np.int64) * self._block_bytes
        rows = max(1, min(_MAX_CALL_SLOTS, MAX_CALL_BYTES // self._block_bytes))
        for start in range(0, len(slots), rows):
            part = slice(start, start + rows)
            self._batch(targets[part], sources[part], self._block_bytes, self._relay.stream)
            self._relay.hand_over()
