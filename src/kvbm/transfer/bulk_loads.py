"""Long loads with little to compute: the copy engine fetches, a kernel puts into place.

A kernel that reads pinned memory asks for 128 bytes at a time and gets 51 GB/s out of a bus that carries 55. The copy
engine gets 54, but wants large pieces and costs the CPU 0.8 µs for each. A slot keeps its layers side by side, so all
layers but the last few are one piece of it: the copy engine fetches those, slot by slot, into two buffers on the
device, and a kernel scatters each buffer to the engine's blocks at the speed of device memory. The last layers come by
the kernel alone, one after the other, while the engine computes the layers before them::

    slots (host)           buffers (device)        blocks (device)
    [layers 0-31 | 32-35]  ->  buffer 0  ->  layers 0 to 31 of blocks 0-119
    [layers 0-31 | 32-35]  ->  buffer 1  ->  layers 0 to 31 of blocks 120-239
    ...
    [            | 32-35]         ->         layer 32, 33, 34, 35 of all blocks

So the engine begins to compute late. Where it has more to compute than fits behind the last layers, the kernel alone,
which brings layer after layer from the start, is the better way.

It can begin before the engine has made room for the blocks (*prefetch*): the buffers are filled, and what is in them is
scattered once the blocks are known. Everything is submitted to streams from the engine's own thread, 2 ms for a prompt
of 32k tokens: a thread would have to fight the engine for the interpreter, five milliseconds a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvbm.observe.nvtx import annotate
from kvbm.storage.host import HostSlab
from kvbm.storage.layout import SLOT_ALIGNMENT, BlockLayout
from kvbm.transfer.kernel_copies import KernelCopies

_BUFFERS = 2  # one is being filled while the other is being emptied


class Fetch:
    """Slots on their way to the buffers; as far as there are buffers, until their blocks are known."""

    def __init__(self, slots: Sequence[int], addresses: np.ndarray) -> None:
        self.slots = slots
        self.addresses = addresses
        self.begun = 0  # buffers' worth


class BulkLoads:
    """One load at a time, or one load and the prefetch of the next. Called from the engine's thread only."""

    def __init__(
        self, layout: BlockLayout, slab: HostSlab, device: torch.device, stream: torch.cuda.Stream,
        kernel: KernelCopies, memory: torch.Tensor, batch: Any,
    ) -> None:  # fmt: skip
        self._slab = slab
        self._batch = batch
        self._stream = stream
        self._fetch_stream = torch.cuda.Stream(device, priority=stream.priority)
        self._kernel = kernel
        self._split, self._row = front(layout)
        size = memory.numel() // _BUFFERS // SLOT_ALIGNMENT * SLOT_ALIGNMENT  # as aligned as slots are
        self._memory = memory
        self._buffers = [memory.data_ptr() + i * size for i in range(_BUFFERS)]
        self._rows = size // self._row if self._row else 0  # blocks that a buffer takes
        self._fetched = [torch.cuda.Event() for _ in range(_BUFFERS)]
        self._emptied = [torch.cuda.Event() for _ in range(_BUFFERS)]
        self._turn = 0  # the buffer that is filled next
        if self._rows:
            row = np.arange(self._rows, dtype=np.int64) * self._row
            self._targets = [address + row for address in self._buffers]

    def can_take(self) -> bool:
        """Whether there is more than one layer, and a block fits a buffer."""
        return self._rows > 0

    def begin(self, slots: Sequence[int]) -> Fetch:
        """Start to fill the buffers. :meth:`place` or :meth:`drop` must follow before the next one begins."""
        hosts = self._slab.address + np.asarray(slots, np.int64) * self._slab.slot_bytes
        fetch = Fetch(slots, hosts)
        with annotate("copier.fetch"):
            for _ in range(_BUFFERS):
                self._fetch(fetch)
        return fetch

    def place(self, fetch: Fetch, blocks: Sequence[int]) -> None:
        """Put what is fetched, and all the rest, into the engine's blocks; counts layers. On the stream of loads."""
        kernel, stream, first = self._kernel, self._stream, self._turn - fetch.begun
        indices = kernel.upload(blocks)
        for i, start in enumerate(range(0, len(blocks), self._rows)):
            end = min(start + self._rows, len(blocks))
            buffer = (first + i) % _BUFFERS
            stream.wait_event(self._fetched[buffer])
            kernel.from_rows(indices, start, end, self._buffers[buffer], self._row, 0, self._split)
            self._emptied[buffer].record(stream)
            self._fetch(fetch)
        kernel.release(indices)
        kernel.to_device(fetch.slots, blocks, first=self._split, signal=True)

    def drop(self, fetch: Fetch) -> None:
        """What was fetched is not wanted after all."""
        for turn in range(self._turn - fetch.begun, self._turn):
            self._emptied[turn % _BUFFERS].record(self._fetch_stream)

    def _fetch(self, fetch: Fetch) -> None:
        """Fill the next buffer with the next slots, if there are any left."""
        hosts = fetch.addresses[fetch.begun * self._rows : (fetch.begun + 1) * self._rows]
        if not len(hosts):
            return
        buffer = self._turn % _BUFFERS
        self._fetch_stream.wait_event(self._emptied[buffer])
        self._batch(self._targets[buffer][: len(hosts)], hosts, self._row, self._fetch_stream)
        self._fetched[buffer].record(self._fetch_stream)
        self._turn += 1
        fetch.begun += 1


def front(layout: BlockLayout) -> tuple[int, int]:
    """(segments, bytes) of a slot's front: all layers but the last eighth. Nothing where there is only one layer."""
    layers = len(layout.layers)
    split = sum(segment.layer < layers - max(1, layers // 8) for segment in layout.segments)
    return split, layout.segments[split].offset if split else 0
