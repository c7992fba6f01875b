"""Long loads by layer: the copy engine fetches, a kernel puts into place.

A kernel that reads pinned memory asks for 128 bytes at a time and gets 51 GB/s out of a bus that carries 55. The copy
engine gets 54, but wants large pieces and costs the CPU 0.8 µs for each. A slot keeps its layers side by side, so a
*group* of layers is one contiguous piece of it: the copy engine fetches those into a small ring of buffers on the
device, and a kernel scatters each buffer to the engine's blocks at the speed of device memory, counting layers as it
goes.

::

    slots (host)          ring (device)           blocks (device)
    [..|layers 6-11|..]  ->  buffer 0  ->  layer 6, 7, ... of blocks 0-324
    [..|layers 6-11|..]  ->  buffer 1  ->  layer 6, 7, ... of blocks 325-649

A thread of its own issues it all. It can begin before the engine has made room for the blocks (*prefetch*): the ring is
filled, and what is in it is scattered once the blocks are known.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from kvbm.observe.nvtx import annotate
from kvbm.storage.host import HostSlab
from kvbm.storage.layout import SLOT_ALIGNMENT, BlockLayout
from kvbm.transfer.base import Ticket
from kvbm.transfer.kernel_copies import KernelCopies, mark

logger = logging.getLogger("kvbm")

_BUFFERS = 3  # one being filled, one full, one being emptied
_PATIENCE = 10.0  # seconds; issuing a load takes milliseconds


class _Group(NamedTuple):
    """Consecutive layers that are fetched together."""

    first: int  # segment
    last: int
    offset: int  # in a slot
    size: int


class BulkTicket(Ticket):
    """A load that the thread works on. ``blocks`` come at once or, after a prefetch, later."""

    def __init__(self, slots: list[int], groups: int) -> None:
        self.slots = slots
        self.unasked: set[int] = set()
        self.expected: list[int] = []  # of each layer: the count that says it is there
        self.issued = [threading.Event() for _ in range(groups)]
        self.given = threading.Event()  # blocks and conditions are known, or it is cancelled
        self.blocks: list[int] | None = None
        self.conditions: list[torch.cuda.Event] = []
        self.began: torch.cuda.Event | None = None
        self.ended: torch.cuda.Event | None = None
        self.error: BaseException | None = None
        self._over = False

    def give(self, blocks: Sequence[int] | None, conditions: list[torch.cuda.Event]) -> None:
        self.blocks = None if blocks is None else list(blocks)
        self.conditions = conditions
        self.given.set()

    def done(self) -> bool:
        self._over = self._over or (self.issued[-1].is_set() and self.ended is not None and self.ended.query())
        return self._over

    def wait(self) -> None:
        self.issued[-1].wait()
        assert self.ended is not None
        self.ended.synchronize()

    def hold(self, stream: torch.cuda.Stream) -> None:
        self.issued[-1].wait()
        assert self.ended is not None
        stream.wait_event(self.ended)

    @property
    def bad(self) -> Sequence[int]:
        return range(len(self.slots)) if self.error is not None else ()

    @property
    def reason(self) -> str:
        return "" if self.error is None else f"{type(self.error).__name__}: {self.error}"

    @property
    def seconds(self) -> float:
        if self.began is None or self.ended is None:
            return 0.0
        return float(self.began.elapsed_time(self.ended)) / 1e3


class BulkLoads:
    def __init__(
        self, layout: BlockLayout, slab: HostSlab, device: torch.device, stream: torch.cuda.Stream,
        arrived: torch.Tensor, memory: torch.Tensor, batch: Any,
    ) -> None:  # fmt: skip
        self._slab = slab
        self._device = device
        self._batch = batch
        self._stream = stream
        self._fetch_stream = torch.cuda.Stream(device, priority=stream.priority)
        self._kernel = KernelCopies(layout, slab, device, arrived)
        self._groups = _groups(layout)
        self._group_of = {
            segment.layer: index
            for index, group in enumerate(self._groups)
            for segment in layout.segments[group.first : group.last]
        }
        self._buffer_bytes = memory.numel() // _BUFFERS // SLOT_ALIGNMENT * SLOT_ALIGNMENT  # as aligned as slots are
        self._buffers = [memory.data_ptr() + i * self._buffer_bytes for i in range(_BUFFERS)]
        self._fetched = [torch.cuda.Event() for _ in range(_BUFFERS)]
        self._emptied = [torch.cuda.Event() for _ in range(_BUFFERS)]
        self._next = 0
        self._jobs: queue.SimpleQueue[BulkTicket | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvbm-load", daemon=True)
        self._thread.start()

    def can_take(self) -> bool:
        """Whether a block of the largest group fits a buffer at all."""
        return max(group.size for group in self._groups) <= self._buffer_bytes

    def begin(self, slots: Sequence[int]) -> BulkTicket:
        """Start to fetch; :meth:`BulkTicket.give` tells where to, or that it is not wanted after all."""
        ticket = BulkTicket(list(slots), len(self._groups))
        self._jobs.put(ticket)
        return ticket

    def await_issue(self, ticket: BulkTicket, layer: int) -> None:
        """Return when the kernels that bring a layer have been submitted, so that a stream may wait for their count.

        A stream that waits for what is not submitted yet could, with all hardware queues in use, stand in its way.
        """
        if not ticket.issued[self._group_of[layer]].wait(_PATIENCE):
            raise TimeoutError(f"a load was not issued within {_PATIENCE:.0f} s")

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        torch.cuda.set_device(self._device)
        while (ticket := self._jobs.get()) is not None:
            try:
                with annotate("copier.fetch"):
                    self._work(ticket)
            except Exception as error:
                ticket.error = error
                self._release(ticket)

    def _work(self, ticket: BulkTicket) -> None:
        hosts = self._slab.address + np.asarray(ticket.slots, np.int64) * self._slab.slot_bytes
        units = self._units(len(hosts))
        fetched = 0
        while fetched < min(_BUFFERS, len(units)) and not ticket.given.is_set():
            self._fetch(hosts, units[fetched], self._next + fetched)
            fetched += 1
        ticket.given.wait()
        if ticket.blocks is None:
            return
        for condition in ticket.conditions:
            self._stream.wait_event(condition)
        ticket.began = mark(self._stream)
        with torch.cuda.stream(self._stream):
            indices = self._kernel.upload(ticket.blocks)
            for i, (index, start, end) in enumerate(units):
                while fetched < min(i + _BUFFERS, len(units)):
                    self._fetch(hosts, units[fetched], self._next + fetched)
                    fetched += 1
                group, buffer = self._groups[index], (self._next + i) % _BUFFERS
                self._stream.wait_event(self._fetched[buffer])
                address = self._buffers[buffer] - group.offset
                self._kernel.from_rows(indices, start, end, address, group.size, group.first, group.last)
                self._emptied[buffer].record(self._stream)
                if end == len(hosts) and index + 1 < len(self._groups):
                    ticket.issued[index].set()
            self._kernel.release(indices)
        self._next += len(units)
        ticket.ended = mark(self._stream)
        ticket.issued[-1].set()

    def _units(self, blocks: int) -> list[tuple[int, int, int]]:
        """(group, first block, last block) of what one buffer takes at a time, in the order of work."""
        units = []
        for index, group in enumerate(self._groups):
            rows = self._buffer_bytes // group.size
            units += [(index, start, min(start + rows, blocks)) for start in range(0, blocks, rows)]
        return units

    def _fetch(self, hosts: np.ndarray, unit: tuple[int, int, int], turn: int) -> None:
        index, start, end = unit
        group, buffer = self._groups[index], turn % _BUFFERS
        self._fetch_stream.wait_event(self._emptied[buffer])
        targets = self._buffers[buffer] + np.arange(end - start, dtype=np.int64) * group.size
        self._batch(targets, hosts[start:end] + group.offset, group.size, self._fetch_stream)
        self._fetched[buffer].record(self._fetch_stream)

    def _release(self, ticket: BulkTicket) -> None:
        """A load has failed half-way: whoever waits for its layers must not wait for ever. They will hear it is bad."""
        logger.error("a load failed: %s", ticket.reason)
        ticket.given.wait()
        if ticket.expected:
            with torch.cuda.stream(self._stream):
                self._kernel.arrived.copy_(torch.tensor(ticket.expected, dtype=torch.int64).to(torch.int32))
        self._stream.wait_stream(self._fetch_stream)
        ticket.ended = mark(self._stream)
        for issued in ticket.issued:
            issued.set()


def _groups(layout: BlockLayout) -> list[_Group]:
    """A sixth of the layers at a time, fewer towards the end: behind what comes last nothing is left to hide."""
    layers = len(layout.layers)
    groups: list[_Group] = []
    segment = 0
    layer = 0
    while layer < layers:
        layer += max(1, min(layers // 6, (layers - layer) // 3))
        last = segment
        while last < len(layout.segments) and layout.segments[last].layer < layer:
            last += 1
        if last > segment:
            first = layout.segments[segment]
            end = layout.segments[last - 1].offset + layout.segments[last - 1].size
            groups.append(_Group(segment, last, first.offset, end - first.offset))
        segment = last
    return groups
