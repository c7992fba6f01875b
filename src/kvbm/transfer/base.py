"""The contract of a copier: the thing that moves blocks between the engine's cache and the host slab of one rank.

The worker calls it from the engine's own thread, in this order each step::

    begin_step   before the engine writes anything
    load         before the forward pass if the step computes on the blocks, maybe after it otherwise
    wait_layer   from the attention layers, when loads of this step are to be there layer by layer
    end_load     after the forward pass has been submitted
    store        after that
    ticket.done  polled at the end of every step

No method may wait for a transfer unless it says so, and none raises for a transfer that fails: that is in the ticket.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from enum import Enum

_TRIED_BYTES = 256 << 20


def slots_tried(block_bytes: int, num_blocks: int, slots: int) -> int:
    """How many slots, from the first on, a copier may write to when it is made: it tries itself out on them."""
    return max(1, min(num_blocks, slots, _TRIED_BYTES // block_bytes))


class When(Enum):
    """By when the engine needs what a load brings."""

    LATER = "later"  # not in this step: the request waits outside of the batch
    NOW = "now"  # before the forward pass that is about to begin
    BY_LAYER = "by layer"  # each layer before its own attention, which calls ``wait_layer``


class Ticket(ABC):
    """A transfer on its way."""

    @abstractmethod
    def done(self) -> bool:
        """True when it is over, well or badly. Never waits."""

    @abstractmethod
    def wait(self) -> None:
        """Return when it is over."""

    @property
    def bad(self) -> Sequence[int]:
        """Positions of blocks that did not arrive. Valid once :meth:`done` is True."""
        return ()

    @property
    def reason(self) -> str:
        """Why, in a few words; empty when nothing went wrong."""
        return ""

    @property
    def seconds(self) -> float:
        """How long the copy itself took, where that is known; else 0. Valid once :meth:`done` is True."""
        return 0.0


class Copier(ABC):
    """Moves blocks. Made by :func:`kvbm.transfer.open_copier`, which picks the one that fits the engine's device."""

    name: str
    # Blocks that one load outside of the step should have at most, where submitting more would keep the engine waiting.
    # 0: any number.
    portion = 0

    @abstractmethod
    def begin_step(self, tickets: Iterable[Ticket]) -> None:
        """Nothing the engine submits from now on may overwrite what these stores still read. May wait for them.

        Called for every step that has anything to do, with or without tickets, before its loads.
        """

    def begin_load(self) -> None:
        """A load is about to come between two steps: it may begin when what the engine has submitted so far is over."""
        return

    def prefetch(self, slots: Sequence[int], tokens: int = 0, whole: bool = False) -> bool:
        """Begin to bring slots near, for a load of the same slots that is expected in milliseconds.

        ``whole``: no step will wait for its layers. False when this copier has no room of its own near the engine, or
        would not use it for such a load. The slots must not change until that load, or until :meth:`end_prefetch`; a
        load of other slots ends it too.
        """
        return False

    def end_prefetch(self) -> None:
        """The load that was expected will not come now."""
        return

    @abstractmethod
    def load(
        self, slots: Sequence[int], blocks: Sequence[int], after: Iterable[Ticket], when: When, tokens: int = 0
    ) -> Ticket:
        """Copy slots into the engine's blocks once the ``after`` tickets are over.

        ``tokens``: how many the step computes on them, for a load by layer.
        """

    @abstractmethod
    def wait_layer(self, layer: str) -> None:
        """Nothing the engine submits from now on may read this layer before its ``BY_LAYER`` loads are there."""

    @abstractmethod
    def end_load(self, ticket: Ticket) -> bool:
        """The forward pass that needed this ``BY_LAYER`` load has been submitted. False when it may have read early.

        That is so when a layer was not waited for: the engine replayed a CUDA graph, say, in which no layer asks. The
        caller must then treat what was loaded as bad.
        """

    @abstractmethod
    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> Ticket:
        """Copy the engine's blocks into slots, after everything the engine has submitted so far."""

    @abstractmethod
    def scribble(self, blocks: Sequence[int]) -> None:
        """Overwrite engine blocks with zeros and wait for it: what a bad load may leave behind. For fault injection."""

    @abstractmethod
    def close(self) -> None:
        """Finish what is under way and let go of threads and of the slab, which belongs to the copier."""
