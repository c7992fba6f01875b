"""Broadcasts of blocks between GPUs, by NCCL.

The engine's thread submits everything to the load stream: the first rank's own load, a kernel that gathers its blocks
into rows, the broadcast, a kernel that scatters the rows on the other ranks. The CPU waits for the other ranks to reach
the same load, which takes microseconds within a step. It never waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from kvbm.transfer.base import Copier, Ticket, When
from kvbm.transfer.broadcast import BroadcastCopier, Passing, Rows
from kvbm.transfer.cpu import Outcome
from kvbm.transfer.cuda import CudaCopier
from kvbm.transfer.kernel_copies import EventTicket, KernelCopies, mark
from kvbm.transfer.layout import BlockLayout


class CudaBroadcastCopier(BroadcastCopier):
    """``cuda`` is the CUDA copier. ``inner`` is the same object, or a wrapper that injects faults."""

    def __init__(self, inner: Copier, cuda: CudaCopier, passing: Passing, layout: BlockLayout) -> None:
        super().__init__(inner, passing.wire, CudaRows(cuda, layout, passing.batch, passing.buffers))
        self._cuda = cuda

    def load(
        self, slots: Sequence[int], blocks: Sequence[int], after: Iterable[Ticket], when: When, tokens: int = 0
    ) -> Ticket:
        stream = self._cuda.load_stream
        self._cuda.hold_loads()
        with torch.cuda.stream(stream):
            began = mark(stream)
            outcome = self._pass_on(self._fetch(slots, blocks, after), blocks)
            ticket = AgreedEvent(began, mark(stream), outcome)
        if when is not When.LATER:
            ticket.hold(self._cuda.engine_stream)
        return ticket


class AgreedEvent(EventTicket):
    """The bad blocks are known at once; the others have arrived when the event is over."""

    bad: Sequence[int] = ()
    reason = ""

    def __init__(self, began: torch.cuda.Event, ended: torch.cuda.Event, outcome: Outcome) -> None:
        super().__init__(began, ended)
        self.bad, self.reason = outcome.bad, outcome.reason


class CudaRows(Rows):
    def __init__(self, cuda: CudaCopier, layout: BlockLayout, batch: int, buffers: int) -> None:
        memory = torch.empty(buffers, batch, layout.slot_bytes, dtype=torch.uint8, device=cuda.device)
        self.buffers = list(memory)
        self._kernel: KernelCopies = cuda.kernel
        self._row = layout.slot_bytes
        self._indices: list[Any] = []

    def begin(self, blocks: Sequence[int]) -> None:
        self._indices = self._kernel.upload(blocks)

    def gather(self, start: int, end: int, buffer: torch.Tensor) -> None:
        self._kernel.to_rows(self._indices, start, end, buffer.data_ptr(), self._row)

    def scatter(self, start: int, end: int, buffer: torch.Tensor) -> None:
        segments = self._kernel.segments
        self._kernel.from_rows(self._indices, start, end, buffer.data_ptr(), self._row, 0, segments, signal=False)

    def end(self) -> None:
        self._kernel.release(self._indices)
