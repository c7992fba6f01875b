"""The contract of a copier, which moves blocks between the engine's cache and the host slab of one rank.

The worker calls the copier from the engine's own thread, in this order each step::

    begin_step   before the engine writes anything
    load         before the forward pass if the step computes on the blocks, otherwise before or after it
    wait_layer   from each attention layer, if loads of this step arrive layer by layer
    end_load     after the forward pass has been submitted
    store        after that
    ticket.done  polled at the end of every step

No method waits for a transfer unless its docstring says so. A failed transfer raises nothing: its ticket reports it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Protocol

_PROBE_BYTES = 256 << 20


def describe_error(error: BaseException) -> str:
    """For the reason of a ticket."""
    return f"{type(error).__name__}: {error}"


def slots_tried(block_bytes: int, num_blocks: int, slots: int) -> int:
    """How many slots, from the first on, a copier may overwrite in its constructor, to warm up and to measure."""
    return max(1, min(num_blocks, slots, _PROBE_BYTES // block_bytes))


class Slab(Protocol):
    """The host memory that a copier reads and writes: equal slots at consecutive addresses.

    The host tier provides it (:class:`kvbm.tiers.host.slab.HostSlab`). A copier takes this contract instead of the
    class, so that ``transfer`` imports no tier.
    """

    address: int
    slots: int
    slot_bytes: int

    @property
    def piece_slots(self) -> int:
        """Slots that are pinned together. A single copy must not cross the end of such a piece."""
        ...

    def pin(self, pin: Callable[[int, int], None], unpin: Callable[[int], None]) -> None: ...

    def close(self) -> None: ...


class When(Enum):
    """When the engine needs the blocks of a load."""

    LATER = "later"  # not in this step: the request waits outside the batch
    NOW = "now"  # before the forward pass of this step
    BY_LAYER = "by layer"  # each layer before its own attention, which calls ``wait_layer``


class Ticket(ABC):
    """A transfer in flight."""

    @abstractmethod
    def done(self) -> bool:
        """True when the transfer is over, whether it succeeded or failed. Never waits."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until the transfer is over."""

    @property
    def bad(self) -> Sequence[int]:
        """Positions of blocks that did not arrive. Valid once :meth:`done` is True."""
        return ()

    @property
    def unpackable(self) -> Sequence[int]:
        """Positions of a store's blocks that do not fit a packed slot: not kept, and no fault. Valid as above.

        Their slots hold nothing usable. A ticket that wraps another one must pass this on.
        """
        return ()

    @property
    def reason(self) -> str:
        """Why blocks did not arrive; empty if all did."""
        return ""

    @property
    def seconds(self) -> float:
        """How long the copy took; 0 if unknown. Valid once :meth:`done` is True."""
        return 0.0


class Copier(ABC):
    """Moves blocks. :func:`kvbm.transfer.open_copier` makes the copier that fits the engine's device."""

    name: str
    # Maximum blocks of one load outside the step: submitting more at once would delay the engine's thread. 0: no limit.
    portion = 0

    @abstractmethod
    def begin_step(self, tickets: Iterable[Ticket]) -> None:
        """Fence these stores: work that the engine submits after this call overwrites no block that they still read.

        May wait for the stores. The worker calls it in every step with a plan, before the loads, even without tickets.
        """

    # Whether :meth:`hold_step` makes the device wait, and not the engine's thread, for loads that cannot fail any more.
    can_hold_steps = False

    def hold_step(self, tickets: Iterable[Ticket]) -> None:
        """Make work that the engine submits after this call wait for these loads."""
        for ticket in tickets:
            ticket.wait()

    def begin_load(self) -> None:
        """Prepare a load between two steps: the load waits for the work that the engine has submitted so far."""
        return

    def prefetch(self, slots: Sequence[int], tokens: int = 0) -> bool:
        """Prefetch slots into staging buffers, for a load of the same slots that follows within milliseconds.

        Returns False if this copier has no staging buffers, or does not use them for such a load. The slots must not
        change until that load or until :meth:`end_prefetch`. A load of other slots ends the prefetch too.
        """
        return False

    def end_prefetch(self) -> None:
        """Drop the prefetched slots, because their load does not come."""
        return

    @abstractmethod
    def load(
        self, slots: Sequence[int], blocks: Sequence[int], after: Iterable[Ticket], when: When, tokens: int = 0
    ) -> Ticket:
        """Copy slots into the engine's blocks once the ``after`` tickets are over.

        ``tokens``: how many tokens the step computes, for a load by layer.
        """

    def wait_layer(self, layer: str) -> None:
        """Make work that the engine submits after this call wait for this layer of all ``BY_LAYER`` loads. Nothing to
        do for a copier that waits for the whole load before the step."""
        return

    def end_load(self, ticket: Ticket) -> bool:
        """End a ``BY_LAYER`` load after its forward pass has been submitted. False if the pass may have read too early.

        That happens when a layer did not call :meth:`wait_layer`, for example because the engine replayed a CUDA graph.
        The caller must then treat the loaded blocks as bad.
        """
        return True

    @abstractmethod
    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> Ticket:
        """Copy the engine's blocks into slots, after all work that the engine has submitted so far."""

    @abstractmethod
    def scribble(self, blocks: Sequence[int]) -> None:
        """Overwrite engine blocks with zeros, as a bad load may do, and wait for it. For fault injection."""

    @abstractmethod
    def close(self) -> None:
        """Finish the transfers in flight, then close the threads and the slab, which belongs to the copier."""
