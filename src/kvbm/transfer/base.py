"""The contract of a copier: the thing that moves blocks between the engine's cache and the host slab of one rank.

The worker calls it from the engine's own thread, in this order each step::

    begin_step   before the engine writes anything
    load         before the forward pass if the step computes on the blocks, maybe after it otherwise
    wait_layer   from the attention layers, when loads of this step are to be there
    store        after the forward pass has been submitted
    ticket.done  polled at the end of every step

No method may wait for a transfer unless it says so, and none raises for a transfer that fails: that is in the ticket.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence


class Ticket(ABC):
    """A transfer on its way."""

    @abstractmethod
    def done(self) -> bool:
        """True when it is over, well or badly. Never waits."""

    @abstractmethod
    def wait(self) -> None:
        """Return when it is over."""

    @property
    @abstractmethod
    def bad(self) -> Sequence[int]:
        """Positions of blocks that did not arrive. Valid once :meth:`done` is True."""

    @property
    @abstractmethod
    def reason(self) -> str:
        """Why, in a few words; empty when nothing went wrong."""


class Copier(ABC):
    """Moves blocks. Made by :func:`kvbm.transfer.open_copier`, which picks the one that fits the engine's device."""

    name: str

    @abstractmethod
    def load(self, slots: Sequence[int], blocks: Sequence[int], after: Iterable[Ticket], in_step: bool) -> Ticket:
        """Copy slots into the engine's blocks once the ``after`` tickets are over.

        ``in_step``: the forward pass that is about to begin reads the blocks; it is kept from reading a layer too early
        by :meth:`wait_layer`, and the call itself may wait where there is nothing to overlap with.
        """

    @abstractmethod
    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> Ticket:
        """Copy the engine's blocks into slots, after everything the engine has submitted so far."""

    @abstractmethod
    def begin_step(self, tickets: Iterable[Ticket]) -> None:
        """Nothing the engine submits from now on may overwrite what these stores still read. May wait for them.

        Called for every step that has anything to do, with or without tickets, before its loads.
        """

    @abstractmethod
    def wait_layer(self, layer: str) -> None:
        """Nothing the engine submits from now on may read this layer before its in-step loads are there."""

    @abstractmethod
    def scribble(self, blocks: Sequence[int]) -> None:
        """Overwrite engine blocks with zeros and wait for it: what a bad load may leave behind. For fault injection."""

    @abstractmethod
    def close(self) -> None:
        """Finish what is under way and let go of threads and of the slab, which belongs to the copier."""
