"""From one rank to the others: broadcasts that no rank can be left waiting in."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist

# How long a rank waits for the others before it gives up on broadcasts. Ranks run in step, so this is far more than
# they are ever apart, and it is spent once.
PATIENCE_SECONDS = 60.0
# NCCL's own limit ends the process. It is only for what an agreement cannot see: a machine that dies meanwhile.
_NCCL_SECONDS = 1800.0


class WireError(RuntimeError):
    """The ranks have lost each other: nothing more is broadcast."""


class Wire:
    """Broadcasts from the first rank to the others, always preceded by an agreement among all of them.

    The agreement goes over the CPU and has a time limit. So a rank that is missing, or is at another load than the
    rest, is noticed before any GPU begins to wait for it; after that the wire is cut for good. One thread at a time.
    """

    def __init__(self, ranks: Sequence[int], device: str, max_ctas: int) -> None:
        self.first = ranks[0]
        self.sends = dist.get_rank() == self.first
        self.disabled_reason = ""  # why
        self._device = torch.device(device)
        self._turn = 0
        # Only these ranks take part in making a group: others of the same job may have nothing to do with ours.
        self._talk = self._data = dist.new_group(
            list(ranks), timedelta(seconds=PATIENCE_SECONDS), "gloo", use_local_synchronization=True
        )
        if self._device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options.config.max_ctas = max_ctas
            self._data = dist.new_group(
                list(ranks), timedelta(seconds=_NCCL_SECONDS), "nccl", options, use_local_synchronization=True
            )

    def try_out(self) -> None:
        """One agreement and one broadcast, waited for: what cannot work fails here."""
        self.agree([0], [])
        probe = torch.full((1024,), 7 if self.sends else 0, dtype=torch.uint8, device=self._device)
        self.send(probe).wait()
        if probe.cpu().tolist() != [7] * 1024:
            raise WireError("a broadcast did not arrive as it was sent")

    def agree(self, blocks: Sequence[int], bad: Iterable[int]) -> list[int]:
        """All ranks are at the same load of these blocks; returns the positions that are bad on any of them.

        Waits for the others. Raises WireError, at once if the wire is cut already, and always cuts it then.
        """
        self._turn += 1
        if self.disabled_reason:
            raise WireError(self.disabled_reason)
        try:
            flags = torch.zeros(len(blocks), dtype=torch.uint8)
            flags[list(bad)] = 1
            mine = torch.tensor([self._turn, len(blocks), crc32(array("q", blocks))])
            said = torch.cat([mine, -mine, flags.max().view(1).to(mine.dtype)])
            dist.all_reduce(said, dist.ReduceOp.MAX, group=self._talk)
            if not torch.equal(said[:3], -said[3:6]):
                raise WireError(f"the ranks are at different loads ({-said[3]} and {said[0]})")
            if not said[6]:
                return []
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._talk)
            return [int(i) for i in flags.nonzero().flatten()]
        except Exception as error:
            self.disabled_reason = f"no more broadcasts: {type(error).__name__}: {error}"
            raise WireError(self.disabled_reason) from error

    def send(self, buffer: torch.Tensor) -> Any:
        """Broadcast a buffer from the first rank; ``wait`` of what is returned waits as torch.distributed does."""
        try:
            return dist.broadcast(buffer, self.first, group=self._data, async_op=True)
        except Exception as error:
            self.disabled_reason = f"no more broadcasts: {type(error).__name__}: {error}"
            raise WireError(self.disabled_reason) from error
