"""Stores by the GPU's copy engine, which takes no multiprocessor from the forward pass.

``cudaMemcpyBatchAsync`` takes 0.8 µs of CPU time for each piece, 15 ms for a step with 8,192 tokens of an 8B model. So
a separate thread calls it, and holds the interpreter only to compute addresses. The engine's thread hands over the
blocks and an event that marks the end of its forward pass, and goes on. After every call the thread lets other streams
use the copy engine, which also copies the engine's tokens to the host.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence

import numpy as np
import torch

from kvbm.tracing import annotate
from kvbm.transfer.base import Slab, Ticket, describe_error
from kvbm.transfer.cuda_calls import BatchCopy, batch_function
from kvbm.transfer.kernel_copies import EventTicket, mark
from kvbm.transfer.layout import BlockLayout
from kvbm.transfer.relay import Relay

logger = logging.getLogger("kvbm")

_MIN_PIECE_BYTES = 16 << 10  # below that the set-up of each copy takes most of the time (benchmarks/gpu/copies.py)
_MAX_CALL_PIECES = 2048  # a call blocks the driver for other threads: this many pieces take 1.6 ms
MAX_CALL_BYTES = 16 << 20  # a call also blocks the copy engine for other streams


class IssuedTicket(Ticket):
    """A transfer that the store thread issues."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._issued = threading.Event()
        self._transfer: EventTicket | None = None
        self._error: BaseException | None = None

    def issued(self, transfer: EventTicket | None, error: BaseException | None) -> None:
        """Wakes every thread that waits for this ticket. ``transfer``: None if CUDA could not even record an event."""
        self._transfer, self._error = transfer, error
        self._issued.set()

    def done(self) -> bool:
        return self._issued.is_set() and (self._transfer is None or self._transfer.done())

    def wait(self) -> None:
        self._issued.wait()
        if self._transfer is not None:
            self._transfer.wait()

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Make work submitted to the stream after this call wait for the transfer. Waits until it has been issued."""
        self._issued.wait()
        if self._transfer is not None:
            self._transfer.hold(stream)

    @property
    def bad(self) -> Sequence[int]:
        return range(self._blocks) if self._error is not None else ()

    @property
    def reason(self) -> str:
        return "" if self._error is None else describe_error(self._error)

    @property
    def seconds(self) -> float:
        return 0.0 if self._transfer is None else self._transfer.seconds


class Pieces:
    """Computes the addresses of all pieces of a store with few numpy calls, for one block or for many."""

    def __init__(self, layout: BlockLayout, slab: Slab) -> None:
        self._slab = slab
        numbers = [(s.address, s.stride, s.offset, s.size) for s in layout.merged()]
        self._addresses, self._strides, self._offsets, self._sizes = np.array(numbers, np.int64).T[:, :, None]

    def of(self, blocks: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(targets in slots, sources in blocks, bytes) of every piece, ordered by segment."""
        slot = self._slab.address + slots * self._slab.slot_bytes
        targets, sources = self._offsets + slot, self._addresses + self._strides * blocks
        return targets.ravel(), sources.ravel(), np.repeat(self._sizes, len(blocks))


class EngineCopies:
    @classmethod
    def open(cls, layout: BlockLayout, slab: Slab, device: torch.device, priority: int) -> EngineCopies | None:
        """None where the copy engine is not worth using: small pieces, or a CUDA without batched copies."""
        if min(segment.size for segment in layout.merged()) < _MIN_PIECE_BYTES:
            return None
        batch = batch_function()
        return None if batch is None else cls(layout, slab, device, priority, batch)

    def __init__(self, layout: BlockLayout, slab: Slab, device: torch.device, priority: int, batch: BatchCopy) -> None:
        self._device = device
        self._relay = Relay(device, priority)
        self._batch = batch
        self._pieces = Pieces(layout, slab)
        # The leader's limit on pending blocks bounds this queue.
        self._jobs: queue.SimpleQueue[tuple[Sequence[int], Sequence[int], torch.cuda.Event, IssuedTicket] | None]
        self._jobs = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvbm-store", daemon=True)
        self._thread.start()

    def store(self, blocks: Sequence[int], slots: Sequence[int], engine: torch.cuda.Stream) -> Ticket:
        """Copy blocks to slots after all work that has been submitted to ``engine`` so far."""
        ticket = self._ticket(slots)
        forward_ended = torch.cuda.Event()
        forward_ended.record(engine)
        self._jobs.put((blocks, slots, forward_ended, ticket))
        return ticket

    def _ticket(self, slots: Sequence[int]) -> IssuedTicket:
        return IssuedTicket(len(slots))

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()
        self._relay.wait()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._carry_out(*job)
            except Exception as error:
                job[-1].issued(None, error)

    def _carry_out(
        self, blocks: Sequence[int], slots: Sequence[int], forward_ended: torch.cuda.Event, ticket: IssuedTicket
    ) -> None:
        torch.cuda.set_device(self._device)
        self._relay.stream.wait_event(forward_ended)
        began = mark(self._relay.stream)
        error: BaseException | None = None
        try:
            with annotate("copier.issue"):
                self._issue(np.asarray(blocks, np.int64), np.asarray(slots, np.int64))
        except Exception as caught:
            error = caught
        ticket.issued(EventTicket(began, mark(self._relay.stream)), error)

    def _issue(self, blocks: np.ndarray, slots: np.ndarray) -> None:
        targets, sources, sizes = self._pieces.of(blocks, slots)
        pieces = max(1, min(_MAX_CALL_PIECES, MAX_CALL_BYTES // int(sizes.max())))
        for i in range(0, len(sizes), pieces):
            part = slice(i, i + pieces)
            self._batch(targets[part], sources[part], sizes[part], self._relay.stream)
            self._relay.hand_over()
