"""The copier for engines whose cache lies on a CUDA device.

Streams of our own, of high priority for loads and of low priority for stores; events order them against the engine's
stream, and nothing ever makes the CPU wait for the GPU. Everything the hot path needs is made at start.

*Loads* are a kernel (:mod:`~kvbm.transfer.kernel_copies`), long ones the copy engine and a kernel
(:mod:`~kvbm.transfer.bulk_loads`) unless there is much to compute meanwhile. For the step that is about to run they
come layer by layer, and the kernel counts, for each layer, the pieces that have arrived; just before a layer's
attention the engine's stream is made to wait for that layer's count. So the copy of layer *i+1* runs under the
computation of layer *i*, and a prompt costs the longer of the two instead of their sum.

*Stores* take the copy engine (:mod:`~kvbm.transfer.engine_copies`) where pieces are large enough for it: it is no
faster, but it leaves every multiprocessor to the forward pass that runs meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

import torch

from kvbm.tiers.host.slab import HostSlab
from kvbm.transfer.base import Copier, Ticket, When, slots_tried
from kvbm.transfer.bulk_loads import BulkLoads, Fetch
from kvbm.transfer.cuda_calls import batch_function, pin, unpin, wait_until
from kvbm.transfer.engine_copies import EngineCopies, IssuedTicket
from kvbm.transfer.kernel_copies import KernelCopies, mark
from kvbm.transfer.layout import BlockLayout

logger = logging.getLogger("kvbm")

# Of the kernel's bandwidth, what the copy engine must reach to be preferred for stores. Hardly any bandwidth is needed
# to keep up with a prefill, so being out of its way counts for more.
_ENGINE_IS_ENOUGH = 0.5

# Up to so many tokens are computed behind the last layers of a load in bulk; with more of them it pays to begin sooner.
_BULK_TOKENS = 512


class EventTicket(Ticket):
    """A transfer whose end is an event on a stream."""

    def __init__(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        self._began = began
        self._ended = ended
        self.unasked: set[int] = set()  # layers of a load that attention has not asked for yet
        self._over = False

    def done(self) -> bool:
        self._over = self._over or self._ended.query()
        return self._over

    def wait(self) -> None:
        self._ended.synchronize()

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Nothing submitted to the stream from now on begins before this is over."""
        stream.wait_event(self._ended)

    @property
    def seconds(self) -> float:
        return float(self._began.elapsed_time(self._ended)) / 1e3


