"""The copier for engines with a KV cache on a CUDA device.

Loads have a stream of high priority, stores one of low priority. Events order them against the engine's stream, and the
CPU never waits for the GPU. The constructor allocates everything that the hot path needs.

*Loads* use a kernel (:mod:`~kvbm.transfer.kernel_copies`). Long loads use the copy engine and a kernel
(:mod:`~kvbm.transfer.bulk_loads`), unless the step has many tokens to compute. In the step, a load comes layer by
layer: the kernel counts the pieces of each layer that have arrived, and before a layer's attention the engine's stream
waits for that layer's count. The copy of layer *i+1* runs under the computation of layer *i*, so a prompt takes the
longer of the two times instead of their sum.

*Stores* use the copy engine (:mod:`~kvbm.transfer.engine_copies`) if the pieces are large enough. It is no faster than
the kernel, but leaves every multiprocessor to the forward pass.

*Packed blocks* (:mod:`~kvbm.transfer.packing`) are unpacked by the kernel that writes them to the engine's blocks, and
packed by a kernel before the copy engine stores them (:mod:`~kvbm.transfer.packed_stores`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

import torch

from kvbm.transfer.base import Copier, Slab, Ticket, When, slots_tried
from kvbm.transfer.bulk_loads import BulkLoads, Fetch
from kvbm.transfer.cuda_calls import batch_function, pin, unpin, wait_until
from kvbm.transfer.engine_copies import EngineCopies, IssuedTicket
from kvbm.transfer.kernel_copies import EventTicket, KernelCopies, mark
from kvbm.transfer.layout import BlockLayout
from kvbm.transfer.packed_stores import PackedStores

logger = logging.getLogger("kvbm")

# The copy engine is preferred for stores if it reaches this part of the kernel's bandwidth. Keeping up with a prefill
# takes little bandwidth, so leaving the multiprocessors to the forward pass matters more.
_MIN_ENGINE_RATE = 0.5

# A bulk load delivers its last layers late. With more tokens than this, a load by kernel, which lets the step begin
# sooner, is faster.
_MAX_BULK_TOKENS = 512


class CudaCopier(Copier):
    def __init__(
        self,
        layout: BlockLayout,
        slab: Slab,
        device: torch.device,
        staging: int = 0,
        stores: str = "auto",
        bulk_bytes: int = 512 << 20,
    ) -> None:
        began = time.monotonic()
        slab.pin(pin, unpin)
        pinned = time.monotonic()
        self._layout = layout
        self._slab = slab
        self.device = device
        self._layer_index = {name: i for i, name in enumerate(layout.layers)}
        with torch.cuda.device(device):
            low, high = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]
            self.load_stream = torch.cuda.Stream(device, priority=high)
            self._store_stream = torch.cuda.Stream(device, priority=low)
            self.kernel = KernelCopies(layout, slab, device)
            self._engine = self._open_stores(stores, low)
            self._bulk = self._open_bulk(staging)
            self._bulk_blocks = bulk_bytes // layout.block_bytes  # shorter loads lose the gain in the last scatter
            self.portion = self._bulk_blocks
            self.engine_stream = torch.cuda.current_stream(device)
            self._step_began = torch.cuda.Event()
            self._forward_ended = torch.cuda.Event()
            torch.cuda.current_stream().synchronize()
        self._expected = [0] * len(layout.layers)  # pieces of each layer in all loads by layer so far
        self._prefetched: Fetch | None = None
        self._open: list[EventTicket] = []  # loads by layer before the end of their submission
        self._warm_up()
        is_free_to_choose = stores == "auto" and not layout.tile_values
        if is_free_to_choose and self._engine is not None and not self._engine_is_fast_enough():
            self._engine.close()
            self._engine = None
        logger.info(
            "host tier: %.2f GB pinned in %.1f s, copies compiled and measured in %.1f s",
            slab.slots * slab.slot_bytes / 1e9, pinned - began, time.monotonic() - pinned,
        )  # fmt: skip
        self.name = f"kernel loads, {'copy engine' if self._engine is not None else 'kernel'} stores"
        if layout.tile_values:
            self.name = f"packed, {self.name}"

    # -- the contract -------------------------------------------------------------------------------------------------

    def begin_step(self, tickets: Iterable[Ticket]) -> None:
        stream = self.engine_stream = torch.cuda.current_stream(self.device)
        _hold(stream, tickets)
        self._step_began.record(stream)

    can_hold_steps = True

    def hold_step(self, tickets: Iterable[Ticket]) -> None:
        _hold(torch.cuda.current_stream(self.device), tickets)

    def begin_load(self) -> None:
        # Not the current stream: between steps the engine may have switched to another stream.
        self._step_began.record(self.engine_stream)

    def load(
        self, slots: Sequence[int], blocks: Sequence[int], after: Iterable[Ticket], when: When, tokens: int = 0
    ) -> Ticket:
        try:
            if when is When.BY_LAYER:
                for segment in self._layout.segments:
                    self._expected[segment.layer] += len(blocks)
            ticket = self._submit(slots, blocks, after, when, tokens)
            if when is When.NOW:
                ticket.hold(self.engine_stream)
        except Exception:
            # Set the counts to their expected values, or the next load would wait for ever.
            with torch.cuda.stream(self.load_stream):
                self.kernel.arrived.copy_(torch.tensor(self._expected, dtype=torch.int64).to(torch.int32))
            # Copies that were submitted must not overwrite blocks that the engine computes after this failure.
            self.engine_stream.wait_event(mark(self.load_stream))
            raise
        if when is When.BY_LAYER:
            ticket.unasked = set(range(len(self._expected)))
            self._open.append(ticket)
        return ticket

    def _submit(
        self, slots: Sequence[int], blocks: Sequence[int], after: Iterable[Ticket], when: When, tokens: int
    ) -> EventTicket:
        by_layer, gently = when is When.BY_LAYER, when is When.LATER
        fetched = self._take_prefetched(slots)
        if fetched is None and self._bulk is not None and self._suits_bulk(slots, tokens if by_layer else 0, gently):
            fetched = self._bulk.begin(slots, not by_layer, gently)
        if fetched is not None and not by_layer:
            fetched.gently = gently  # other requests may have begun to decode since the prefetch
        stream = self.load_stream
        # Earlier steps may still use the blocks. The step that begins now waits for the load.
        stream.wait_event(self._step_began)
        _hold(stream, after)
        with torch.cuda.stream(stream):
            began = mark(stream)
            if fetched is not None and self._bulk is not None:
                self._bulk.place(fetched, blocks, signal=by_layer)
            else:
                self.kernel.to_device(slots, blocks, signal=by_layer)
                if by_layer and self._bulk is not None:
                    self._bulk.yield_bus_to_kernel()
            return EventTicket(began, mark(stream))

    def prefetch(self, slots: Sequence[int], tokens: int = 0) -> bool:
        if self._bulk is None or self._prefetched is not None or not self._suits_bulk(slots, tokens):
            return False
        self._prefetched = self._bulk.begin(slots)
        return True

    def _take_prefetched(self, slots: Sequence[int]) -> Fetch | None:
        """The prefetch of exactly these slots. A prefetch of other slots is dropped."""
        if self._prefetched is not None and self._prefetched.slots != slots:
            self.end_prefetch()
        fetched, self._prefetched = self._prefetched, None
        return fetched

    def _suits_bulk(self, slots: Sequence[int], tokens: int = 0, whole: bool = False) -> bool:
        """A whole load needs half as many slots: each part of a longer load outside the step has at least that many."""
        min_slots = self._bulk_blocks // 2 if whole else self._bulk_blocks
        return len(slots) >= min_slots and tokens <= _MAX_BULK_TOKENS

    def end_prefetch(self) -> None:
        self._prefetched = None

    def wait_layer(self, layer: str) -> None:
        index = self._layer_index.get(layer)
        if index is None or not self._open:
            return
        # The counts only grow, so the total of the last load includes all loads before it.
        stream = torch.cuda.current_stream(self.device)
        wait_until(stream, self.kernel.arrived.data_ptr() + 4 * index, self._expected[index])
        for ticket in self._open:
            ticket.unasked.discard(index)

    def end_load(self, ticket: Ticket) -> bool:
        assert isinstance(ticket, EventTicket)
        if ticket in self._open:
            self._open.remove(ticket)
        return not ticket.unasked

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> Ticket:
        engine = torch.cuda.current_stream(self.device)
        if self._engine is not None:
            return self._engine.store(blocks, slots, engine)
        return self._store_by_kernel(blocks, slots, engine)

    def _store_by_kernel(self, blocks: Sequence[int], slots: Sequence[int], engine: torch.cuda.Stream) -> Ticket:
        stream = self._store_stream
        self._forward_ended.record(engine)
        stream.wait_event(self._forward_ended)
        with torch.cuda.stream(stream):
            began = mark(stream)
            self.kernel.to_host(slots, blocks)
            return EventTicket(began, mark(stream))

    def scribble(self, blocks: Sequence[int]) -> None:
        with torch.cuda.stream(self.load_stream):
            self.kernel.zero(blocks)
        self.load_stream.synchronize()

    def close(self) -> None:
        self.end_prefetch()
        if self._engine is not None:
            self._engine.close()
        if self._bulk is not None:
            self._bulk.wait()
        self.load_stream.synchronize()
        self._store_stream.synchronize()
        self._slab.close()

    def hold_loads(self) -> None:
        """For broadcasts: make loads wait for work that the engine submitted before its step began. It may still use
        the blocks."""
        self.load_stream.wait_event(self._step_began)

    def _open_stores(self, stores: str, priority: int) -> EngineCopies | None:
        layout, slab, device = self._layout, self._slab, self.device
        if not layout.tile_values:
            return EngineCopies.open(layout, slab, device, priority) if stores != "kernel" else None
        batch = batch_function()
        if batch is None:
            raise RuntimeError("packed blocks need a CUDA runtime with cudaMemcpyBatchAsync; set KVBM_PACK=off")
        return PackedStores(layout, slab, device, priority, batch)

    def _open_bulk(self, size: int) -> BulkLoads | None:
        """None if the device has no memory to spare, or CUDA has no batched copies."""
        batch = batch_function()
        free, _ = torch.cuda.mem_get_info(self.device)
        size = min(size, free // 4)
        if not size or batch is None:
            return None
        memory = torch.empty(size, dtype=torch.uint8, device=self.device)
        bulk = BulkLoads(self._layout, self._slab, self.device, self.load_stream, self.kernel, memory, batch)
        return bulk if bulk.can_take() else None

    # -- start --------------------------------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        """Compile every kernel by copying block 0 to slot 0 and back. Neither holds data yet; a persistent slab
        restores the slots that the copier overwrites (:func:`~kvbm.transfer.base.slots_tried`)."""
        self.begin_step([])
        if not self._layout.tile_values:
            self._store_by_kernel([0], [0], self.engine_stream).wait()
        if self._engine is not None:
            self._engine.store([0], [0], self.engine_stream).wait()
        bulk, wanted = self._bulk, self._bulk_blocks
        self._bulk_blocks = 1
        for self._bulk in (bulk, None):
            for when in When:
                ticket = self.load([0], [0], [], when)
                ticket.wait()
                self.end_load(ticket)
        self._bulk, self._bulk_blocks = bulk, wanted
        # If this driver cannot make a stream wait for a count, this raises at start.
        wait_until(self.load_stream, self.kernel.arrived.data_ptr(), self._expected[0])
        torch.cuda.synchronize(self.device)

    def _engine_is_fast_enough(self) -> bool:
        """Store some blocks with the kernel and with the copy engine, and compare the rates."""
        assert self._engine is not None
        count = slots_tried(self._layout.block_bytes, self._layout.num_blocks, self._slab.slots)
        blocks = list(range(count))
        rates = []
        for store in (self._store_by_kernel, self._engine.store):
            store(blocks, blocks, self.engine_stream).wait()
            began = time.perf_counter()
            store(blocks, blocks, self.engine_stream).wait()
            rates.append(count * self._layout.block_bytes / (time.perf_counter() - began))
        logger.info("stores reach %.1f GB/s by kernel, %.1f GB/s by copy engine", rates[0] / 1e9, rates[1] / 1e9)
        return rates[1] >= _MIN_ENGINE_RATE * rates[0]


def _hold(stream: torch.cuda.Stream, tickets: Iterable[Ticket]) -> None:
    for ticket in tickets:
        assert isinstance(ticket, EventTicket | IssuedTicket)
        ticket.hold(stream)
