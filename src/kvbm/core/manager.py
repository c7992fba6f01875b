"""The tiers in order: what can be brought back, what should be kept, what has become of both.

The leader asks three questions of the manager and gets plans for the workers: where is this prefix (:meth:`lookup`),
bring it back (:meth:`load`), keep these blocks (:meth:`store`). When all ranks have answered, the leader ends each plan
with :meth:`finish_load` or :meth:`finish_store`. A plan holds its slots until then, and only until then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvbm.core.keys import Key
from kvbm.core.pool import Pool
from kvbm.plans import Copy, LoadPlan, StorePlan, Tier


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
        return Match(self.start, runs, pending, self.keys)

    def beyond(self, blocks: int) -> Match:
        """What :meth:`cut` leaves off."""
        runs: list[Run] = []
        at = 0
        for tier, slots in self.runs:
            if at + len(slots) > blocks:
                runs.append(Run(tier, slots[max(blocks - at, 0) :]))
            at += len(slots)
        return Match(self.start + min(blocks, at), runs, self.pending, self.keys)


class _Load(NamedTuple):
    runs: list[Run]


class _Store(NamedTuple):
    tier: Tier
    slots: list[int]


class BlockManager:
    """Bookkeeping over one pool a tier. ``pools`` is ordered: the first is written to and searched first."""

    def __init__(self, pools: dict[Tier, Pool]) -> None:
        if not pools:
            raise ValueError("a block manager needs at least one tier")
        self.pools = pools
        self._target = next(iter(pools))
        self._loads: dict[int, _Load] = {}
        self._stores: dict[int, _Store] = {}
        self._next_id = 0

    # -- bringing back ------------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[Key], start: int = 0, limit: int | None = None) -> Match:
        """The longest prefix of ``keys[start:limit]`` that is published, each block in the fastest tier that has it.

        The caller sets ``limit`` so that at least one token is left to compute: an engine needs its logits, so the last
        block of a prompt that is known to the end is never loaded.
        """
        end = len(keys) if limit is None else min(limit, len(keys))
        wanted = keys if end == len(keys) else keys[:end]
        runs: list[Run] = []
        (first, fastest), *slower = self.pools.items()
        at = start
        while at < end:
            key = wanted[at]
            if key in fastest:
                slots = fastest.match(wanted, at)
                runs.append(Run(first, slots))
                at += len(slots)
                continue
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
        return Match(start, runs, pending, wanted)

    def load(
        self,
        match: Match,
        request: str,
        blocks: Sequence[int],
        in_step: bool,
        after: list[int],
        layered: bool = False,
        tokens: int = 0,
    ) -> LoadPlan:
        """Plan to fill the engine's ``blocks`` from a match of the same length, and pin its slots until the end.

        Raises ValueError, and plans nothing, when the match is out of date: its slots may hold other blocks by now.
        """
        if len(blocks) != match.blocks:
            raise ValueError(f"{match.blocks} matched blocks cannot fill {len(blocks)} engine blocks")
        self._check(match)
        copies: list[Copy] = []
        at = 0
        for tier, slots in match.runs:
            self.pools[tier].pin(slots)
            copies.append(Copy(tier, slots, list(blocks[at : at + len(slots)])))
            at += len(slots)
        plan = LoadPlan(self._new_id(), request, copies, in_step, after, layered, tokens)
        self._loads[plan.id] = _Load(match.runs)
        return plan

    def hold(self, match: Match) -> None:
        """Keep a match from changing until :meth:`release`, without a plan for it yet.

        Raises ValueError, and holds nothing, when the match is out of date.
        """
        self._check(match)
        for tier, slots in match.runs:
            self.pools[tier].pin(slots)

    def release(self, match: Match) -> None:
        # Last run first, as in finish_load.
        for tier, slots in reversed(match.runs):
            self.pools[tier].unpin(slots)

    def _check(self, match: Match) -> None:
        at = match.start
        for tier, slots in match.runs:
            if self.pools[tier].match(match.keys[at : at + len(slots)]) != slots:
                raise ValueError("the match is out of date: look up again before loading")
            at += len(slots)

    def finish_load(self, plan_id: int, bad: Iterable[int] = ()) -> int:
        """Let go of a load's slots. Positions in ``bad`` did not arrive: these blocks are never found again.

        Returns how many blocks were dropped.
        """
        load = self._loads.pop(plan_id)
        spoiled = set(bad)
        dropped = 0
        end = sum(len(slots) for _, slots in load.runs)
        # Last run first: what is let go of last is evicted last, and that must be the front of the prefix.
        for tier, slots in reversed(load.runs):
            pool = self.pools[tier]
            at = end - len(slots)
            for position in spoiled:
                if at <= position < end:
                    key = pool.key_of(slots[position - at])
                    # None: already dropped by another load, or the tier was cleared meanwhile.
                    if key is not None and pool.drop(key):
                        dropped += 1
            pool.unpin(slots)
            end = at
        return dropped

    # -- keeping ------------------------------------------------------------------------------------------------------

    def store(self, keys: Sequence[Key], blocks: Sequence[int]) -> StorePlan | None:
        """Plan to keep the engine's ``blocks`` under ``keys``; what is held already is skipped.

        Takes as many as there is room for, first blocks first; None when nothing is left to do.
        """
        pool = self.pools[self._target]
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
        plan = StorePlan(self._new_id(), Copy(self._target, slots, [wanted[key] for key in fresh]))
        self._stores[plan.id] = _Store(self._target, slots)
        return plan

    def finish_store(self, plan_id: int, ok: bool) -> int:
        """Publish a store that every rank has confirmed, or forget it. Returns how many blocks became findable."""
        store = self._stores.pop(plan_id)
        pool = self.pools[store.tier]
        if ok:
            pool.publish(store.slots)
            return len(store.slots)
        pool.abandon(store.slots)
        return 0

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
        return bool(self._loads or self._stores)

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id