class CudaCopier(Copier):
    def __init__(
        self,
        layout: BlockLayout,
        slab: HostSlab,
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
        self._device = device
        self._layer_index = {name: i for i, name in enumerate(layout.layers)}
        with torch.cuda.device(device):
            low, high = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]
            self._load_stream = torch.cuda.Stream(device, priority=high)
            self._store_stream = torch.cuda.Stream(device, priority=low)
            self._kernel = KernelCopies(layout, slab, device)
            self._engine = EngineCopies.open(layout, slab, device, low) if stores != "kernel" else None
            self._bulk = self._open_bulk(staging)
            self._bulk_blocks = bulk_bytes // layout.block_bytes  # what is gained on shorter loads is lost at their end
            self.portion = self._bulk_blocks
            self._engine_stream = torch.cuda.current_stream(device)
            self._step_began = torch.cuda.Event()
            self._forward_ended = torch.cuda.Event()
            torch.cuda.current_stream().synchronize()
        self._expected = [0] * len(layout.layers)  # pieces of each layer that loads by layer have ever asked for
        self._prefetched: Fetch | None = None
        self._open: list[EventTicket] = []  # loads by layer whose forward pass has not been submitted yet
        self._warm_up()
        if stores == "auto" and self._engine is not None and not self._engine_is_enough():
            self._engine.close()
            self._engine = None
        logger.info(
            "host tier: %.2f GB pinned in %.1f s, copies compiled and measured in %.1f s",
            slab.slots * slab.slot_bytes / 1e9, pinned - began, time.monotonic() - pinned,
        )  # fmt: skip
        self.name = f"kernel loads, {'copy engine' if self._engine is not None else 'kernel'} stores"

    # -- the contract -------------------------------------------------------------------------------------------------

    def begin_step(self, tickets: Iterable[Ticket]) -> None:
        stream = self._engine_stream = torch.cuda.current_stream(self._device)
        _hold(stream, tickets)
        self._step_began.record(stream)

    def begin_load(self) -> None:
        # Not the current stream: between steps the engine may be on another one than the one it computes on.
        self._step_began.record(self._engine_stream)

    def load(
        self, slots: Sequence[int], blocks: Sequence[int], after: Iterable[Ticket], when: When, tokens: int = 0
    ) -> Ticket:
        try:
            if when is not When.BY_LAYER:
                return self._load_whole(slots, blocks, after, when)
            for segment in self._layout.segments:
                self._expected[segment.layer] += len(blocks)
            ticket = self._load_layers(slots, blocks, after, tokens)
        except Exception:
            # The counts must come to what is expected of them, or the next load would wait for ever.
            with torch.cuda.stream(self._load_stream):
                self._kernel.arrived.copy_(torch.tensor(self._expected, dtype=torch.int64).to(torch.int32))
            # And what has been submitted must not come to the blocks after the engine has computed them itself.
            self._engine_stream.wait_event(mark(self._load_stream))
            raise
        ticket.unasked = set(range(len(self._expected)))
        self._open.append(ticket)
        return ticket

    def _load_layers(
        self, slots: Sequence[int], blocks: Sequence[int], after: Iterable[Ticket], tokens: int
    ) -> EventTicket:
        fetched = self._take_prefetched(slots)
        if fetched is None and self._bulk is not None and self._suits_bulk(slots, tokens):
            fetched = self._bulk.begin(slots)
        stream = self._load_stream
        # Steps the engine submitted earlier may still be using the blocks; the one that begins now does not.
        stream.wait_event(self._step_began)
        _hold(stream, after)
        with torch.cuda.stream(stream):
            began = mark(stream)
            if fetched is None or self._bulk is None:
                self._kernel.to_device(slots, blocks, signal=True)
                if self._bulk is not None:
                    self._bulk.come_after_layers()
            else:
                self._bulk.place(fetched, blocks, signal=True)
            return EventTicket(began, mark(stream))

    def _load_whole(self, slots: Sequence[int], blocks: Sequence[int], after: Iterable[Ticket], when: When) -> Ticket:
        fetched = self._take_prefetched(slots)
        if fetched is None and self._bulk is not None and self._suits_bulk(slots, whole=when is When.LATER):
            fetched = self._bulk.begin(slots, whole=True, gently=when is When.LATER)
        if fetched is not None:
            fetched.gently = when is When.LATER  # whoever it was fetched for: others may decode by now
        stream = self._load_stream
        stream.wait_event(self._step_began)
        _hold(stream, after)
        with torch.cuda.stream(stream):
            began = mark(stream)
            if fetched is None or self._bulk is None:
                self._kernel.to_device(slots, blocks)
            else:
                self._bulk.place(fetched, blocks, signal=False)
            ticket = EventTicket(began, mark(stream))
        if when is When.NOW:
            ticket.hold(self._engine_stream)
        return ticket

    def prefetch(self, slots: Sequence[int], tokens: int = 0, whole: bool = False) -> bool:
        if self._bulk is None or self._prefetched is not None or not self._suits_bulk(slots, tokens, whole):
            return False
        self._prefetched = self._bulk.begin(slots, whole, gently=whole)
        return True

    def _take_prefetched(self, slots: Sequence[int]) -> Fetch | None:
        """What was fetched of these slots already. What was fetched of others is not wanted now."""
        if self._prefetched is not None and self._prefetched.slots != slots:
            self.end_prefetch()
        fetched, self._prefetched = self._prefetched, None
        return fetched

    def _suits_bulk(self, slots: Sequence[int], tokens: int = 0, whole: bool = False) -> bool:
        """Half as much is enough where nobody waits for it in the step: so much has every part of a longer load."""
        least = self._bulk_blocks // 2 if whole else self._bulk_blocks
        return len(slots) >= least and tokens <= _BULK_TOKENS

    def end_prefetch(self) -> None:
        self._prefetched = None

    def wait_layer(self, layer: str) -> None:
        index = self._layer_index.get(layer)
        if index is None or not self._open:
            return
        # The counts only ever grow, so waiting for the last load's total is waiting for all of them.
        stream = torch.cuda.current_stream(self._device)
        wait_until(stream, self._kernel.arrived.data_ptr() + 4 * index, self._expected[index])
        for ticket in self._open:
            ticket.unasked.discard(index)

    def end_load(self, ticket: Ticket) -> bool:
        assert isinstance(ticket, EventTicket)
        if ticket in self._open:
            self._open.remove(ticket)
        return not ticket.unasked

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> Ticket:
        engine = torch.cuda.current_stream(self._device)
        if self._engine is not None:
            return self._engine.store(blocks, slots, engine)
        return self._store_by_kernel(blocks, slots, engine)

    def _store_by_kernel(self, blocks: Sequence[int], slots: Sequence[int], engine: torch.cuda.Stream) -> Ticket:
        stream = self._store_stream
        self._forward_ended.record(engine)
        stream.wait_event(self._forward_ended)
        with torch.cuda.stream(stream):
            began = mark(stream)
            self._kernel.to_host(slots, blocks)
            return EventTicket(began, mark(stream))

    def scribble(self, blocks: Sequence[int]) -> None:
        with torch.cuda.stream(self._load_stream):
            self._kernel.zero(blocks)
        self._load_stream.synchronize()

    def close(self) -> None:
        self.end_prefetch()
        if self._engine is not None:
            self._engine.close()
        if self._bulk is not None:
            self._bulk.wait()
        self._load_stream.synchronize()
        self._store_stream.synchronize()
        self._slab.close()

    # -- for whoever passes blocks on to other ranks ------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def kernel(self) -> KernelCopies:
        return self._kernel

    @property
    def load_stream(self) -> torch.cuda.Stream:
        return self._load_stream

    @property
    def engine_stream(self) -> torch.cuda.Stream:
        return self._engine_stream

    def hold_loads(self) -> None:
        """Loads wait for what the engine had submitted when its step began, which may still be using the blocks."""
        self._load_stream.wait_event(self._step_began)

    def _open_bulk(self, size: int) -> BulkLoads | None:
        """None without memory to spare on the device, or without a copy engine worth using."""
        batch = batch_function()
        free, _ = torch.cuda.mem_get_info(self._device)
        size = min(size, free // 4)
        if not size or batch is None:
            return None
        memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        bulk = BulkLoads(self._layout, self._slab, self._device, self._load_stream, self._kernel, memory, batch)
        return bulk if bulk.can_take() else None

    # -- start --------------------------------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        """Compile every kernel now. Block 0 goes to slot 0 and back: nobody has put anything into either yet, or who
        has will put it there again (:func:`~kvbm.transfer.base.slots_tried`)."""
        self.begin_step([])
        self._store_by_kernel([0], [0], self._engine_stream).wait()
        if self._engine is not None:
            self._engine.store([0], [0], self._engine_stream).wait()
        bulk, wanted = self._bulk, self._bulk_blocks
        self._bulk_blocks = 1
        for self._bulk in (bulk, None):
            for when in When:
                ticket = self.load([0], [0], [], when)
                ticket.wait()
                self.end_load(ticket)
        self._bulk, self._bulk_blocks = bulk, wanted
        # Fails here, at start, if this driver cannot make a stream wait for a count.
        wait_until(self._load_stream, self._kernel.arrived.data_ptr(), self._expected[0])
        torch.cuda.synchronize(self._device)

    def _engine_is_enough(self) -> bool:
        """Store some blocks both ways and compare."""
        assert self._engine is not None
        count = slots_tried(self._layout.block_bytes, self._layout.num_blocks, self._slab.slots)
        blocks = list(range(count))
        rates = []
        for store in (self._store_by_kernel, self._engine.store):
            store(blocks, blocks, self._engine_stream).wait()
            began = time.perf_counter()
            store(blocks, blocks, self._engine_stream).wait()
            rates.append(count * self._layout.block_bytes / (time.perf_counter() - began))
        logger.info("stores reach %.1f GB/s by kernel, %.1f GB/s by copy engine", rates[0] / 1e9, rates[1] / 1e9)
        return rates[1] >= _ENGINE_IS_ENOUGH * rates[0]


def _hold(stream: torch.cuda.Stream, tickets: Iterable[Ticket]) -> None:
    for ticket in tickets:
        assert isinstance(ticket, EventTicket | IssuedTicket)
        ticket.hold(stream)
