"""Moves between tiers on one rank.

Blocks of the near tier are written to the target from their slots. Blocks of a staged tier are read into near slots
first, which the leader has lent for this, and written from there. Where the near tier is the target, they are read into
the slots where they stay. The worker polls; no step waits for a store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from kvbm.plans import MovePlan, MoveResult, TierName
from kvbm.tiers.base import Operation
from kvbm.tiers.staged_read import StagedStore


class _Move:
    """A move under way."""

    def __init__(self, plan: MovePlan, source: StagedStore | None, target: StagedStore | None) -> None:
        """``source``, ``target``: None for the near tier; not both."""
        self._plan = plan
        self._source, self._target = source, target
        self._bad: set[int] = set()
        self.reasons: set[str] = set()
        self._reading: list[Operation] = []  # chunk by chunk: loads of this tier see that it goes on
        self._began = self._ended = 0.0  # first byte that was read, and last
        self._read = 0  # positions whose reads have ended
        self._writing: Operation | None = None
        self._written: Sequence[int] = range(len(plan.slots))  # positions that are written
        if source is not None:
            near_slots, size = plan.via if target is not None else plan.targets, source.chunk_blocks
            for at in range(0, len(plan.slots), size):
                part = slice(at, at + size)
                try:
                    self._reading.append(source.read(plan.slots[part], near_slots[part], plan.tags[part]))
                except Exception as error:
                    if not self._reading:
                        raise
                    # Reads are under way: the move must not end, and give up their near slots, before they do.
                    self._bad.update(range(at, len(plan.slots)))
                    self.reasons.add(f"{type(error).__name__}: {error}")
                    break
        elif target is not None:
            self._writing = target.write(plan.targets, plan.slots, plan.tags)

    def poll(self) -> MoveResult | None:
        """None while it is under way."""
        if self._reading:
            while self._reading and self._reading[0].done():
                self._take_in(self._reading.pop(0))
            if self._reading:
                return None
            if self._target is None:
                return MoveResult(self._plan.id, sorted(self._bad), self._ended - self._began)
            self._written = good = [i for i in self._written if i not in self._bad]
            plan = self._plan
            targets, near_slots, tags = ([part[i] for i in good] for part in (plan.targets, plan.via, plan.tags))
            try:
                self._writing = self._target.write(targets, near_slots, tags)  # type: ignore[arg-type]
            except Exception as error:
                # An exception would lose the loads and stores that the same poll reports.
                self.reasons.add(f"{type(error).__name__}: {error}")
                return MoveResult(self._plan.id, list(range(len(self._plan.slots))))
        assert self._writing is not None
        if not self._writing.done():
            return None
        self._hear(self._writing)
        return MoveResult(self._plan.id, sorted(self._bad), self._writing.seconds)

    def _take_in(self, operation: Operation) -> None:
        """The oldest read has ended."""
        assert self._source is not None
        self._source.hear()
        self._bad.update(self._read + position for position in operation.bad)
        self._read += len(operation.slots)
        self._began = min(self._began or operation.began, operation.began)
        self._ended = max(self._ended, operation.ended)
        if operation.reason:
            self.reasons.add(operation.reason)

    def _hear(self, operation: Operation) -> None:
        self._bad.update(self._written[position] for position in operation.bad)
        if operation.reason:
            self.reasons.add(operation.reason)


class Moves:
    """Part of the worker. ``check_slots`` raises ValueError for slots that a tier does not have."""

    def __init__(
        self,
        near_tier: TierName,
        stores: Mapping[TierName, StagedStore],
        check_slots: Callable[[TierName, list[int]], None],
        faults: Counter[str],
    ) -> None:
        self._near_tier = near_tier
        self._stores = stores
        self._check_slots = check_slots
        self._faults = faults
        self._moves: dict[int, _Move] = {}
        self._failed: list[MovePlan] = []
        self._due: list[MovePlan] = []

    @property
    def under_way(self) -> bool:
        return bool(self._moves or self._due or self._failed)

    def add(self, moves: Sequence[MovePlan]) -> None:
        """Moves of the current step, which :meth:`start_due` starts. Those of a step that was never ended stay due."""
        self._due += moves

    def start_due(self) -> None:
        """Once a step: at its end or, where that comes later or not at all, with the next poll. vLLM polls before the
        end where there is a draft model, and ends no step that has no forward pass."""
        due, self._due = self._due, []
        self.start(due)

    def start(self, moves: Sequence[MovePlan]) -> None:
        for move in moves:
            try:
                self._moves[move.id] = self._start(move)
            except Exception as error:
                self._failed.append(move)
                self._faults[f"spill: {type(error).__name__}: {error}"] += 1

    def _start(self, move: MovePlan) -> _Move:
        source, target = self._stores.get(move.source), self._stores.get(move.target)
        known = {self._near_tier, *self._stores}
        if move.source == move.target or not known.issuperset((move.source, move.target)):
            raise RuntimeError(f"this rank cannot move blocks from {move.source} to {move.target}")
        self._check_slots(move.source, move.slots)
        self._check_slots(move.target, move.targets)
        if len(move.slots) != len(move.targets):
            raise ValueError(f"move of {len(move.slots)} blocks to {len(move.targets)} places")
        if source is not None and target is not None:
            self._check_slots(self._near_tier, move.via)
            if not len(move.via) == len(move.slots) == len(move.targets):
                raise ValueError(f"move of {len(move.slots)} blocks through {len(move.via)} staging slots")
        return _Move(move, source, target)

    def take_ended(self) -> list[MoveResult]:
        results = [MoveResult(move.id, list(range(len(move.slots)))) for move in self._failed]
        self._failed.clear()
        for i, move in list(self._moves.items()):
            if (result := move.poll()) is not None:
                del self._moves[i]
                results.append(result)
                self._faults.update(f"spill: {reason}" for reason in move.reasons)
        return results
