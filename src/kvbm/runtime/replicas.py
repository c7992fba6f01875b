"""Ranks that hold the same KV bytes: how they find each other at start, and keep their blocks once.

With MLA every rank of a tensor-parallel group has the same KV, and a cache that lets each of them keep its own copy
wastes all but one. The ranks agree at start, over a group of the engine's own, on one of two ways to keep it once:

- they share one slab (:mod:`kvbm.tiers.host.shared`): each block is written by one of them and read by all;
- the first alone has a host tier and broadcasts what it loads (:mod:`kvbm.transfer.broadcast`).

All ranks call the collective methods in the same order. A rank that fails reports its failure to the others before it
returns: otherwise the others would wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

from kvbm.tiers.host.shared import Place, SharedMemory
from kvbm.tiers.host.shared import SharingError as SharingError
from kvbm.tiers.host.slab import HostMemoryError, HostSlab, Shared, mapped_bytes, refuse_if_too_large
from kvbm.transfer.wire import Wire

_MESSAGE_BYTES = 2048

T = TypeVar("T")


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """A rank's message in the agreement about shared KV."""

    layout: str
    block_bytes: int
    num_blocks: int
    broadcast: bool  # the setting


class _Said(msgspec.Struct, frozen=True, array_like=True):
    error: str = ""
    place: Place | None = None


class Replicas:
    """The ranks of one group, over which they can already talk: ``group`` is of torch.distributed, with gloo."""

    def __init__(self, group: Any) -> None:
        self.place = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._group = group

    def meet(self, offer: Offer) -> bool:
        """Whether these ranks have caches of the same shape, and are set up alike."""
        return len(set(self._exchange(offer, Offer))) == 1

    def agree(self, error: str = "") -> str:
        """The errors of all ranks; empty when all are well."""
        return "; ".join(dict.fromkeys(said.error for said in self._exchange(_Said(error), _Said) if said.error))

    def share_slab(self, size: int, node: int | None) -> HostSlab:
        """One slab for all ranks. Raises SharingError on all of them when they cannot have one, and HostMemoryError
        or OSError when there is no memory for it."""
        memory: SharedMemory | None = None
        said, failure = _Said(), None
        if self.place == 0:
            try:
                refuse_if_too_large(size, ranks=self.size)
                memory = SharedMemory.make(mapped_bytes(size))
                said = _Said(place=memory.place)
            except Exception as error:
                said, failure = _Said(_shorten(error)), error
        first = self._exchange(said, _Said)[0]
        if first.place is None:
            raise failure or MemoryError(first.error)
        slab: HostSlab | None = None
        problem = ""
        try:
            memory = memory or SharedMemory.open(first.place)
            slab = HostSlab(size, node, Shared(memory.file, self.place, self.size))
        except Exception as error:
            problem = _shorten(error)
        problem = self.agree(problem)  # the file stays open until all ranks have opened it
        if memory is not None:
            memory.close()
        if slab is None or problem:
            if slab is not None:
                slab.close()
            raise SharingError(problem)
        return slab

    def open_wire(self, device: str, max_ctas: int) -> Wire:
        """Process groups for broadcasts, after a test broadcast. Raises RuntimeError on all ranks if one fails."""
        wire: list[Wire] = []
        # A group that one rank could not make is not tried out by the others: they would wait for it.
        self._do_together(lambda: wire.append(Wire(dist.get_process_group_ranks(self._group), device, max_ctas)))
        self._do_together(lambda: wire[0].try_out())
        return wire[0]

    def _do_together(self, action: Callable[[], None]) -> None:
        """Raises RuntimeError on all ranks if one fails."""
        problem = ""
        try:
            action()
        except Exception as error:
            problem = _shorten(error)
        if problem := self.agree(problem):
            raise RuntimeError(problem)

    def _exchange(self, message: Offer | _Said, kind: type[T]) -> list[T]:
        """The messages of all ranks, in the order of their places. Not pickled: it may come from another machine."""
        data = msgspec.msgpack.encode(message)
        if len(data) > _MESSAGE_BYTES - 4:
            raise ValueError(f"a message of {len(data)} bytes between ranks: at most {_MESSAGE_BYTES - 4} fit")
        framed = len(data).to_bytes(4, "little") + data
        mine = torch.frombuffer(bytearray(framed.ljust(_MESSAGE_BYTES, b"\0")), dtype=torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine, group=self._group)
        texts = [part.numpy().tobytes() for part in parts]
        return [msgspec.msgpack.decode(t[4 : 4 + int.from_bytes(t[:4], "little")], type=kind) for t in texts]


def _shorten(error: Exception) -> str:
    text = str(error).partition("\n")[0][:300]
    return text if isinstance(error, (SharingError, HostMemoryError)) else f"{type(error).__name__}: {text}"
