"""The copier for engines whose cache lies on a CUDA device.

Two streams of our own, one for loads, one of low priority for stores; events order them against the engine's stream and
nothing ever makes the CPU wait for the GPU. Everything the hot path needs (index buffers, events, compiled kernels) is
made at start.

A load for the step that is about to run is one kernel that works through the layers in order and counts, for each, the
pieces that have arrived; just before a layer's attention the engine's stream is made to wait for that layer's count. So
the copy of layer *i+1* runs under the computation of layer *i*, and a prompt costs the longer of the two instead of
their sum.
"""

from __future__ import annotations

import ctypes
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from kvbm.storage.host import HostSlab
from kvbm.storage.layout import BlockLayout, Segment
from kvbm.transfer.base import Copier, Ticket, When
from kvbm.transfer.kernels import copy_pieces, tile_of, word_of

logger = logging.getLogger("kvbm")

# Found with benchmarks/gpu/copies.py: four programs of this shape fill the bus, more gain nothing, two do not.
_PROGRAMS = 4
_WARPS = 16
_TILE_BYTES = 64 << 10
_BATCH = 8192  # blocks of one launch; a longer transfer takes several
_BUFFERS = 32  # index buffers; when all are in use the next transfer waits for the oldest on the GPU, not here


class EventTicket(Ticket):
    def __init__(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        self._began = began
        self.ended = ended
        self.unasked: set[int] = set()  # layers of a load that attention has not asked for yet
        self._over = False

    def done(self) -> bool:
        self._over = self._over or self.ended.query()
        return self._over

    def wait(self) -> None:
        self.ended.synchronize()

    @property
    def seconds(self) -> float:
        return float(self._began.elapsed_time(self.ended)) / 1e3


class _Launch:
    """Consecutive segments of equal size: what one kernel launch can move."""

    def __init__(self, segments: Sequence[Segment], first: int, slot_bytes: int, host: int) -> None:
        self.first = first
        self.segments = len(segments)
        size = segments[0].size
        numbers = [n for s in segments for n in (s.address, s.stride, s.offset)]
        self.word_bytes, self.word = word_of(size, slot_bytes, host, *numbers)
        self.words = size // self.word_bytes
        self.tile = tile_of(self.words, _TILE_BYTES // self.word_bytes)


class CudaCopier(Copier):
    name = "triton"

    def __init__(self, layout: BlockLayout, slab: HostSlab, device: torch.device, staging: int = 0) -> None:
        slab.pin(_cuda_pin, _cuda_unpin)
        self._layout = layout
        self._slab = slab
        self._device = device
        self._layer_index = {name: i for i, name in enumerate(layout.layers)}
        with torch.cuda.device(device):
            low, high = torch.cuda.Stream.priority_range()
            self._load_stream = torch.cuda.Stream(device, priority=high)
            self._store_stream = torch.cuda.Stream(device, priority=low)
            table = [[s.address, s.stride, s.offset, s.layer] for s in layout.segments]
            self._table = torch.tensor(table, dtype=torch.int64, device=device)
            self._staging = _staging(staging, device)
            if self._staging is not None:
                # The same segments, but in a slab of our own on the device.
                near = [[self._staging.data_ptr() + s.offset, 0, s.offset, s.layer] for s in layout.segments]
                self._near_table = torch.tensor(near, dtype=torch.int64, device=device)
            self._launches = self._group()
            self._arrived = torch.zeros(len(layout.layers), dtype=torch.int32, device=device)
            self._buffers = deque(_IndexBuffer(device) for _ in range(_BUFFERS))
            self._engine_stream = torch.cuda.current_stream(device)
            self._step_began = torch.cuda.Event()
            self._forward_ended = torch.cuda.Event()
            torch.cuda.current_stream().synchronize()
        self._expected = [0] * len(layout.layers)  # pieces of each layer that loads by layer have ever asked for
        self._near: _Near | None = None  # what has been prefetched
        self._open: list[EventTicket] = []  # loads by layer whose forward pass has not been submitted yet
        self._warm_up()

    def _group(self) -> list[_Launch]:
        launches: list[_Launch] = []
        first = 0
        for _, group in groupby(self._layout.segments, key=lambda segment: segment.size):
            segments = list(group)
            launches.append(_Launch(segments, first, self._slab.slot_bytes, self._slab.address))
            first += len(segments)
        return launches

    # -- the contract -------------------------------------------------------------------------------------------------

    def begin_step(self, tickets: Iterable[Ticket]) -> None:
        stream = self._engine_stream = torch.cuda.current_stream(self._device)
        for ticket in tickets:
            assert isinstance(ticket, EventTicket)
            stream.wait_event(ticket.ended)
        self._step_began.record(stream)

    def begin_load(self) -> None:
        # Not the current stream: between steps the engine may be on another one than the one it computes on.
        self._step_began.record(self._engine_stream)

    def load(self, slots: Sequence[int], blocks: Sequence[int], after: Iterable[Ticket], when: When) -> Ticket:
        stream = self._load_stream
        # Steps the engine submitted earlier may still be using the blocks; the one that begins now does not.
        stream.wait_event(self._step_began)
        for ticket in after:
            assert isinstance(ticket, EventTicket)
            stream.wait_event(ticket.ended)
        by_layer = when is When.BY_LAYER
        near, self._near = self._near, None
        with torch.cuda.stream(stream):
            began = _mark(stream)
            buffers = self._upload(slots, blocks)
            done = 0
            if by_layer and near is not None and near.slots == slots:
                done = near.segments
                here = self._upload(range(len(slots)), blocks)
                self._launch(here, True, signal=True, last=done, host=self._staging.data_ptr(), slot_bytes=near.row)
                self._release(here)
            self._launch(buffers, to_device=True, signal=by_layer, first=done)
            self._release(buffers)
            ended = _mark(stream)
        ticket = EventTicket(began, ended)
        if by_layer:
            for segment in self._layout.segments:
                self._expected[segment.layer] += len(blocks)
            ticket.unasked = set(range(len(self._expected)))
            self._open.append(ticket)
        elif when is When.NOW:
            self._engine_stream.wait_event(ended)
        return ticket

    def prefetch(self, slots: Sequence[int]) -> bool:
        if self._staging is None:
            return False
        # As many whole layers as fit; the rest comes when the blocks are there. They are at the front of every slot.
        row, segments = 0, 0
        for segment in self._layout.segments:
            if (segment.offset + segment.size) * len(slots) > self._staging.numel():
                break
            row, segments = segment.offset + segment.size, segments + 1
        if not segments or len(slots) > _BATCH:
            return False
        with torch.cuda.stream(self._load_stream):
            buffers = self._upload(slots, range(len(slots)))
            self._launch(buffers, True, last=segments, table=self._near_table, row=row)
            self._release(buffers)
        self._near = _Near(list(slots), segments, row)
        return True

    def wait_layer(self, layer: str) -> None:
        index = self._layer_index.get(layer)
        if index is None or not self._open:
            return
        # The counts only ever grow, so waiting for the last load's total is waiting for all of them.
        stream = torch.cuda.current_stream(self._device)
        _wait_until(stream, self._arrived.data_ptr() + 4 * index, self._expected[index])
        for ticket in self._open:
            ticket.unasked.discard(index)

    def end_load(self, ticket: Ticket) -> bool:
        assert isinstance(ticket, EventTicket)
        if ticket in self._open:
            self._open.remove(ticket)
        return not ticket.unasked

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> Ticket:
        stream = self._store_stream
        self._forward_ended.record(torch.cuda.current_stream(self._device))
        stream.wait_event(self._forward_ended)
        with torch.cuda.stream(stream):
            began = _mark(stream)
            buffers = self._upload(slots, blocks)
            self._launch(buffers, to_device=False)
            self._release(buffers)
            return EventTicket(began, _mark(stream))

    def scribble(self, blocks: Sequence[int]) -> None:
        zeros = torch.zeros(self._slab.slot_bytes, dtype=torch.uint8, pin_memory=True)
        with torch.cuda.stream(self._load_stream):
            buffers = self._upload([0] * len(blocks), blocks)
            self._launch(buffers, to_device=True, host=zeros.data_ptr(), slot_bytes=0)
            self._release(buffers)
        self._load_stream.synchronize()

    def close(self) -> None:
        self._load_stream.synchronize()
        self._store_stream.synchronize()
        self._slab.close()

    # -- the work -----------------------------------------------------------------------------------------------------

    def _upload(self, slots: Sequence[int], blocks: Sequence[int]) -> list[_IndexBuffer]:
        """Put the indices on the device, on the current stream."""
        filled = []
        for i in range(0, len(slots), _BATCH):
            buffer = self._buffers[0]
            self._buffers.rotate(-1)
            buffer.fill(slots[i : i + _BATCH], blocks[i : i + _BATCH])
            filled.append(buffer)
        return filled

    def _release(self, buffers: list[_IndexBuffer]) -> None:
        for buffer in buffers:
            buffer.release()

    def _launch(
        self, buffers: list[_IndexBuffer], to_device: bool, *, signal: bool = False, first: int = 0, last: int | None = None,
        host: int | None = None, slot_bytes: int | None = None, table: torch.Tensor | None = None, row: int = 0,
    ) -> None:  # fmt: skip
        """Copy the blocks of the buffers, segments ``first`` to ``last``, on the current stream.

        Between the engine's blocks and the slab, unless told of another slab (``host``, ``slot_bytes``) or another place
        on the device (``table``, ``row``).
        """
        last = len(self._layout.segments) if last is None else last
        for launch in self._launches:
            begin, end = max(first, launch.first), min(last, launch.first + launch.segments)
            if begin >= end:
                continue
            for buffer in buffers:
                copy_pieces[(min(_PROGRAMS, (end - begin) * buffer.count),)](
                    self._table if table is None else table, buffer.device, self._slab.address if host is None else host,
                    self._slab.slot_bytes if slot_bytes is None else slot_bytes, row, begin, end - begin, buffer.count,
                    self._arrived, WORD=launch.word, WORDS=launch.words, TILE=launch.tile, TO_DEVICE=to_device,
                    SIGNAL=signal, num_warps=_WARPS,
                )  # fmt: skip

    def _warm_up(self) -> None:
        """Compile every kernel now. Block 0 goes to slot 0 and back: nobody has put anything in either yet."""
        self.begin_step([])
        self.store([0], [0]).wait()
        self.prefetch([0])
        for when in (When.BY_LAYER, When.BY_LAYER, When.NOW):  # what was prefetched, straight, and without counting
            ticket = self.load([0], [0], [], when)
            ticket.wait()
            self.end_load(ticket)
        # Fails here, at start, if this driver cannot make a stream wait for a count.
        _wait_until(self._load_stream, self._arrived.data_ptr(), self._expected[0])
        torch.cuda.synchronize(self._device)


class _Near(NamedTuple):
    """What lies in the staging slab: the first segments of some slots."""

    slots: list[int]
    segments: int
    row: int  # bytes of each slot


class _IndexBuffer:
    """Slots and blocks of one transfer on their way to the device: memory made once, used again and again."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.empty(2 * _BATCH, dtype=torch.int64, device=device)
        self.count = 0
        self._pinned = torch.empty(2 * _BATCH, dtype=torch.int64, pin_memory=True)
        self._array = self._pinned.numpy()
        self._free = torch.cuda.Event()

    def fill(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        # The transfer that had this buffer last was _BUFFERS transfers ago. Should it still be running, then there is far
        # too much under way, and waiting here is right: the leader's limit on pending blocks is what prevents it.
        self._free.synchronize()
        count = self.count = len(slots)
        self._array[:count] = slots
        self._array[count : 2 * count] = blocks
        self.device[: 2 * count].copy_(self._pinned[: 2 * count], non_blocking=True)

    def release(self) -> None:
        self._free.record()


def _staging(size: int, device: torch.device) -> torch.Tensor | None:
    """Device memory for prefetching, if there is plenty: the engine's needs come first."""
    free, _ = torch.cuda.mem_get_info(device)
    if not size or free < 4 * size:
        return None
    return torch.empty(size, dtype=torch.uint8, device=device)


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


_driver = ctypes.CDLL("libcuda.so.1")


def _wait_until(stream: torch.cuda.Stream, address: int, count: int) -> None:
    """Hold a stream until the 32-bit counter at ``address`` has reached ``count``, which may wrap around."""
    error = _driver.cuStreamWaitValue32_v2(
        ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(address), ctypes.c_uint32(count & 0xFFFFFFFF), ctypes.c_uint(0)
    )
    if error:
        raise RuntimeError(f"cuStreamWaitValue32 failed with error {error}")


def _cuda_pin(address: int, size: int) -> None:
    error = int(torch.cuda.cudart().cudaHostRegister(address, size, 1))  # 1: portable, usable from every context
    if error:
        raise RuntimeError(
            f"CUDA refused to pin {size / 1e9:.1f} GB of host memory (error {error}); lower DYN_KVBM_CPU_CACHE_GB"
        )


def _cuda_unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
