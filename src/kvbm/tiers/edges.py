"""Edges: moves of blocks from one tier to another.

Blocks are written through: a block becomes a candidate when it has come to the source tier, or when a request has found
it again, as soon as the edge's admission rule admits it. Every step takes candidates as far as the limit on blocks
under way allows. The others wait in a queue of ``max_pending_blocks``; beyond it blocks are passed over, and get their
chance when a request finds them again. A block that waits is not pinned: the source tier may evict it before its turn.
So a slow target costs hits there: it never holds an engine block, and all edges together never hold more than half of
the near tier. A target that fails to write gets a pause (:mod:`kvbm.core.breaker`); reads from it go on.

A block can be found in the target tier when every rank has written it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from kvbm.core.breaker import Breaker
from kvbm.core.counts import Counts, add
from kvbm.core.keys import Key
from kvbm.core.manager import BlockManager
from kvbm.core.policy.admission import AdmitAll
from kvbm.plans import MovePlan, MoveResult
from kvbm.tiers.base import Route


class Move(msgspec.Struct, eq=False):
    """A move on its way, and the ranks that owe an answer."""

    plan: MovePlan
    ranks: set[int]
    bad: set[int] = set()
    seconds: float = 0.0

    def ends(self, rank: int, result: MoveResult) -> bool:
        """Take in a rank's answer. True when it was the last one."""
        if rank not in self.ranks:
            return False
        self.ranks.remove(rank)
        self.bad.update(result.bad)
        self.seconds = max(self.seconds, result.seconds)
        return not self.ranks


class Edge:
    """Part of the leader: called from its thread, never waits. ``block_bytes``: of all ranks together."""

    def __init__(self, route: Route, manager: BlockManager, ranks: int, counts: Counts, block_bytes: int) -> None:
        self.source = route.source or manager.near_tier
        self.target = route.target
        self.bypass = route.bypass
        self._manager = manager
        self._ranks = ranks
        self._counts = counts
        self._admission = AdmitAll() if route.admission is None else route.admission
        self._breaker = Breaker()
        self._block_bytes = block_bytes
        # Not limited by the source tier: only keys wait. With half of it as the limit, prompts whose stores were
        # confirmed in one step did not fit, and the end of the last one was passed over.
        self._max_waiting = route.max_pending_blocks
        self._max_pending = 0
        self.share_near_tier(1)
        self._waiting: dict[Key, None] = {}
        self._moves: dict[int, Move] = {}
        self.pending_blocks = 0

    def share_near_tier(self, edges: int) -> None:
        """So many edges take blocks of the near tier, or stage through it: together at most half of it."""
        self._max_pending = max(1, min(self._max_waiting, self._manager.near.size // 2 // edges))

    # -- candidates ---------------------------------------------------------------------------------------------------

    def stored(self, keys: Sequence[Key]) -> None:
        """These blocks can be found in the source tier from now on."""
        admitted = self._admission.admit(keys)
        add(self._counts.filtered_move_blocks, self.target, len(keys) - len(admitted))
        self._offer(admitted)

    def used(self, keys: Sequence[Key]) -> None:
        """A request has found these blocks, on any tier. Blocks that the target holds need no move."""
        there = self._manager.catalogs[self.target]
        absent = [key for key in keys if key not in there]
        if self.source != self._manager.near_tier:
            absent = [key for key in absent if key in self._manager.catalogs[self.source]]
        if absent:
            self._offer(self._admission.hit(absent))

    def _offer(self, keys: Sequence[Key]) -> None:
        room = self._max_waiting - len(self._waiting)
        self._waiting.update(dict.fromkeys(keys[:room]))
        add(self._counts.refused_move_blocks, self.target, len(keys[room:]))

    # -- plans --------------------------------------------------------------------------------------------------------

    def plan(self) -> MovePlan | None:
        """The next blocks to write. The caller must deliver the plan to every rank."""
        room = self._max_pending - self.pending_blocks
        if self.source != self._manager.near_tier:
            room = min(room, self._manager.staging_room)  # the others wait for staging slots
        if not self._waiting or room <= 0 or self.is_suspended:
            return None
        waiting = list(self._waiting)
        fitting = self._manager.catalogs[self.target].fitting(waiting, room)
        if not fitting and self.pending_blocks:
            return None  # there is more room once those have been written
        batch = waiting[: fitting or room]
        for key in batch:
            del self._waiting[key]
        here = self._manager.catalogs[self.source]
        gone = sum(key not in here for key in batch)
        add(self._counts.refused_move_blocks, self.target, gone)
        plan = self._manager.move(batch, self.target, self.source)
        if plan is None:
            return None
        self._moves[plan.id] = Move(plan, set(range(self._ranks)))
        self.pending_blocks += len(plan.slots)
        return plan

    def end(self, rank: int, result: MoveResult) -> list[Key]:
        """A rank has written its part of a move, or failed to. Returns the blocks that can be found in the target from
        now on. Ignores moves of other edges."""
        move = self._moves.get(result.id)
        if move is None or not move.ends(rank, result):
            return []
        del self._moves[result.id]
        blocks = len(move.plan.slots)
        self.pending_blocks -= blocks
        written = self._manager.finish_move(result.id, move.bad)
        if len(move.bad) == blocks:
            self._breaker.failed(time.monotonic())
        else:
            self._breaker.succeeded()
        add(self._counts.moved_blocks, self.target, len(written))
        add(self._counts.failed_move_blocks, self.target, len(move.bad))
        if written and move.seconds:
            self._counts.add_stored(self.target, blocks * self._block_bytes, move.seconds)
        return written

    def fail_rank(self, rank: int) -> None:
        self._waiting.clear()
        for plan_id, move in list(self._moves.items()):
            self.end(rank, MoveResult(plan_id, list(range(len(move.plan.slots)))))

    def reset(self) -> None:
        """The leader forgets every block. Moves under way end unpublished, because their source is gone."""
        self._waiting.clear()
        self._admission.forget()

    @property
    def is_suspended(self) -> bool:
        suspended = not self._manager.suspended.isdisjoint((self.source, self.target))
        return suspended or self._breaker.is_open(time.monotonic())

    @property
    def can_progress(self) -> bool:
        """Whether further steps bring it on: a rank owes an answer, or blocks that wait may be planned."""
        return bool(self._moves) or (bool(self._waiting) and not self.is_suspended)

    @property
    def under_way(self) -> bool:
        return bool(self._moves or self._waiting)

    @property
    def queued_blocks(self) -> int:
        return len(self._waiting)

    @property
    def is_persistent(self) -> bool:
        """Whether the next engine finds the blocks that are written; not after a reset."""
        return self._manager.catalogs[self.target].outlives_engine

    @property
    def admits_all(self) -> bool:
        return isinstance(self._admission, AdmitAll)
