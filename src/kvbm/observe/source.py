"""Snapshots of a leader."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping

from kvbm.core.cost import CostModel
from kvbm.observe.requests import RequestLog
from kvbm.observe.snapshot import DEVICE, Flow, Identity, Served, Snapshot, SourceFlow, TierState
from kvbm.plans import LoadPlan, TierName
from kvbm.runtime.leader import Leader

# Each kind of failure becomes a time series.
_MAX_KINDS = 32
_OTHER = "other"


class LeaderSource:
    """Reads a leader's numbers from any thread, while its own thread changes them.

    The interpreter reads a number and copies a dict atomically, so dicts are copied before iteration.
    ``leader``: returns the leader, or None once KVBM is disabled; its counts stay. ``failures``: reason -> count.
    """

    def __init__(
        self,
        identity: Identity,
        leader: Callable[[], Leader | None],
        log: RequestLog,
        cost: CostModel,
        failures: Mapping[str, int],
    ) -> None:
        self.identity = identity
        self.started = time.time()
        self._leader = leader
        self._log = log
        self._cost = cost
        self._failures = failures
        last = leader()
        assert last is not None
        self._last = last

    def snapshot(self, requests: int = 0) -> Snapshot:
        self._last = leader = self._leader() or self._last
        counts, log, cost = leader.counts, self._log, self._cost
        return Snapshot(
            at=time.time(),
            started=self.started,
            identity=self.identity,
            tiers=self._tiers(leader),
            flows=self._flows(leader),
            lookups=log.lookups,
            looked_up_blocks=log.looked_up_blocks,
            matched_tokens=counts.matched_tokens,
            matched_blocks=dict(counts.matched_blocks),
            hit_rates=log.hit_rates(),
            refused_blocks=_refused(leader),
            refused_loads=dict(counts.refused_load_blocks),
            outcomes=dict(log.outcomes),
            missed=dict(log.missed),
            failures=kinds(self._failures),
            saved=log.saved(cost.prefill_tokens_per_second, cost.prefill_is_measured),
            record_dropped=log.record.dropped,
            hints=dict(counts.hints),
            unpackable_blocks=counts.unpackable_blocks,
            escapes=counts.escapes,
            requests=log.latest(requests),
            sources=_sources(leader),
            served=_served(leader),
        )

    def _tiers(self, leader: Leader) -> list[TierState]:
        states = []
        is_bypassed = any(edge.bypass for edge in leader.edges)
        for tier, catalog in leader.manager.catalogs.items():
            if is_bypassed and tier == leader.manager.near_tier:
                continue  # the staging buffer of another tier
            free, writing, pinned = catalog.free, catalog.writing, catalog.pinned
            states.append(
                TierState(
                    tier=tier,
                    slots=catalog.size,
                    free=free,
                    writing=writing,
                    # Derived, so that the four add up although each is read at another moment.
                    idle=max(0, catalog.size - free - writing - pinned),
                    pinned=pinned,
                    block_bytes=self.identity.block_bytes,
                    evictions=catalog.evictions,
                    bytes_per_second=self._cost.rate(tier).bytes_per_second,
                    measured=self._cost.is_measured(tier),
                    bounded=catalog.is_bounded,
                    policy=catalog.policy,
                )
            )
        return states

    def _flows(self, leader: Leader) -> list[Flow]:
        """Every possible flow, including those without blocks so far: a dashboard needs its zeros."""
        counts, log = leader.counts, self._log
        loading: Counter[TierName] = Counter()
        storing: Counter[TierName] = Counter()
        for plan in leader.under_way():
            if isinstance(plan, LoadPlan):
                for copy in plan.copies:
                    loading[copy.tier] += len(copy.slots)
            else:
                storing[plan.copy.tier] += len(plan.copy.slots)
        near, flows = leader.manager.near_tier, []

        def add(source: str, target: str, blocks: int, seconds: float, failed: int, queued: int) -> None:
            size = blocks * self.identity.block_bytes
            flows.append(
                Flow(
                    source=source, target=target, blocks=blocks, bytes=size, seconds=seconds, failed_blocks=failed,
                    queued_blocks=queued,
                )
            )  # fmt: skip

        if not any(edge.bypass for edge in leader.edges):
            seconds = counts.stored_seconds.get(near, 0.0)
            add(DEVICE, near, counts.offloaded_blocks, seconds, log.failed_stores[near], storing[near])
        for edge in leader.edges:
            source, target = DEVICE if edge.bypass else edge.source, edge.target
            blocks, failed = counts.moved_blocks.get(target, 0), counts.failed_move_blocks.get(target, 0)
            add(source, target, blocks, counts.stored_seconds.get(target, 0.0), failed, edge.pending_blocks)
        for tier, catalog in leader.manager.catalogs.items():
            if catalog.is_remote:  # ahead of the load, while the request waits in the engine's queue
                blocks, failed = counts.fetched_blocks.get(tier, 0), counts.failed_fetch_blocks.get(tier, 0)
                # The seconds are counted with the loads of the tier.
                add(tier, near, blocks, 0.0, failed, leader.fetches.pending_blocks)
            blocks, seconds = counts.onboarded_blocks.get(tier, 0), counts.loaded_seconds.get(tier, 0.0)
            add(tier, DEVICE, blocks, seconds, log.failed_loads[tier], loading[tier])
        return flows


def _sources(leader: Leader) -> list[SourceFlow]:
    return [
        SourceFlow(
            tier=tier, source=state.source, path=state.path, blocks=state.blocks, bytes=state.bytes,
            bytes_per_second=state.bytes_per_second, refused=state.refused, suspended=state.is_suspended,
        )
        for tier, catalog in leader.manager.catalogs.items()
        for state in catalog.sources()
    ]  # fmt: skip


def _served(leader: Leader) -> list[Served]:
    return [
        Served(tier=tier, blocks=state.blocks, bytes=state.bytes, questions=state.questions, refused=state.refused)
        for tier, catalog in leader.manager.catalogs.items()
        if (state := catalog.served()) is not None
    ]


def _refused(leader: Leader) -> dict[str, int]:
    refused = {"queue full": leader.counts.refused_store_blocks}
    for edge in leader.edges:
        refused[f"{edge.target} queue full"] = leader.counts.refused_move_blocks.get(edge.target, 0)
        refused[f"{edge.target} filter"] = leader.counts.filtered_move_blocks.get(edge.target, 0)
    return refused


def kinds(failures: Mapping[str, int]) -> dict[str, int]:
    """Failures by kind: reasons without the text of an error, which is unbounded."""
    found: Counter[str] = Counter()
    for reason, times in dict(failures).items():
        parts = reason.split(": ")
        kind = ": ".join(parts[: 3 if parts[0].startswith("rank ") else 2])
        found[kind if kind in found or len(found) < _MAX_KINDS else _OTHER] += times
    return dict(found)
