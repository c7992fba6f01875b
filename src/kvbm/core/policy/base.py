"""The contract of an eviction policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

Slots = Sequence[int] | np.ndarray


class EvictionPolicy(ABC):
    """Orders the slots that may be evicted.

    The pool calls it from the leader's thread. It holds exactly the slots that are published and not pinned: the pool
    adds a slot when it becomes evictable, removes it when it is pinned or dropped, and takes victims when it needs
    room.
    """

    @abstractmethod
    def add(self, slots: Slots) -> None:
        """These slots have just been used and may be evicted from now on; the first of them is the first to go."""

    @abstractmethod
    def remove(self, slots: Slots) -> None:
        """These slots may no longer be evicted. Raises KeyError, and changes nothing, if one of them could not be."""

    @abstractmethod
    def take(self) -> int:
        """Remove and return the slot that goes first. Raises KeyError when there is none."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, slot: object) -> bool: ...
