"""The contract of an eviction policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvbm.core.keys import Key

Slots = Sequence[int] | np.ndarray

COMMON = 0  # the tenant of every request that has no share of its own


class Retention(NamedTuple):
    """How much a caller wants a range of a request's blocks to stay. A hint, never a pin: a policy learns what the
    hints of a workload are worth."""

    priority: int  # below 0: goes earlier; 0: as usual; above 0: stays longer
    seconds: float = float("inf")  # after the request has ended; then the priority is 0 again
    start: int = 0  # first block
    end: int = 2**31 - 1  # the block behind the last


class Turn(NamedTuple):
    """What the engine knows of a request that has ended. All but the first two are what the caller says: values may be
    missing or wrong, and cost hits at worst."""

    found: int = 0  # blocks from the front that the request did not have to compute
    output_tokens: int = 0
    # Names the conversation or agent that the request belongs to; 0: unknown. Recorded, and used by no policy: a prefix
    # tells as much (docs/policies.md).
    session: int = 0
    is_final: bool = False  # the session does not come back
    retention: tuple[Retention, ...] = ()


NO_HINTS = Turn()


class EvictionPolicy(ABC):
    """Orders the slots that may be evicted.

    The pool calls it from the leader's thread and says what happened to which slots. The policy holds exactly the slots
    that are published and not pinned. In every call the first slot is the first that should be evicted: the pool hands
    over the blocks of a prefix back to front, because a block is worth nothing without those before it.
    """

    def assigned(self, slots: Sequence[int], tenants: Sequence[int] | None) -> None:
        """The pool has reserved these slots for blocks of these tenants (None: the common one); :meth:`inserted` or
        :meth:`freed` follows."""
        return

    def freed(self, slots: Slots) -> None:
        """These slots, which could not be evicted, are free: not written, or dropped before their last reader left."""
        return

    def tenants_of(self, slots: Sequence[int]) -> Sequence[int] | None:
        """As :meth:`assigned` said; None: all are the common one's."""
        return None

    @abstractmethod
    def inserted(self, slots: Slots, keys: Sequence[Key]) -> None:
        """New blocks lie in these slots and may be evicted from now on. ``keys[i]`` names the block in ``slots[i]``."""

    @abstractmethod
    def hit(self, slots: Slots) -> None:
        """A request uses the blocks in these slots, which may be evicted before and after. A request says so several
        times while it runs; :meth:`turned` comes once, when it ends."""

    def turned(self, keys: Sequence[Key], slots: np.ndarray, idle: np.ndarray, turn: Turn) -> None:
        """A request has ended that used the prefix ``keys``, the front first. ``slots[i]`` holds ``keys[i]``; -1: the
        pool does not have it. ``idle``: those of the slots that may be evicted, in the order of :meth:`hit`."""
        self.hit(idle)

    @abstractmethod
    def pinned(self, slots: Slots) -> None:
        """A reader holds these slots: they must not be evicted. Raises KeyError, and changes nothing, if one of them
        could not be evicted before."""

    @abstractmethod
    def released(self, slots: Slots, used: bool) -> None:
        """The last reader has let go of these slots. ``used``: a request has used the blocks. False: they were only
        copied, for example to another tier, and are as old as they were."""

    @abstractmethod
    def dropped(self, slots: Slots) -> None:
        """The pool has forgotten the blocks in these slots. Raises KeyError as :meth:`pinned` does."""

    @abstractmethod
    def evict(self) -> int:
        """Remove and return the slot that goes first. Raises KeyError when there is none."""

    def evict_run(self, count: int, tenant: int = COMMON) -> list[int]:
        """As :meth:`evict`, up to ``count`` slots at once and at least one, to make room for blocks of this tenant."""
        return [self.evict() for _ in range(min(count, len(self)) or 1)]

    def room_for(self, tenant: int) -> int:
        """How many slots :meth:`evict_run` can make free for a tenant."""
        return len(self)

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, slot: object) -> bool: ...
