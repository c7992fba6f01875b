"""The tiers in order: finds blocks to load, reserves slots to store to, and ends both when the ranks have reported.

The leader asks the manager where a prefix is (:meth:`lookup`) and gets plans for the workers: bring it back
(:meth:`load`), keep these blocks (:meth:`store`), copy them to another tier (:meth:`move`) or to the near one ahead of
their load (:meth:`fetch`). When all ranks have answered, the leader ends each plan with :meth:`finish_load`,
:meth:`finish_store`, :meth:`finish_move` or :meth:`finish_fetch`. A plan holds its slots until then, and only until
then.

Only the first tier, the *near* one, is next to the engine: the copier reaches its slots. Blocks of every other tier are
staged through near slots and stay there, so that the next request finds them nearer. If the near tier cannot give that
many slots, the load reuses a few in turn, and its blocks do not stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import NamedTuple

from kvbm.core.catalog import PENDING, Catalog, Hint
from kvbm.core.clock import OperationClock
from kvbm.core.keys import Key
from kvbm.core.match import Match, Run
from kvbm.core.policy import COMMON, NO_HINTS, Turn
from kvbm.core.pool import Pool
from kvbm.plans import Copy, LoadPlan, MovePlan, StorePlan, TierName

# Near slots that a load is staged through when its blocks cannot stay there: enough to keep a disk busy.
STAGING_SLOTS = 64


class _Held(NamedTuple):
    """One run of a load, pinned, and the near slots that it is staged through."""

    run: Run
    via: list[int]
    stays: bool  # in these slots


class _Store(NamedTuple):
    keys: list[Key]
    slots: list[int]


class BlockManager:
    """Bookkeeping over one catalog a tier, the fastest first. ``near`` has numbered slots next to the engine.
    ``clock``: of the catalogs' policies; each caller that begins an operation lets it tick."""

    def __init__(
        self, catalogs: Mapping[TierName, Catalog], staging_slots: int = STAGING_SLOTS,
        clock: OperationClock | None = None,
    ) -> None:  # fmt: skip
        if not catalogs:
            raise ValueError("a block manager needs at least one tier")
        self.catalogs = dict(catalogs)
        self.near_tier, near = next(iter(self.catalogs.items()))
        if not isinstance(near, Pool):
            raise TypeError(f"the first tier, {self.near_tier}, needs numbered slots")
        self.near = near
        self.clock = clock or OperationClock()
        # Tiers that get no work for the time being: no lookup finds anything there, no move goes there.
        self.suspended: set[TierName] = set()
        # Follows every key in the tags of persistent tiers. Changes when earlier blocks must not be found under the
        # same keys again, not even by the next engine.
        self.generation = b""
        # Whether stores carry tags as well: the workers of a near tier that outlives the engine hash its blocks. Not
        # even a reset changes it, because workers still wait for verdicts.
        self.tags_stores = near.outlives_engine
        self._staging_slots = staging_slots
        self._loads: dict[int, list[_Held]] = {}
        self._stores: dict[int, _Store] = {}
        self._moves: dict[int, tuple[MovePlan, list[Key]]] = {}
        self._fetches: dict[int, tuple[MovePlan, list[Key], int]] = {}  # and how often there was a clear before it
        self._clears = 0
        self.remote = {name: catalog for name, catalog in self.catalogs.items() if catalog.is_remote}
        self._ids = count(1)

    # -- bringing back ------------------------------------------------------------------------------------------------

    def lookup(
        self,
        keys: Sequence[Key],
        start: int = 0,
        limit: int | None = None,
        wait_for_writers: bool = True,
        hint: Hint | None = None,
    ) -> Match:
        """The longest prefix of ``keys[start:limit]`` that can be found, each block in the fastest tier that has it.

        The caller sets ``limit`` so that at least one token is left to compute: an engine needs its logits. Where the
        engine does not compute the last token once more by itself, the last block of a prompt that is known to the end
        is never loaded. With ``wait_for_writers`` a block that is being written to the near tier, or that a tier is
        still looking for, ends the match as pending: many requests with one prefix read it from a slow tier once.
        """
        end = len(keys) if limit is None else min(limit, len(keys))
        wanted = keys if end == len(keys) else keys[:end]
        runs: list[Run] = []
        near, slower = self.near, self._slower()
        expected = not slower
        pending = False
        at = start
        while at < end:
            key = wanted[at]
            if key in near:
                slots = near.match(wanted, at)
                runs.append(Run(self.near_tier, slots))
                at += len(slots)
                continue
            if wait_for_writers and near.is_writing(key):
                break
            if not expected:
                expected = True
                for _, catalog in slower:
                    catalog.expect(keys, at, hint)
            # A hole in the near tier is filled block by block, and no further than it reaches: a slower tier often
            # holds the rest of the prefix as well.
            place = None
            for tier, catalog in slower:
                place = catalog.find(key)
                if place == PENDING:
                    pending = True
                    place = None
                    if wait_for_writers:
                        break
                elif place is not None:
                    alone = catalog.is_remote and catalog.is_alone(place)
                    if runs and runs[-1].tier == tier and runs[-1].alone == alone:
                        runs[-1].slots.append(place)
                    else:
                        runs.append(Run(tier, [place], alone))
                    break
            if place is None:
                break
            at += 1
            pending = False
        # Not those of remote tiers: a block takes as long again to come back from there, and a store may stall.
        writers = (catalog for catalog in self.catalogs.values() if not catalog.is_remote)
        pending = pending or (at < end and any(catalog.is_writing(keys[at]) for catalog in writers))
        return Match(start, runs, pending, wanted, self._changes())

    def expect(self, keys: Sequence[Key], start: int, limit: int, hint: Hint | None = None) -> None:
        """A request with this prefix has come, and the engine has its first ``start`` blocks. Remote tiers begin to
        look for what the near tier lacks, up to block ``limit``. The lookup comes later."""
        wanted = keys[:limit]
        at = start + len(self.near.match(wanted, start))
        if at < len(wanted) and not self.near.is_writing(wanted[at]):
            for name, catalog in self.remote.items():
                if name not in self.suspended:
                    catalog.expect(keys, at, hint)

    def awaited_answer(self, key: Key) -> tuple[TierName, float] | None:
        """(tier that is looking for a block, expected seconds until it knows); None when no tier is."""
        for name, catalog in self.remote.items():
            if name not in self.suspended and (seconds := catalog.answer_seconds(key)) is not None:
                return name, seconds
        return None

    def coming_from(self, key: Key) -> TierName | None:
        """The tier that a block is being read from into the near tier, for a load or ahead of one; None when it is not
        on its way, or a store writes it. A read that a load has given up counts until it has ended."""
        slot = self.near.slot_of_writing(key)
        reads = [(held.run.tier, held.via) for load in self._loads.values() for held in load if held.stays]
        reads += [(plan.source, plan.targets) for plan, _, _ in self._fetches.values()]
        return next((tier for tier, slots in reads if slot in slots), None)

    def _slower(self) -> list[tuple[TierName, Catalog]]:
        return [item for item in self.catalogs.items() if item[0] != self.near_tier and item[0] not in self.suspended]

    def load(
        self,
        match: Match,
        request: str,
        blocks: Sequence[int],
        in_step: bool,
        after: list[int],
        layered: bool = False,
        tokens: int = 0,
        deadline_seconds: float = 0.0,
        tenant: int = COMMON,
        stall_seconds: float = 0.0,
    ) -> LoadPlan:
        """Plan to fill the engine's ``blocks`` from a match of the same length, and pin its slots until the end.

        Raises ValueError, and plans nothing, when the match is out of date: its slots may hold other blocks by now.
        """
        if len(blocks) != match.blocks:
            raise ValueError(f"{match.blocks} matched blocks cannot fill {len(blocks)} engine blocks")
        self._check(match)
        for tier, slots, _ in match.runs:
            self.catalogs[tier].pin(slots)  # all of them before staging slots evict any
        copies: list[Copy] = []
        held: list[_Held] = []
        at = 0
        for run in match.runs:
            tier, slots, _ = run
            mine = list(blocks[at : at + len(slots)])
            if tier == self.near_tier:
                held.append(_Held(run, [], stays=False))
                copies.append(Copy(tier, slots, mine))
            else:
                keys = list(match.keys[match.start + at : match.start + at + len(slots)])
                via, stays = self._reserve_staging(keys, tenant)
                held.append(_Held(run, via, stays))
                copies.append(Copy(tier, slots, mine, via, self._tags(keys)))
            at += len(slots)
        plan = LoadPlan(
            next(self._ids), request, copies, in_step, after, layered, tokens, deadline_seconds, stall_seconds
        )
        self._loads[plan.id] = held
        return plan

    def _reserve_staging(self, keys: list[Key], tenant: int) -> tuple[list[int], bool]:
        """(near slots to stage blocks through, whether the blocks stay in them)"""
        near = self.near
        # A block that another load is staging right now has its slot already, and must not get a second one.
        if not any(map(near.holds, keys)) and (slots := near.reserve(keys, [tenant] * len(keys))) is not None:
            return slots, True
        return near.lend(min(len(keys), self._staging_slots)), False

    def hold(self, match: Match) -> None:
        """Keep a match from changing until :meth:`release`, without a plan for it yet.

        Raises ValueError, and holds nothing, when the match is out of date.
        """
        self._check(match)
        for tier, slots, _ in match.runs:
            self.catalogs[tier].pin(slots)

    def release(self, match: Match) -> None:
        # Last run first, as in finish_load.
        for tier, slots, _ in reversed(match.runs):
            self.catalogs[tier].unpin(slots)

    def _changes(self) -> int:
        return sum(catalog.changes for catalog in self.catalogs.values())

    def _check(self, match: Match) -> None:
        if match.changes == self._changes():
            return
        at = match.start
        for tier, slots, _ in match.runs:
            if self.catalogs[tier].match(match.keys[at : at + len(slots)]) != slots:
                raise ValueError("the match is out of date: look up again before loading")
            at += len(slots)

    def finish_load(self, plan_id: int, bad: Iterable[int] = (), missed: Iterable[int] = (), keep: bool = True) -> int:
        """Let go of a load's slots. Positions in ``bad`` did not arrive: these blocks are never found again.

        Those in ``missed`` did not arrive either, with nothing known against them. Blocks that came from a slower tier
        can be found in the near one from now on, unless ``keep`` is False. Returns how many.
        """
        load = self._loads.pop(plan_id)
        spoiled = set(bad)
        absent = spoiled.union(missed)
        promoted = 0
        end = sum(len(held.run.slots) for held in load)
        # Last run first: the slots that are released last are evicted last, and those must be the front of the prefix.
        for (tier, slots, _), via, stays in reversed(load):
            catalog = self.catalogs[tier]
            at = end - len(slots)
            keys = (catalog.key_of(slots[position - at]) for position in spoiled if at <= position < end)
            # None: dropped by another load before, or the tier was cleared meanwhile.
            catalog.drop([key for key in keys if key is not None])
            catalog.unpin(slots)
            if stays:
                promoted += self._commit_staged(via, [keep and at + i not in absent for i in range(len(via))])
            else:
                self.near.take_back(via)
            end = at
        return promoted

    def _commit_staged(self, slots: list[int], arrived: list[bool]) -> int:
        there = [slot for slot, good in zip(slots, arrived, strict=True) if good]
        # Not for the journal: where the near tier outlives the engine, only stores are checksummed there.
        self.near.commit(there, journaled=False)
        self.near.abandon(slot for slot, good in zip(slots, arrived, strict=True) if not good)
        return len(there)

    # -- keeping ------------------------------------------------------------------------------------------------------

    def store(
        self, keys: Sequence[Key], blocks: Sequence[int], tenants: Sequence[int] | None = None
    ) -> StorePlan | None:
        """Plan to keep the engine's ``blocks`` under ``keys`` in the near tier, except those that it holds already.

        Takes as many as there is room for, first blocks first; None when nothing is left to do. ``tenants``: of each
        block; None: the common one.
        """
        pool = self.near
        if len(pool.match(keys)) == len(keys):
            return None  # for example a prompt that has just been brought back: no need to go through it block by block
        room = pool.available if not tenants else min(map(pool.room_for, set(tenants)))
        wanted: dict[Key, int] = {}
        in_front: dict[Key, None] = {}
        for key, block in zip(keys, blocks, strict=True):
            if room and key not in wanted:
                if not pool.holds(key):
                    wanted[key] = block
                    room -= 1
                elif key not in in_front and pool.is_evictable(key):
                    # A store must not evict the blocks in front of it: they are what makes it worth keeping.
                    room -= 1
                    in_front[key] = None
        if not wanted:
            return None
        fresh = list(wanted)
        owners = None if tenants is None else dict(zip(keys, tenants, strict=True))
        pool.touch(keys)
        pinned = pool.match(list(in_front)) if pool.free < len(fresh) else []
        pool.pin(pinned)
        slots = pool.reserve(fresh, None if owners is None else [owners[key] for key in fresh])
        pool.unpin(pinned)
        if slots is None:
            return None
        tags = self._tags(fresh) if self.tags_stores else []
        plan = StorePlan(next(self._ids), Copy(self.near_tier, slots, [wanted[key] for key in fresh], tags=tags))
        self._stores[plan.id] = _Store(fresh, slots)
        return plan

    def finish_store(self, plan_id: int, ok: bool, left_out: Iterable[int] = ()) -> list[Key]:
        """Publish a store that every rank has confirmed, or forget it. Returns the blocks that became findable.

        ``left_out``: positions of blocks that some rank could not keep.
        """
        store = self._stores.pop(plan_id)
        if not ok:
            self.near.abandon(store.slots)
            return []
        absent = set(left_out)
        if not absent:
            self.near.commit(store.slots)
            return store.keys
        self.near.abandon([store.slots[position] for position in sorted(absent)])
        kept = [position for position in range(len(store.slots)) if position not in absent]
        if kept:
            self.near.commit([store.slots[position] for position in kept])
        return [store.keys[position] for position in kept]

    # -- moving -------------------------------------------------------------------------------------------------------

    def move(self, keys: Iterable[Key], target: TierName, source: TierName | None = None) -> MovePlan | None:
        """Plan to copy blocks from one tier, the near one by default, to another, except those that are there already,
        or gone.

        Takes as many as there is room for, first blocks first; None when nothing is left to do. Blocks of a staged
        tier need a near slot each.
        """
        source = source or self.near_tier
        here, far = self.catalogs[source], self.catalogs[target]
        room = far.available
        if source != self.near_tier:
            room = min(room, self.staging_room)
        wanted = [key for key in dict.fromkeys(keys) if key in here and not far.holds(key)][:room]
        if not wanted or not self.suspended.isdisjoint((source, target)):
            return None
        slots = here.match(wanted)  # all of them are there
        targets = far.reserve(wanted, here.tenants_of(slots))
        if targets is None:
            return None
        here.pin(slots)
        via = [] if source == self.near_tier else self.near.lend(len(slots))
        plan = MovePlan(next(self._ids), source, target, slots, targets, self._tags(wanted), via)
        self._moves[plan.id] = plan, wanted
        return plan

    @property
    def staging_room(self) -> int:
        """Blocks of a staged tier that one move can take at present."""
        return min(self._staging_slots, self.near.available)

    def finish_move(self, plan_id: int, bad: Iterable[int] = ()) -> list[Key]:
        """Commit the blocks that every rank has written, forget the others. Returns those that became findable."""
        plan, keys = self._moves.pop(plan_id)
        here, far = self.catalogs[plan.source], self.catalogs[plan.target]
        spoiled = set(bad)
        written: dict[Key, int] = {}
        lost: list[int] = []
        for i, (key, slot, target) in enumerate(zip(keys, plan.slots, plan.targets, strict=True)):
            # A block that was dropped meanwhile has turned out bad, or the leader has reset the cache.
            if i not in spoiled and here.find(key) == slot:
                written[key] = target
            else:
                lost.append(target)
        far.commit(list(written.values()))
        far.abandon(lost)
        here.unpin(plan.slots, used=False)
        self.near.take_back(plan.via)
        return list(written)

    # -- fetching ahead -----------------------------------------------------------------------------------------------

    def fetch(self, match: Match, max_blocks: int, tenant: int = COMMON) -> list[MovePlan]:
        """Plan to bring the blocks of remote tiers in a match to the near tier, before the engine has room for them: up
        to so many, first blocks first. One plan for each tier."""
        self._check(match)
        places: dict[TierName, dict[Key, int]] = {}
        at = match.start
        for tier, slots, _ in match.runs:
            if tier in self.remote and tier not in self.suspended:
                fresh = ((key, place) for key, place in zip(match.keys[at : at + len(slots)], slots, strict=True))
                places.setdefault(tier, {}).update((key, place) for key, place in fresh if not self.near.holds(key))
            at += len(slots)
        plans: list[MovePlan] = []
        for tier, found in places.items():
            keys = list(found)[: min(max_blocks, self.near.available)]
            targets = self.near.reserve(keys, [tenant] * len(keys)) if keys else None
            if targets is None:
                continue
            slots = [found[key] for key in keys]
            self.catalogs[tier].pin(slots)
            plan = MovePlan(next(self._ids), tier, self.near_tier, slots, targets, self._tags(keys))
            self._fetches[plan.id] = plan, keys, self._clears
            plans.append(plan)
            max_blocks -= len(keys)
        return plans

    def finish_fetch(self, plan_id: int, bad: Iterable[int] = ()) -> int:
        """Publish the blocks that have come to every rank. Returns how many became findable in the near tier."""
        plan, keys, clears = self._fetches.pop(plan_id)
        spoiled = set(bad)
        source = self.catalogs[plan.source]
        source.drop([keys[position] for position in spoiled])
        source.unpin(plan.slots)
        # Every block that was on its way at a clear may be of other weights.
        arrived = [clears == self._clears and position not in spoiled for position in range(len(keys))]
        return self._commit_staged(plan.targets, arrived)

    # -- housekeeping -------------------------------------------------------------------------------------------------

    def touch(self, keys: Sequence[Key], turn: Turn = NO_HINTS, is_prefix: bool = False) -> None:
        """A request has ended that used these blocks, wherever it found them. Once for each request. ``is_prefix``:
        they are the front of its prompt, without a gap."""
        for catalog in self.catalogs.values():
            catalog.end_turn(keys, turn)
            if catalog.journal is not None:
                catalog.journal.touch(keys, is_prefix)

    def clear(self) -> int:
        """Forget every block of every tier; returns how many there were. Plans under way end as usual."""
        self._clears += 1
        return sum(catalog.clear() for catalog in self.catalogs.values())

    @property
    def outlives_engine(self) -> bool:
        """Whether the next engine finds blocks of this one in any tier."""
        return any(catalog.outlives_engine for catalog in self.catalogs.values())

    def close(self, timeout: float | None = None) -> None:
        """The engine ends: let every tier go. Waits, for ``timeout`` seconds a tier or a bound of its own."""
        for catalog in self.catalogs.values():
            catalog.close(timeout)

    @property
    def busy(self) -> bool:
        """True while any plan is under way."""
        return bool(self._loads or self._stores or self._moves or self._fetches)

    def _tags(self, keys: list[Key]) -> list[bytes]:
        return [key + self.generation for key in keys] if self.generation else keys
