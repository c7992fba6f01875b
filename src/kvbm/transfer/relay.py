"""Two streams that take turns, so that others have theirs.

The GPU's copy engine stays with a stream for as long as there is something to copy. The engine that we serve copies
too: its inputs in, its tokens out, a few bytes each, several times a step. Behind a long copy of ours they came when
all of it was over: a step of 6 ms took 45, and a new prompt's first token could be as late as the store of its blocks.
But where the next piece waits in *another* stream for the one before it there is a moment between them in which others
are served, and hardly anything is lost (``benchmarks/gpu/copies.py`` measures both). A little kernel between two copies
of one stream does the same, and takes longer.
"""

from __future__ import annotations

import torch


class Relay:
    """What is submitted to :attr:`stream` is carried out in order, also across :meth:`hand_over`. For one thread."""

    def __init__(self, device: torch.device, priority: int) -> None:
        self.stream, self._next = (torch.cuda.Stream(device, priority=priority) for _ in range(2))
        self._passed = torch.cuda.Event()

    def hand_over(self) -> None:
        """Let others in: go on in the other stream, when this one is through."""
        self._passed.record(self.stream)
        self._next.wait_event(self._passed)  # first: should it fail, all goes on in the same stream
        self.stream, self._next = self._next, self.stream

    def wait(self) -> None:
        """Until all that was submitted is over."""
        self.stream.synchronize()  # it is behind the other one
