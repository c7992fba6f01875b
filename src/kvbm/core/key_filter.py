"""A compact set of keys that its owner changes and that other processes copy: which blocks a peer may hold.

A cuckoo filter: each key has two buckets of four cells, and one of the cells holds 16 bits of the key. So a key costs
2.2 bytes, and a key that is absent is found with probability 1e-4 at most (eight cells of 16 bits). A false hit costs
one question to the peer. The owner keeps 64 bits of each key beside its cell, which is what lets it remove keys and
move them to their other bucket.

A change of one key changes one cell, seldom a few. The owner numbers the changed cells, and a copy that is at number
``n`` gets the cells that have changed since: six bytes each, whatever the size of the filter. A copy that is too far
behind gets the whole table.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvbm.core.keys import KEY_BYTES, Key

CELLS_IN_BUCKET = 4
MAX_LOAD = 0.9  # of the cells: a table of this kind takes keys up to 0.95
MAX_MOVES = 500  # of other keys for one that is added
MAX_CELLS = 1 << 28  # 512 MiB: no peer makes another allocate more
_FIRST_WINDOW = 16
_MIX, _MIX_AGAIN = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_LOW = np.uint64(0xFFFFFFFF)


class Probe:
    """Keys as filters see them. Made once for a prompt and used for the filters of all peers."""

    __slots__ = ("hashes", "marks")

    def __init__(self, keys: Sequence[Key]) -> None:
        words = np.frombuffer(b"".join(keys), ">u8").astype(np.uint64).reshape(len(keys), KEY_BYTES // 8)
        # The last word too: the keys of one block in several groups of layers differ there alone.
        self.hashes: npt.NDArray[np.uint64] = words[:, 0] + words[:, 3] * _MIX
        marks = ((words[:, 1] + words[:, 3] * _MIX_AGAIN) >> np.uint64(48)).astype(np.uint16)
        self.marks: npt.NDArray[np.uint16] = np.maximum(marks, 1)  # 0 is an empty cell

    def __len__(self) -> int:
        return len(self.hashes)

    def buckets(self, count: int, start: int, end: int) -> tuple[Any, Any]:
        """The two buckets of each key in a filter of ``count`` buckets."""
        hashes, size = self.hashes[start:end], np.uint64(count)
        shift = np.uint64(32)
        return ((hashes >> shift) * size) >> shift, ((hashes & _LOW) * size) >> shift


class Update(msgspec.Struct, frozen=True, array_like=True):
    """What a copy gets from the owner. ``cells`` is empty when ``values`` is the whole table."""

    epoch: int  # of the owner's table: numbers of another epoch mean nothing
    number: int  # the copy is at this change afterwards
    buckets: int
    cells: bytes  # numbers of cells, uint32
    values: bytes  # uint16

    @property
    def size(self) -> int:
        return len(self.cells) + len(self.values)


class KeyFilter:
    """The owner's side. ``capacity``: the most keys. One thread at a time calls it."""

    def __init__(self, capacity: int, epoch: int) -> None:
        self.epoch = epoch
        self.left_out = 0  # keys that found no cell: peers do not find them
        self._buckets = max(1, -(-int(capacity / MAX_LOAD) // CELLS_IN_BUCKET))
        cells = self._buckets * CELLS_IN_BUCKET
        if cells > MAX_CELLS:
            raise ValueError(f"a filter of {capacity} keys takes {cells} cells; at most {MAX_CELLS} are supported")
        self._values = array("H", bytes(2 * cells))
        self._hashes = array("Q", bytes(8 * cells))  # of the keys in the cells
        self._changed = array("I")  # cells in the order of their changes
        self._first = 0  # number of the first entry of ``_changed``
        self._max_changes = max(64, cells // 3)  # more than that take as many bytes as the table
        self._synced: set[Key] = set()
        self._random = random.Random(epoch)

    @property
    def number(self) -> int:
        """Counts the changes of cells."""
        return self._first + len(self._changed)

    def __len__(self) -> int:
        return int(np.count_nonzero(np.frombuffer(self._values, np.uint16)))

    def add(self, keys: Sequence[Key]) -> None:
        """These keys are in the set from now on. A key that is in it already takes a second cell: do not add it."""
        if not keys:
            return
        probe = Probe(keys)
        for mark, value, first, second in self._places(probe):
            self._insert(mark, value, first, second)
        self._trim()

    def remove(self, keys: Sequence[Key]) -> None:
        """Keys that are not in the set are ignored."""
        if not keys:
            return
        for mark, value, first, second in self._places(Probe(keys)):
            for bucket in (first, second):
                cell = self._cell_with(bucket, value, mark)
                if cell >= 0:
                    self._set(cell, 0, 0)
                    break
        self._trim()

    def sync(self, keys: Collection[Key]) -> None:
        """Exactly these keys are in the set. For an owner that does not follow single changes; do not mix it with
        :meth:`add` and :meth:`remove`."""
        now = set(keys)
        self.remove(list(self._synced - now))
        self.add(list(now - self._synced))
        self._synced = now

    def clear(self) -> None:
        """No key is in the set. Copies get the whole table next, which is empty."""
        self._synced = set()
        cells = len(self._values)
        self._values = array("H", bytes(2 * cells))
        self._hashes = array("Q", bytes(8 * cells))
        self._first = self.number + 1
        self._changed = array("I")

    def since(self, epoch: int, number: int) -> Update | None:
        """The update for a copy that is at this change; None when nothing has changed. The whole table for a copy of
        another epoch, or one that is too far behind."""
        now = self.number
        if epoch == self.epoch and number == now:
            return None
        if epoch != self.epoch or not self._first <= number < now:
            return Update(self.epoch, now, self._buckets, b"", self._values.tobytes())
        cells = np.unique(np.frombuffer(self._changed, np.uint32)[number - self._first :])
        values = np.frombuffer(self._values, np.uint16)[cells]
        return Update(self.epoch, now, self._buckets, cells.tobytes(), values.tobytes())

    def _places(self, probe: Probe) -> Any:
        first, second = probe.buckets(self._buckets, 0, len(probe))
        return zip(probe.marks.tolist(), probe.hashes.tolist(), first.tolist(), second.tolist(), strict=True)

    def _insert(self, mark: int, value: int, first: int, second: int) -> None:
        for bucket in (first, second):
            cell = self._cell_with(bucket, 0, 0)
            if cell >= 0:
                self._set(cell, value, mark)
                return
        bucket = self._random.choice((first, second))
        for _ in range(MAX_MOVES):
            cell = bucket * CELLS_IN_BUCKET + self._random.randrange(CELLS_IN_BUCKET)
            moved, moved_mark = self._hashes[cell], self._values[cell]
            self._set(cell, value, mark)
            value, mark = moved, moved_mark
            one, other = (value >> 32) * self._buckets >> 32, (value & 0xFFFFFFFF) * self._buckets >> 32
            bucket = other if bucket == one else one
            cell = self._cell_with(bucket, 0, 0)
            if cell >= 0:
                self._set(cell, value, mark)
                return
        self.left_out += 1

    def _cell_with(self, bucket: int, value: int, mark: int) -> int:
        """A cell of the bucket that holds this key; -1 when there is none. Mark 0: an empty cell."""
        start = bucket * CELLS_IN_BUCKET
        for cell in range(start, start + CELLS_IN_BUCKET):
            if self._values[cell] == mark and self._hashes[cell] == value:
                return cell
        return -1

    def _set(self, cell: int, value: int, mark: int) -> None:
        self._hashes[cell], self._values[cell] = value, mark
        self._changed.append(cell)

    def _trim(self) -> None:
        """Bound the list of changes. A copy that is behind its beginning gets the table."""
        surplus = len(self._changed) - self._max_changes
        if surplus > self._max_changes // 2:
            del self._changed[:surplus]
            self._first += surplus


class FilterCopy:
    """Another process's side: a copy of one peer's filter, as of the last update."""

    def __init__(self) -> None:
        self.epoch, self.number = 0, -1
        self._cells: npt.NDArray[np.uint16] = np.zeros((1, CELLS_IN_BUCKET), np.uint16)

    def apply(self, update: Update) -> None:
        """Raises ValueError, and changes nothing, for an update that fits no filter or not this copy."""
        if not 0 < update.buckets <= MAX_CELLS // CELLS_IN_BUCKET or update.number < 0:
            raise ValueError(f"an update of a filter with {update.buckets} buckets at change {update.number}")
        if not update.cells:
            if len(update.values) != update.buckets * CELLS_IN_BUCKET * 2:
                raise ValueError(f"a table of {len(update.values)} bytes for {update.buckets} buckets")
            self._cells = np.frombuffer(update.values, np.uint16).reshape(-1, CELLS_IN_BUCKET).copy()
        else:
            if update.epoch != self.epoch or update.buckets != len(self._cells) or update.number < self.number:
                raise ValueError("an update of another table than the copy's")
            if len(update.cells) % 4 or len(update.cells) != 2 * len(update.values):
                raise ValueError(f"{len(update.cells)} bytes of cells with {len(update.values)} bytes of values")
            cells = np.frombuffer(update.cells, np.uint32)
            if int(cells.max()) >= self._cells.size:
                raise ValueError(f"an update of cell {int(cells.max())} of {self._cells.size}")
            self._cells.reshape(-1)[cells] = np.frombuffer(update.values, np.uint16)
        self.epoch, self.number = update.epoch, update.number

    def leading(self, probe: Probe, start: int = 0) -> int:
        """How many keys from ``start`` on are all in the set, apart from false hits."""
        end, at, window = len(probe), start, _FIRST_WINDOW
        while at < end:
            stop = min(end, at + window)
            missing = np.flatnonzero(~self._contains(probe, at, stop))
            if len(missing):
                return at + int(missing[0]) - start
            at, window = stop, 4 * window
        return max(0, end - start)

    def _contains(self, probe: Probe, start: int, end: int) -> npt.NDArray[np.bool_]:
        first, second = probe.buckets(len(self._cells), start, end)
        marks = probe.marks[start:end, None]
        found: npt.NDArray[np.bool_] = (self._cells[first] == marks).any(1) | (self._cells[second] == marks).any(1)
        return found
