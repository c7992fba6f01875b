"""Which blocks a tier takes in.

A flash drive wears out by being written, and most blocks are never asked for again. The filter of the guide admits a
block once it has been of use: "only offloads KV blocks from CPU to disk if the blocks have frequency >= 2.
Frequency doubles on cache hit (initialized at 1) and decrements by 1 on each time decay step."
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from kvbm.core.clock import Clock
from kvbm.core.keys import Key

# Eight hits. At one step every ten minutes a block that reached it is remembered for almost two days without another;
# more would say nothing new, and no step of decay would ever get a full table rid of it.
MAX_FREQUENCY = 256
# Entries looked at for each key that is handled while dead ones are cleared away.
_SWEEP = 8


class AdmissionRule(ABC):
    """Decides which blocks move on to a tier. The leader's thread calls it, for every block."""

    @abstractmethod
    def admit(self, keys: Iterable[Key]) -> list[Key]:
        """These blocks are now in the tier above: those of them that may move on at once."""

    @abstractmethod
    def hit(self, keys: Iterable[Key]) -> list[Key]:
        """A request has found and used these blocks: those of them that may move on now."""

    @abstractmethod
    def forget(self) -> None:
        """Forget every block, because the cache was cleared."""


class AdmitAll(AdmissionRule):
    """Every block moves on as soon as the tier above has it."""

    def admit(self, keys: Iterable[Key]) -> list[Key]:
        return list(keys)

    def hit(self, keys: Iterable[Key]) -> list[Key]:
        return list(keys)

    def forget(self) -> None:
        return


class FrequencyFilter(AdmissionRule):
    """Counts how often blocks are of use. Never walks over the whole table.

    Time passes for all blocks at once: an entry holds the *step* at which its frequency will have come down to 0, so a
    decay step adds one to a counter and touches no entry. Entries at 0 stay in the dict until they number a
    quarter of ``max_entries``. Then the dict becomes the old one, and every call moves a few living entries from it to
    a new one. Both hold integers only, which the garbage collector does not walk through: a key is remembered by
    Python's own hash of it, 64 bits that take less than half the memory. Should two blocks ever share one, a block is
    admitted early.

    When the table is full, a decay step comes early, and the next one is a whole interval later.
    """

    def __init__(
        self,
        clock: Clock,
        threshold: int = 2,
        decay_seconds: float = 600.0,
        max_entries: int = 1_000_000,
    ) -> None:
        if threshold < 1 or threshold > MAX_FREQUENCY or decay_seconds <= 0 or max_entries < 1:
            raise ValueError(f"cannot filter with {threshold=}, {decay_seconds=}, {max_entries=}")
        self.threshold = threshold
        self.decay_seconds = decay_seconds
        self.max_entries = max_entries
        self._clock = clock
        self._next_step = clock() + decay_seconds
        self._step = 0
        self._ends: dict[int, int] = {}  # hash of the key -> the step at which its frequency is 0
        self._old: dict[int, int] = {}  # entries not moved yet, living and dead
        self._ending = [0] * (MAX_FREQUENCY + 1)  # living entries by the step they end at, as a ring
        self._living = 0

    def admit(self, keys: Iterable[Key]) -> list[Key]:
        """A block that is not known starts at 1. Being offered again is no hit."""
        return self._count(keys, 1)

    def hit(self, keys: Iterable[Key]) -> list[Key]:
        """Doubles the frequency of each.

        A block that is no longer known, because it has come down to 0 or because the table was full, starts at 1 again
        and doubles by this very hit.
        """
        return self._count(keys, 2)

    def frequency(self, key: Key) -> int:
        """0 when the block is not known."""
        self._pass_time()
        end = self._ends.get(hash(key)) or self._old.get(hash(key)) or 0
        return max(0, end - self._step)

    def forget(self) -> None:
        self._ends, self._old = {}, {}
        self._ending = [0] * len(self._ending)
        self._living = 0

    def __len__(self) -> int:
        """Blocks with a frequency above 0."""
        self._pass_time()
        return self._living

    # -- inside -------------------------------------------------------------------------------------------------------

    def _count(self, keys: Iterable[Key], factor: int) -> list[Key]:
        self._pass_time()
        ends, ending, size = self._ends, self._ending, len(self._ending)
        admitted = []
        for key in keys:
            name = hash(key)
            end = ends.get(name, 0)
            if not end and self._old:
                end = self._old.pop(name, 0)
                self._move()
            frequency = end - self._step
            if frequency > 0:
                ending[end % size] -= 1
                frequency = min(frequency * factor, MAX_FREQUENCY)
            else:
                self._make_room()
                ends = self._ends
                self._living += 1
                frequency = factor
            end = self._step + frequency
            ends[name] = end
            ending[end % size] += 1
            if frequency >= self.threshold:
                admitted.append(key)
        return admitted

    def _move(self) -> None:
        for _ in range(min(_SWEEP, len(self._old))):
            name, end = self._old.popitem()
            if end > self._step:
                self._ends[name] = end

    def _make_room(self) -> None:
        if self._living >= self.max_entries:
            while self._living >= self.max_entries:
                self._decay()
            self._next_step = self._clock() + self.decay_seconds
        if not self._old and len(self._ends) >= 1.25 * self.max_entries:
            self._old, self._ends = self._ends, {}

    def _pass_time(self) -> None:
        now = self._clock()
        if now < self._next_step:
            return
        steps = int((now - self._next_step) / self.decay_seconds) + 1
        self._next_step += steps * self.decay_seconds
        for _ in range(min(steps, MAX_FREQUENCY)):
            self._decay()

    def _decay(self) -> None:
        self._step += 1
        place = self._step % len(self._ending)
        self._living -= self._ending[place]
        self._ending[place] = 0
