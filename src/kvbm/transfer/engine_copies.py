"""Copies out by the GPU's copy engine: no multiprocessor is taken from the forward pass.

``cudaMemcpyBatchAsync`` costs the CPU 0.8 µs a piece, 15 ms for a step's 8,192 tokens of an 8B model. So it is called
from a thread of its own, which holds the interpreter only to compute addresses. The engine's thread hands over the
blocks and an event that marks the end of its forward pass, and goes on. After every call others have their turn at the
copy engine, which brings out the engine's tokens too.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence

import numpy as np
import torch

from kvbm.tiers.host.slab import HostSlab
from kvbm.tracing import annotate
from kvbm.transfer.base import Ticket
from kvbm.transfer.cuda_calls import BatchCopy, batch_function
from kvbm.transfer.kernel_copies import mark
from kvbm.transfer.layout import BlockLayout
from kvbm.transfer.relay import Relay

logger = logging.getLogger("kvbm")

_SMALLEST_PIECE = 16 << 10  # below that a copy engine spends its time on setting up (benchmarks/gpu/copies.py)
_PIECES_A_CALL = 2048  # a call keeps others out of the driver while it runs: this many take 1.6 ms
_BYTES_A_CALL = 16 << 20  # and out of the copy engine


class IssuedTicket(Ticket):
    """A transfer that another thread is about to issue."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._issued = threading.Event()
        self._began: torch.cuda.Event | None = None
        self._ended: torch.cuda.Event | None = None
        self._error: BaseException | None = None
        self._over = False

    def issued(self, began: torch.cuda.Event, ended: torch.cuda.Event, error: BaseException | None = None) -> None:
        self._began, self._ended, self._error = began, ended, error
        self._issued.set()

    def failed(self, error: BaseException) -> None:
        """Not even an event could be had: CUDA itself has failed. Nobody may be left waiting for it."""
        self._error = error
        self._issued.set()

    def done(self) -> bool:
        self._over = self._over or (self._issued.is_set() and (self._ended is None or self._ended.query()))
        return self._over

    def wait(self) -> None:
        self._issued.wait()
        if self._ended is not None:
            self._ended.synchronize()

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Nothing submitted to the stream from now on begins before this is over. Waits until it has been issued."""
        self._issued.wait()
        if self._ended is not None:
            stream.wait_event(self._ended)

    @property
    def bad(self) -> Sequence[int]:
        return range(self._blocks) if self._error is not None else ()

    @property
    def reason(self) -> str:
        return "" if self._error is None else f"{type(self._error).__name__}: {self._error}"

    @property
    def seconds(self) -> float:
        if self._began is None or self._ended is None:
            return 0.0
        return float(self._began.elapsed_time(self._ended)) / 1e3


class Pieces:
    """Where the pieces of blocks lie and where they go, all of them at once: a step may complete one block or many, and
    either way every call counts."""

    def __init__(self, layout: BlockLayout, slab: HostSlab) -> None:
        self._slab = slab
        numbers = [(s.address, s.stride, s.offset, s.size) for s in layout.merged()]
        self._addresses, self._strides, self._offsets, self._sizes = np.array(numbers, np.int64).T[:, :, None]

    def of(self, blocks: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(targets in slots, sources in blocks, bytes) of every piece; those of a segment side by side."""
        slot = self._slab.address + slots * self._slab.slot_bytes
        targets, sources = self._offsets + slot, self._addresses + self._strides * blocks
        return targets.ravel(), sources.ravel(), np.repeat(self._sizes, len(blocks))


class EngineCopies:
    @classmethod
    def open(cls, layout: BlockLayout, slab: HostSlab, device: torch.device, priority: int) -> EngineCopies | None:
        """None where the copy engine is not worth using: small pieces, or a CUDA without batched copies."""
        if min(segment.size for segment in layout.merged()) < _SMALLEST_PIECE:
            return None
        batch = batch_function()
        return None if batch is None else cls(layout, slab, device, priority, batch)

    def __init__(
        self, layout: BlockLayout, slab: HostSlab, device: torch.device, priority: int, batch: BatchCopy
    ) -> None:
        self._device = device
        self._relay = Relay(device, priority)
        self._batch = batch
        self._pieces = Pieces(layout, slab)
        # Bounded by what the leader lets be pending.
        self._jobs: queue.SimpleQueue[tuple[Sequence[int], Sequence[int], torch.cuda.Event, IssuedTicket] | None]
        self._jobs = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvbm-store", daemon=True)
        self._thread.start()

    def store(self, blocks: Sequence[int], slots: Sequence[int], engine: torch.cuda.Stream) -> Ticket:
        """Copy blocks to slots after everything submitted to ``engine`` so far."""
        ticket = IssuedTicket(len(blocks))
        forward_ended = torch.cuda.Event()
        forward_ended.record(engine)
        self._jobs.put((blocks, slots, forward_ended, ticket))
        return ticket

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()
        self._relay.wait()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._carry_out(*job)
            except Exception as error:
                job[-1].failed(error)

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
        ticket.issued(began, mark(self._relay.stream), error)

    def _issue(self, blocks: np.ndarray, slots: np.ndarray) -> None:
        targets, sources, sizes = self._pieces.of(blocks, slots)
        pieces = max(1, min(_PIECES_A_CALL, _BYTES_A_CALL // int(sizes.max())))
        for i in range(0, len(sizes), pieces):
            part = slice(i, i + pieces)
            self._batch(targets[part], sources[part], sizes[part], self._relay.stream)
            self._relay.hand_over()
