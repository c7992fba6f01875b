"""What an engine serves, in memory that its server and its neighbours map: which slot holds which block.

The leader writes, without a system call. Each slot has a *generation*, which goes up by one when a block is published
in the slot and by one when it is withdrawn: odd means that the slot holds the block of its key. The leader withdraws a
slot before any rank gets a plan that writes to it. So a reader that finds the same odd generation before and after its
copy has copied the block and nothing else, and needs no answer of the engine. This relies on stores becoming visible
in order, as on x86; elsewhere the checksum of the copy decides.

A second file goes the other way. The server *leases* a slot for the time of a read: the leader evicts other blocks
first. A lease ends by itself, and a block that is dropped in spite of it is noticed by its generation.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvbm.core.key_filter import KeyFilter
from kvbm.core.keys import KEY_BYTES, Key
from kvbm.tiers.host.shared import SharedMemory

_HEADER = 4096
_STATE, _CHANGES = 0, 1  # words of the header
_SERVING, _RETIRED = 1, 2
COUNTERS = 64  # words at the front of the lease file, for the server's counts


class Board:
    """One engine's slots. The leader makes it; the server opens it by its files."""

    def __init__(self, file: int, leases: int, slots: int, *, writes: bool = False) -> None:
        """``leases``: -1 for a neighbour, which reads the generations alone."""
        self.slots = slots
        access = mmap.ACCESS_WRITE if writes else mmap.ACCESS_READ
        self._map = mmap.mmap(file, board_bytes(slots), access=access)
        self._words = np.frombuffer(self._map, np.uint64, _HEADER // 8)
        self.generations: npt.NDArray[np.uint64] = np.frombuffer(self._map, np.uint64, slots, _HEADER)
        keys = np.frombuffer(self._map, np.uint8, slots * KEY_BYTES, _HEADER + slots * 8)
        self.keys: npt.NDArray[np.uint8] = keys.reshape(slots, KEY_BYTES)
        self._lease_map = None if leases < 0 else mmap.mmap(leases, lease_bytes(slots))
        if self._lease_map is not None:
            self.counters: npt.NDArray[np.uint64] = np.frombuffer(self._lease_map, np.uint64, COUNTERS)
            self.leases: npt.NDArray[np.uint64] = np.frombuffer(self._lease_map, np.uint64, slots, COUNTERS * 8)

    @classmethod
    def make(cls, slots: int) -> tuple[Board, SharedMemory, SharedMemory]:
        """A board on which nothing is published, and its two files."""
        file = SharedMemory.make(board_bytes(slots))
        try:
            leases = SharedMemory.make(lease_bytes(slots))
        except OSError:
            file.close()
            raise
        board = cls(file.file, leases.file, slots, writes=True)
        board._words[_STATE] = _SERVING
        return board, file, leases

    # -- the leader ---------------------------------------------------------------------------------------------------

    def published(self, slots: Sequence[int], keys: Sequence[Key]) -> None:
        if self.is_retired or not slots:
            return
        some = np.array(slots, np.int64)
        self.keys[some] = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), KEY_BYTES)
        self.generations[some] += np.uint64(1)
        self._words[_CHANGES] += np.uint64(1)

    def withdrawn(self, slots: Sequence[int]) -> None:
        some = np.array(slots, np.int64)
        some = some[self.generations[some] & np.uint64(1) == 1]  # not those from after the end
        self.generations[some] += np.uint64(1)
        self._words[_CHANGES] += np.uint64(1)

    def is_read(self, slot: int) -> bool:
        """Whether a peer reads the slot just now, as far as is known."""
        lease = int(self.leases[slot])
        return lease > 0 and lease > time.monotonic_ns()

    def retire(self) -> None:
        """The blocks no longer belong to the fingerprint: withdraw all, and publish nothing any more."""
        self._words[_STATE] = _RETIRED
        self.withdrawn(range(self.slots))

    # -- the server ---------------------------------------------------------------------------------------------------

    @property
    def is_retired(self) -> bool:
        return int(self._words[_STATE]) == _RETIRED

    @property
    def changes(self) -> int:
        return int(self._words[_CHANGES])

    def lease(self, slots: Sequence[int], seconds: float) -> None:
        some = np.array(slots, np.int64)
        until = np.uint64(time.monotonic_ns() + int(seconds * 1e9))
        self.leases[some] = np.maximum(self.leases[some], until)

    def close(self) -> None:
        for name in ("_words", "generations", "keys", "counters", "leases"):
            self.__dict__.pop(name, None)
        for mapping in (self._map, self._lease_map):
            if mapping is not None:
                with contextlib.suppress(BufferError):  # a thread still looks at it; it goes with that view
                    mapping.close()


class Directory:
    """Key -> slot of a board, and the filter of the keys, for its server. Looks for changes when it is asked, and
    compares one word a slot."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._changes = -1
        self._seen = np.zeros(board.slots, np.uint64)
        self._slots: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self.filter = KeyFilter(board.slots, epoch=1 + int.from_bytes(os.urandom(7), "big"))

    def find(self, keys: Sequence[Key]) -> list[tuple[int, int]]:
        """(slot, generation) of each; (-1, 0) of those that are not there."""
        self.refresh()
        found = []
        for key in keys:
            slot = self._slots.get(key, -1)
            generation = int(self._board.generations[slot]) if slot >= 0 else 0
            is_same = slot >= 0 and generation == int(self._seen[slot])
            found.append((slot, generation) if is_same else (-1, 0))
        return found

    def refresh(self) -> None:
        changes = self._board.changes
        if changes == self._changes:
            return
        self._changes = changes
        now = self._board.generations.copy()
        changed = np.flatnonzero(now != self._seen)
        gone = []
        for slot in changed.tolist():
            key = self._keys.pop(slot, None)
            if key is not None and self._slots.get(key) == slot:
                del self._slots[key]
                gone.append(key)
        held = changed[now[changed] & np.uint64(1) == 1]
        keys = self._board.keys[held].copy()
        # A slot that changes meanwhile is seen with the next question.
        is_same = self._board.generations[held] == now[held]
        self._seen[changed] = now[changed]
        self._seen[held[~is_same]] = 0
        if not is_same.all():
            self._changes = -1
        come: dict[Key, None] = {}
        for slot, key in zip(held[is_same].tolist(), map(bytes, keys[is_same]), strict=True):
            if key not in self._slots:
                come[key] = None
            self._slots[key] = slot
            self._keys[slot] = key
        moved = come.keys() & gone  # to another slot
        self.filter.remove([key for key in gone if key not in moved])
        self.filter.add([key for key in come if key not in moved])

    def __len__(self) -> int:
        self.refresh()
        return len(self._slots)


def board_bytes(slots: int) -> int:
    return _HEADER + slots * (8 + KEY_BYTES)


def lease_bytes(slots: int) -> int:
    return (COUNTERS + slots) * 8


def read_only(file: int) -> int:
    """Another handle of a file of this process, which cannot be written through."""
    return os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
