"""The contract of an eviction policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from kvbm.core.keys import Key

Slots = Sequence[int] | np.ndarray


class EvictionPolicy(ABC):
    """Orders the slots that may be evicted.

    The pool calls it from the leader's thread and says what happened to which slots. The policy holds exactly the slots
    that are published and not pinned. In every call the first slot is the first that should be evicted: the pool hands
    over the blocks of a prefix back to front, because a block is worth nothing without those before it.
    """

    @abstractmethod
    def inserted(self, slots: Slots, keys: Sequence[Key]) -> None:
        """New blocks lie in these slots and may be evicted from now on. ``keys[i]`` names the block in ``slots[i]``."""

    @abstractmethod
    def hit(self, slots: Slots) -> None:
        """A request has used the blocks in these slots, which may be evicted before and after."""

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

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, slot: object) -> bool: ...
