"""Stores on one rank: blocks on their way from the engine to near slots.

Where the near tier outlives the engine, a store counts as confirmed when its blocks have been hashed: nothing writes to
their slots before. The checksums are recorded when the leader has called the store good.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from kvbm.plans import Copy, StorePlan, StoreResult
from kvbm.runtime.escapes import EscapeSample
from kvbm.tiers.base import Operation, PersistentMemory
from kvbm.tracing import annotate
from kvbm.transfer.base import Copier, Ticket


class Share(NamedTuple):
    """Which part of every store is this rank's to write, where several ranks keep one copy among them.

    A stretch, so that neighbours stay together; and another one with every plan, so that short stores go round.
    """

    place: int = 0
    writers: int = 1  # the first so many write; the others have nothing to do

    def of(self, plan: StorePlan) -> slice:
        if self.place >= self.writers:
            return slice(0, 0)
        turn, count = (self.place + plan.id) % self.writers, len(plan.copy.blocks)
        return slice(count * turn // self.writers, count * (turn + 1) // self.writers)


class Stores:
    """Part of the worker. ``check`` raises when a copy must not be made. ``kept``: the slab, where it persists.
    ``sample``: of packed blocks."""

    def __init__(
        self,
        share: Share,
        kept: PersistentMemory | None,
        check: Callable[[Copy], None],
        faults: Counter[str],
        sample: EscapeSample | None = None,
    ) -> None:
        self._share = share
        self._kept = kept
        self._check = check
        self._sample = sample
        self._faults = faults
        self.tickets: dict[int, Ticket] = {}
        self._to_hash: dict[int, Copy] = {}
        # Of a store under way: where in its plan this rank's part begins, and the slots of that part.
        self._parts: dict[int, tuple[int, list[int]]] = {}
        self._hashing: dict[int, tuple[Operation, StoreResult]] = {}
        self._hashed: dict[int, Operation] = {}  # until the leader says whether they were good
        self._ended: list[StoreResult] = []  # refused, failed at their start, or for other ranks to write
        self._spoiled: set[int] = set()  # the engine may have written over their source

    @property
    def under_way(self) -> bool:
        return bool(self.tickets or self._hashing)

    def reading(self, stores: Iterable[int]) -> dict[int, Ticket]:
        """Those of these stores that are still under way."""
        return {i: self.tickets[i] for i in stores if i in self.tickets}

    def spoil(self, stores: Iterable[int]) -> None:
        self._spoiled.update(stores)

    def refuse(self, store: StorePlan) -> None:
        self._ended.append(StoreResult(store.id, ok=False))

    def start(self, store: StorePlan, copier: Copier) -> None:
        """Start a store. One that cannot be started has failed."""
        try:
            self._check(store.copy)
            mine = self._share.of(store)
            if mine.start == mine.stop:
                self._ended.append(StoreResult(store.id))  # other ranks write it
                return
            slots = store.copy.slots[mine]
            with annotate("copier.store"):
                self.tickets[store.id] = copier.store(store.copy.blocks[mine], slots)
            self._parts[store.id] = mine.start, slots
            if self._kept is not None and store.copy.tags:
                self._to_hash[store.id] = store.copy
        except Exception as error:
            self._ended.append(StoreResult(store.id, ok=False))
            self._fault("store", error)

    def take_ended(self) -> list[StoreResult]:
        results, self._ended = self._ended, []
        for i, ticket in list(self.tickets.items()):
            first, slots = self._parts[i]
            escapes = None
            try:
                if not ticket.done():
                    continue
                ok, reason, seconds = not ticket.bad, ticket.reason, ticket.seconds
                unpackable = [first + position for position in ticket.unpackable]
                if ok and self._sample is not None:
                    escapes = self._sample.ratio(slots)
            except Exception as error:
                ok, reason, seconds, unpackable = False, f"{type(error).__name__}: {error}", 0.0, []
            del self.tickets[i], self._parts[i]
            result = StoreResult(i, ok and i not in self._spoiled, seconds, unpackable, escapes)
            self._spoiled.discard(i)
            if not self._hash(result):
                results.append(result)
            if reason:
                self._faults[f"store: {reason}"] += 1
        for i, (hashes, result) in list(self._hashing.items()):
            if hashes.done():
                del self._hashing[i]
                if not hashes.bad:
                    self._hashed[i] = hashes
                results.append(result)
        return results

    def _hash(self, result: StoreResult) -> bool:
        """Begin to hash the blocks of a store, where the next engine shall find them."""
        copy = self._to_hash.pop(result.id, None)
        if copy is None or not result.ok or self._kept is None:
            return False
        try:
            self._hashing[result.id] = self._kept.hash(copy.slots, copy.tags), result
        except Exception as error:
            self._fault("keep", error)
            return False
        return True

    def record(self, verdicts: Mapping[int, bool]) -> None:
        for store, good in verdicts.items():
            hashes = self._hashed.pop(store, None)
            if good and hashes is not None and self._kept is not None:
                try:
                    self._kept.record(hashes)
                except Exception as error:
                    self._fault("keep", error)

    def _fault(self, what: str, error: Exception) -> None:
        self._faults[f"{what}: {type(error).__name__}: {error}"] += 1
