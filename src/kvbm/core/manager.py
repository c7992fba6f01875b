"""The tiers in order: what can be brought back, what should be kept, what has become of both.

The leader asks of the manager where a prefix is (:meth:`lookup`) and gets plans for the workers: bring it back
(:meth:`load`), keep these blocks (:meth:`store`), copy them on to disk (:meth:`spill`). When all ranks have answered,
the leader ends each plan with :meth:`finish_load`, :meth:`finish_store` or :meth:`finish_spill`. A plan holds its slots
until then, and only until then.

Only the first tier, host memory, is next to the engine. What comes from a slower one passes through slots of the first
and stays there, so that the next request finds it nearer; where that many slots cannot be had, it passes through a few
and leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvbm.core.keys import Key
from kvbm.core.pool import Pool
from kvbm.plans import Copy, LoadPlan, SpillPlan, StorePlan, Tier

# Host slots that a load passes through when it cannot stay there: enough to keep a disk busy.
PASSAGE = 64


class Run(NamedTuple):
    """Consecutive blocks of a match that lie in one tier."""

    tier: Tier
    slots: list[int]


class Match(NamedTuple):
    """The longest prefix that can be brought back, from ``start`` on. Holds nothing: valid until the next change."""

    start: int  # index of the first block
    runs: list[Run]  # may alternate between tiers
    pending: bool  # the block after the last one is being written right now: asking again soon finds more
    keys: Sequence[Key]  # what was asked for; a load makes sure that the slots still hold it
    changes: int = -1  # of the pools, at the time: as long as there are no more they do
    awaited: Key | None = None  # what is being written, where that is not the next of the keys

    @property
    def blocks(self) -> int:
        return sum(len(run.slots) for run in self.runs)

    def cut(self, blocks: int) -> Match:
        """The first ``blocks`` blocks of the match."""
        pending = self.pending and blocks >= self.blocks
        runs: list[Run] = []
        for tier, slots in self.runs:
            if blocks <= 0:
                break
            runs.append(Run(tier, slots[:blocks]))
            blocks -= len(slots)
        return Match(self.start, runs, pending, self.keys, self.changes)

    def extended(self, run: Run, keys: Sequence[Key]) -> Match:
        """By the blocks that come after it, which lie in the tier of its last ones."""
        *runs, (tier, slots) = self.runs
        return Match(self.start, [*runs, Run(tier, slots + run.slots)], False, keys, self.changes)

    def beyond(self, blocks: int) -> Match:
        """What :meth:`cut` leaves off."""
        runs: list[Run] = []
        at = 0
        for tier, slots in self.runs:
            if at + len(slots) > blocks:
                runs.append(Run(tier, slots[max(blocks - at, 0) :]))
            at += len(slots)
        return Match(self.start + min(blocks, at), runs, self.pending, self.keys, self.changes)


class _Held(NamedTuple):
    """One run of a load, pinned, and the slots of the first tier that it passes through."""

    run: Run
    via: list[int]
    stays: bool  # in these slots


class _Store(NamedTuple):
    tier: Tier
    keys: list[Key]
    slots: list[int]


class _Spill(NamedTuple):
    keys: list[Key]
    slots: list[int]
    targets: list[int]


class BlockManager:
    """Bookkeeping over one pool a tier. ``pools`` is ordered: the first is written to and searched first."""

    def __init__(self, pools: dict[Tier, Pool], passage: int = PASSAGE) -> None:
        if not pools:
            raise ValueError("a block manager needs at least one tier")
        self.pools = pools
        # Tiers that nothing is looked for in, and nothing spilled to, for the time being.
        self.resting: set[Tier] = set()
        # Follows every key in the tags of a persistent tier. Changes when blocks of before must not be found under the
        # same keys again, not even by the next engine.
        self.seal = b""
        # Stores bear tags as well: the first tier outlives the engine.
        self.keeps_first = False
        self._target = next(iter(pools))
        self._passage = passage
        self._loads: dict[int, list[_Held]] = {}
        self._stores: dict[int, _Store] = {}
        self._spills: dict[int, _Spill] = {}
        self._next_id = 0

    # -- bringing back ------------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[Key], start: int = 0, limit: int | None = None, patient: bool = True) -> Match:
        """The longest prefix of ``keys[start:limit]`` that is published, each block in the fastest tier that has it.

        The caller sets ``limit`` so that at least one token is left to compute: an engine needs its logits. Where it
        does not compute the last token once more by itself, the last block of a prompt that is known to the end is
        never loaded. Who is ``patient`` does not take from a slower tier what is just being written to the first: many
        requests with one prefix shall read it from disk once.
        """
        end = len(keys) if limit is None else min(limit, len(keys))
        wanted = keys if end == len(keys) else keys[:end]
        runs: list[Run] = []
        (first, fastest), *slower = [item for item in self.pools.items() if item[0] not in self.resting]
        at = start
        while at < end:
            key = wanted[at]
            if key in fastest:
                slots = fastest.match(wanted, at)
                runs.append(Run(first, slots))
                at += len(slots)
                continue
            if patient and fastest.is_writing(key):
                break
            # A hole in the fastest tier is filled block by block, and no further than it reaches: a slower tier often
            # holds the rest of the prefix as well.
            for tier, pool in slower:
                slot = pool.find(key)
                if slot is None:
                    continue
                if runs and runs[-1].tier is tier:
                    runs[-1].slots.append(slot)
                else:
                    runs.append(Run(tier, [slot]))
                at += 1
                break
            else:
                break
        pending = at < end and any(pool.is_writing(keys[at]) for pool in self.pools.values())
        return Match(start, runs, pending, wanted, self._changes())

    def load(
        self,
        match: Match,
        request: str,
        blocks: Sequence[int],
        in_step: bool,
        after: list[int],
        layered: bool = False,
        tokens: int = 0,
        within: float = 0.0,
    ) -> LoadPlan:
        """Plan to fill the engine's ``blocks`` from a match of the same length, and pin its slots until the end.

        Raises ValueError, and plans nothing, when the match is out of date: its slots may hold other blocks by now.
        """
        if len(blocks) != match.blocks:
            raise ValueError(f"{match.blocks} matched blocks cannot fill {len(blocks)} engine blocks")
        self._check(match)
        for tier, slots in match.runs:
            self.pools[tier].pin_found(slots)  # all of them before room is made for any
        copies: list[Copy] = []
        held: list[_Held] = []
        at = 0
        for run in match.runs:
            tier, slots = run
            mine = list(blocks[at : at + len(slots)])
            if tier is self._target:
                held.append(_Held(run, [], stays=False))
                copies.append(Copy(tier, slots, mine))
            else:
                keys = list(match.keys[match.start + at : match.start + at + len(slots)])
                via, stays = self._way_up(keys)
                held.append(_Held(run, via, stays))
                copies.append(Copy(tier, slots, mine, via, self._tags(keys)))
            at += len(slots)
        plan = LoadPlan(self._new_id(), request, copies, in_step, after, layered, tokens, within)
        self._loads[plan.id] = held
        return plan

    def _way_up(self, keys: list[Key]) -> tuple[list[int], bool]:
        """(slots of the first tier to pass through, whether the blocks stay in them)"""
        pool = self.pools[self._target]
        # A block that somebody else is bringing up just now has its slot already, and would not need a second one.
        if not any(map(pool.holds, keys)) and (slots := pool.allocate(keys)) is not None:
            return slots, True
        return pool.lend(min(len(keys), self._passage)), False

    def hold(self, match: Match) -> None:
        """Keep a match from changing until :meth:`release`, without a plan for it yet.

        Raises ValueError, and holds nothing, when the match is out of date.
        """
        self._check(match)
        for tier, slots in match.runs:
            self.pools[tier].pin_found(slots)

    def release(self, match: Match) -> None:
        # Last run first, as in finish_load.
        for tier, slots in reversed(match.runs):
            self.pools[tier].unpin(slots)

    def _changes(self) -> int:
        return sum(pool.changes for pool in self.pools.values())

    def _check(self, match: Match) -> None:
        if match.changes == self._changes():
            return
        at = match.start
        for tier, slots in match.runs:
            if self.pools[tier].match(match.keys[at : at + len(slots)]) != slots:
                raise ValueError("the match is out of date: look up again before loading")
            at += len(slots)

    def finish_load(self, plan_id: int, bad: Iterable[int] = (), missed: Iterable[int] = (), keep: bool = True) -> int:
        """Let go of a load's slots. Positions in ``bad`` did not arrive: these blocks are never found again.

        Those in ``missed`` did not arrive either, for no fault of theirs. What came from a slower tier can be found in
        the first from now on, unless ``keep`` is False. Returns how many blocks have come to stay there.
        """
        load = self._loads.pop(plan_id)
        spoiled = set(bad)
        absent = spoiled.union(missed)
        promoted = 0
        end = sum(len(held.run.slots) for held in load)
        # Last run first: what is let go of last is evicted last, and that must be the front of the prefix.
        for (tier, slots), via, stays in reversed(load):
            pool = self.pools[tier]
            at = end - len(slots)
            for position in spoiled:
                if at <= position < end:
                    key = pool.key_of(slots[position - at])
                    # None: already dropped by another load, or the tier was cleared meanwhile.
                    if key is not None:
                        pool.drop(key)
            pool.unpin(slots)
            if stays:
                promoted += self._settle_promotion(via, [keep and at + i not in absent for i in range(len(via))])
            else:
                self.pools[self._target].take_back(via)
            end = at
        return promoted

    def _settle_promotion(self, slots: list[int], arrived: list[bool]) -> int:
        pool = self.pools[self._target]
        there = [slot for slot, good in zip(slots, arrived, strict=True) if good]
        pool.publish(there)
        pool.abandon(slot for slot, good in zip(slots, arrived, strict=True) if not good)
        return len(there)

    # -- keeping ------------------------------------------------------------------------------------------------------

    def store(self, keys: Sequence[Key], blocks: Sequence[int]) -> StorePlan | None:
        """Plan to keep the engine's ``blocks`` under ``keys``; what is held already is skipped.

        Takes as many as there is room for, first blocks first; None when nothing is left to do.
        """
        pool = self.pools[self._target]
        if len(pool.match(keys)) == len(keys):
            return None  # as of a prompt that has just been brought back: no need to go through it block by block
        room = pool.available
        wanted: dict[Key, int] = {}
        for key, block in zip(keys, blocks, strict=True):
            if room and key not in wanted:
                if not pool.holds(key):
                    wanted[key] = block
                    room -= 1
                elif pool.is_evictable(key):
                    # A store must not evict the blocks in front of it: they are what makes it worth keeping.
                    room -= 1
        if not wanted:
            return None
        pool.touch(keys)
        fresh = list(wanted)
        slots = pool.allocate(fresh)
        if slots is None:
            return None
        tags = self._tags(fresh) if self.keeps_first else []
        plan = StorePlan(self._new_id(), Copy(self._target, slots, [wanted[key] for key in fresh], tags=tags))
        self._stores[plan.id] = _Store(self._target, fresh, slots)
        return plan

    def finish_store(self, plan_id: int, ok: bool) -> list[Key]:
        """Publish a store that every rank has confirmed, or forget it. Returns the blocks that became findable."""
        store = self._stores.pop(plan_id)
        pool = self.pools[store.tier]
        if ok:
            pool.publish(store.slots)
            return store.keys
        pool.abandon(store.slots)
        return []

    # -- spilling -----------------------------------------------------------------------------------------------------

    def spill(self, keys: Iterable[Key], tier: Tier = Tier.DISK) -> SpillPlan | None:
        """Plan to copy blocks of the first tier on to a slower one; what is there already, or gone, is skipped.

        Takes as many as there is room for, first blocks first; None when nothing is left to do.
        """
        near, far = self.pools[self._target], self.pools[tier]
        wanted = [key for key in dict.fromkeys(keys) if key in near and not far.holds(key)][: far.available]
        targets = far.allocate(wanted) if wanted and tier not in self.resting else None
        if targets is None:
            return None
        slots = near.match(wanted)  # all of them are there
        near.pin(slots)
        plan = SpillPlan(self._new_id(), slots, targets, self._tags(wanted))
        self._spills[plan.id] = _Spill(wanted, slots, targets)
        return plan

    def finish_spill(self, plan_id: int, bad: Iterable[int] = (), tier: Tier = Tier.DISK) -> list[tuple[Key, int]]:
        """Publish what every rank has written, forget the rest. Returns what became findable, and its slots."""
        spill = self._spills.pop(plan_id)
        near, far = self.pools[self._target], self.pools[tier]
        spoiled = set(bad)
        written: list[tuple[Key, int]] = []
        lost: list[int] = []
        for i, (key, slot, target) in enumerate(zip(spill.keys, spill.slots, spill.targets, strict=True)):
            # A block that was dropped meanwhile has turned out bad, or has been forgotten on purpose.
            if i not in spoiled and near.find(key) == slot:
                written.append((key, target))
            else:
                lost.append(target)
        far.publish([target for _, target in written])
        far.abandon(lost)
        near.unpin(spill.slots)
        return written

    # -- housekeeping -------------------------------------------------------------------------------------------------

    def touch(self, keys: Sequence[Key]) -> None:
        """A request has used these blocks, wherever it found them."""
        for pool in self.pools.values():
            pool.touch(keys)

    def clear(self) -> int:
        """Forget every published block of every tier; returns how many there were. Plans under way end as usual."""
        return sum(pool.clear() for pool in self.pools.values())

    @property
    def busy(self) -> bool:
        """True while any plan is under way."""
        return bool(self._loads or self._stores or self._spills)

    def _tags(self, keys: list[Key]) -> list[bytes]:
        return [key + self.seal for key in keys] if self.seal else keys

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id
