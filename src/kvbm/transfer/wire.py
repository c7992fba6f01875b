"""Broadcasts from one rank to the others. An agreement with a deadline keeps a rank from waiting for an absent one."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist

# How long a rank waits for the others before it disables broadcasts. Ranks run in lockstep, so they are never this far
# apart, and the wait occurs once.
PATIENCE_SECONDS = 60.0
# NCCL's own limit ends the process. It covers only a machine that dies between the agreement and the broadcast.
_NCCL_SECONDS = 1800.0


class WireError(RuntimeError):
    """The ranks did not agree or a broadcast failed: broadcasts are disabled."""


class Wire:
    """Broadcasts from the first rank to the others, always after an agreement of all ranks.

    The agreement runs on the CPU and has a deadline. It detects an absent rank, or one at a different load, before any
    GPU waits for it; broadcasts are then disabled for good. For one thread at a time.
    """

    def __init__(self, ranks: Sequence[int], device: str, max_ctas: int) -> None:
        self.first = ranks[0]
        self.sends = dist.get_rank() == self.first
        self.disabled_reason = ""  # why broadcasts are disabled; empty while they work
        self._device = torch.device(device)
        self._turn = 0
        # Only these ranks create the group: other ranks of the job do not take part.
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
        """Run one agreement and one broadcast and wait for them, so that a broken set-up fails at start."""
        self.agree([0], [])
        probe = torch.full((1024,), 7 if self.sends else 0, dtype=torch.uint8, device=self._device)
        self.send(probe).wait()
        if probe.cpu().tolist() != [7] * 1024:
            raise WireError("a test broadcast arrived with wrong content")

    def agree(self, blocks: Sequence[int], bad: Iterable[int]) -> list[int]:
        """Agree with all ranks on this load; returns the positions that are bad on any rank.

        Waits for the other ranks. On failure it disables broadcasts and raises WireError; once they are disabled it
        raises at once.
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
            raise self._disable(error) from error

    def send(self, buffer: torch.Tensor) -> Any:
        """Start the broadcast of a buffer from the first rank; returns the work handle of torch.distributed."""
        try:
            return dist.broadcast(buffer, self.first, group=self._data, async_op=True)
        except Exception as error:
            raise self._disable(error) from error

    def _disable(self, error: Exception) -> WireError:
        self.disabled_reason = f"broadcasts are disabled: {type(error).__name__}: {error}"
        return WireError(self.disabled_reason)
