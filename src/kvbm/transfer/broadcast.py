"""Loads for ranks that hold the same KV: the first rank loads the blocks and broadcasts them to the others.

Only the first rank has a host tier. All ranks get the same plans in the same order. Each rank takes part in every load,
in that order, even after a failure of its own::

    first rank    slots -> its own blocks      blocks -> rows of a buffer
    all ranks     agree: which blocks are bad?               broadcast the buffer
    the others                                                            rows -> their blocks

The ranks agree a second time after the broadcast, because the broadcast may fail too. So a failure on one rank is a
failure on all, and no rank waits for an absent one. After a failed agreement every load fails at once on every rank,
and the engine recomputes.

Blocks go in batches of DYN_KVBM_MAX_TRANSFER_BATCH_SIZE, with DYN_KVBM_MAX_CONCURRENT_TRANSFERS batches in flight.
There is no loading by layer: a step that needs the blocks waits for all of them.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch

from kvbm.transfer.base import Copier, Ticket, When, describe_error
from kvbm.transfer.cpu import FutureTicket, Outcome, view_rows
from kvbm.transfer.layout import BlockLayout
from kvbm.transfer.wire import Wire


class Passing(NamedTuple):
    """How a rank sends or receives broadcasts."""

    wire: Wire
    batch: int  # blocks of one broadcast
    buffers: int  # broadcasts in flight


class Rows(ABC):
    """Copies the blocks of a load to and from rows of buffers. A row has the size of a slot."""

    buffers: list[torch.Tensor]  # uint8[batch, slot bytes]

    @abstractmethod
    def begin(self, blocks: Sequence[int]) -> None:
        """Start a load: the next calls refer to its blocks."""

    @abstractmethod
    def gather(self, start: int, end: int, buffer: torch.Tensor) -> None:
        """Copy blocks ``start`` to ``end`` of the load to the first rows of a buffer."""

    @abstractmethod
    def scatter(self, start: int, end: int, buffer: torch.Tensor) -> None:
        """Copy the first rows of a buffer to blocks ``start`` to ``end`` of the load."""

    def end(self) -> None:
        return


class BroadcastCopier(Copier):
    """Wraps a rank's own copier, which has a slab on the first rank only."""

    # No partial loads: their order depends on a rank's own bus, and all ranks need the same order.
    portion = 0

    def __init__(self, inner: Copier, wire: Wire, rows: Rows) -> None:
        self.name = f"{inner.name}, broadcast {'to' if wire.sends else 'from'} others"
        self._inner = inner
        self._wire = wire
        self._rows = rows
        self._fence_error: Exception | None = None

    def begin_step(self, tickets: Iterable[Ticket]) -> None:
        # Never raises: otherwise this rank would miss a load in which the others wait.
        try:
            self._fence_error = None
            self._inner.begin_step(tickets)
        except Exception as error:
            self._fence_error = error

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> Ticket:
        return self._inner.store(blocks, slots)

    def scribble(self, blocks: Sequence[int]) -> None:
        self._inner.scribble(blocks)

    def close(self) -> None:
        self._inner.close()

    def _fetch(self, slots: Sequence[int], blocks: Sequence[int], after: Iterable[Ticket]) -> Ticket | Exception | None:
        """On the first rank, start the load into its own blocks. Returns the error if that fails."""
        try:
            if self._fence_error is not None:
                raise self._fence_error
            return self._inner.load(slots, blocks, after, When.LATER) if self._wire.sends else None
        except Exception as error:
            return error

    def _pass_on(self, fetch: Ticket | Exception | None, blocks: Sequence[int]) -> Outcome:
        """Take part in one broadcast, even if this rank's own load has failed. Called in the order of the loads. Every
        rank gets the same bad blocks."""
        bad: Sequence[int] = ()
        reason = ""
        if isinstance(fetch, Exception):
            bad, reason = range(len(blocks)), describe_error(fetch)
        elif fetch is not None:
            bad, reason = fetch.bad, fetch.reason
        try:
            lost = self._wire.agree(blocks, bad)
            if len(lost) < len(blocks):
                error = self._exchange(blocks)
                if error is not None:
                    lost, reason = list(range(len(blocks))), describe_error(error)
                lost = self._wire.agree(blocks, lost)
        except Exception as error:
            lost, reason = list(range(len(blocks))), describe_error(error)
        return Outcome(lost, reason or ("failed on another rank" if lost else ""))

    def _exchange(self, blocks: Sequence[int]) -> Exception | None:
        """Broadcast every block. Returns this rank's error at the end only: the other ranks wait for the rest."""
        rows, error = self._rows, None
        batch = len(rows.buffers[0])
        flying: deque[tuple[Any, int, int, torch.Tensor]] = deque()

        def land() -> None:
            work, start, end, buffer = flying.popleft()
            work.wait()
            if not self._wire.sends:
                attempt(rows.scatter, start, end, buffer)

        def attempt(step: Callable[..., None], *arguments: Any) -> None:
            nonlocal error
            try:
                step(*arguments)
            except Exception as problem:
                error = problem

        attempt(rows.begin, blocks)
        for i, start in enumerate(range(0, len(blocks), batch)):
            if len(flying) == len(rows.buffers):
                land()
            end, buffer = min(start + batch, len(blocks)), rows.buffers[i % len(rows.buffers)]
            if self._wire.sends:
                attempt(rows.gather, start, end, buffer)
            flying.append((self._wire.send(buffer[: end - start]), start, end, buffer))
        while flying:
            land()
        attempt(rows.end)
        return error


class CpuBroadcastCopier(BroadcastCopier):
    """Runs the broadcasts on one thread, one load after the other."""

    def __init__(self, inner: Copier, passing: Passing, layout: BlockLayout) -> None:
        super().__init__(inner, passing.wire, CpuRows(layout, passing.batch, passing.buffers))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvbm-broadcast")

    def load(
        self, slots: Sequence[int], blocks: Sequence[int], after: Iterable[Ticket], when: When, tokens: int = 0
    ) -> Ticket:
        fetch = self._fetch(slots, blocks, after)
        ticket = FutureTicket(self._thread.submit(self._run, fetch, blocks), len(blocks))
        if when is not When.LATER:
            ticket.wait()
        return ticket

    def _run(self, fetch: Ticket | Exception | None, blocks: Sequence[int]) -> Outcome:
        began = time.perf_counter()
        if isinstance(fetch, Ticket):
            fetch.wait()
        return self._pass_on(fetch, blocks)._replace(seconds=time.perf_counter() - began)

    def close(self) -> None:
        self._thread.shutdown()
        super().close()


class CpuRows(Rows):
    def __init__(self, layout: BlockLayout, batch: int, buffers: int) -> None:
        self.buffers = [torch.zeros(batch, layout.slot_bytes, dtype=torch.uint8) for _ in range(buffers)]
        self._segments = [
            (view_rows(s.address, layout.num_blocks, s.stride, s.size), slice(s.offset, s.offset + s.size))
            for s in layout.merged()
        ]
        self._blocks = np.zeros(0, np.int64)

    def begin(self, blocks: Sequence[int]) -> None:
        self._blocks = np.asarray(blocks, np.int64)

    def gather(self, start: int, end: int, buffer: torch.Tensor) -> None:
        rows = buffer.numpy()
        for engine, place in self._segments:
            rows[: end - start, place] = engine[self._blocks[start:end]]

    def scatter(self, start: int, end: int, buffer: torch.Tensor) -> None:
        rows = buffer.numpy()
        for engine, place in self._segments:
            engine[self._blocks[start:end]] = rows[: end - start, place]
