"""Two streams that alternate, so that the engine's small copies get between KVBM's long ones.

The GPU's copy engine stays with a stream while that stream has work. The LLM engine also uses it: inputs in, tokens
out, a few bytes each, several times per step. Behind one long copy they waited until it was over: a step of 6 ms took
45 ms, and the first token of a new prompt waited for the store of its blocks. If the next piece waits in *another*
stream for the piece before it, the copy engine serves other streams in between, at hardly any loss of bandwidth
(``benchmarks/gpu/copies.py`` measures both). A small kernel between two copies of one stream has the same effect but
takes longer.
"""

from __future__ import annotations

import torch


class Relay:
    """Work submitted to :attr:`stream` runs in order, also across :meth:`hand_over`. For one thread."""

    def __init__(self, device: torch.device, priority: int) -> None:
        self.stream, self._next = (torch.cuda.Stream(device, priority=priority) for _ in range(2))
        self._passed = torch.cuda.Event()

    def hand_over(self) -> None:
        """Let other streams use the copy engine: continue in the other stream once this one is done."""
        self._passed.record(self.stream)
        self._next.wait_event(self._passed)  # first: if this raises, the stream stays the same
        self.stream, self._next = self._next, self.stream

    def wait(self) -> None:
        """Wait for all submitted work."""
        self.stream.synchronize()  # this stream waits for the other one
