"""Snapshots of a leader."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypeVar

from kvbm.core.cost import CostModel
from kvbm.observe.requests import RequestLog
from kvbm.observe.snapshot import DEVICE, Flow, Identity, Snapshot, TierState
from kvbm.plans import LoadPlan, Tier
from kvbm.runtime.leader import Leader

# Kinds of failures that are told apart: every one of them is a time series for good.
_MOST_KINDS = 32
_OTHER = "other"

Number = TypeVar("Number", int, float)


class LeaderSource:
    """Reads a leader's books from any thread, as they are.

    Single numbers are read in one go; dicts are copied before they are walked through, which the interpreter does in
    one go too. ``leader``: gives the one in charge, None once it has been let go of; what it had counted stays counted.
    ``failures``: reason -> how often.
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
            matched_blocks=_named(counts.matched_blocks),
            hit_rates=log.hit_rates(),
            refused_blocks=_refused(leader),
            refused_loads=dict(counts.refused_load_blocks),
            outcomes=dict(log.outcomes),
            missed=dict(log.missed),
            failures=kinds(self._failures),
            object_read_failures=log.failed_loads[Tier.OBJECT],
            object_write_failures=log.failed_stores[Tier.OBJECT],
            saved=log.saved(cost.prefill_tokens_per_second, cost.prefill_is_measured),
            record_dropped=log.record.dropped,
            requests=log.latest(requests),
        )

    def _tiers(self, leader: Leader) -> list[TierState]:
        states = []
        for tier, pool in leader.manager.pools.items():
            free, writing, pinned = pool.free, pool.writing, pool.pinned
            states.append(
                TierState(
                    tier=_name(tier),
                    slots=pool.size,
                    free=free,
                    writing=writing,
                    # Not what the pool says: read at another moment, it would not add up.
                    idle=max(0, pool.size - free - writing - pinned),
                    pinned=pinned,
                    block_bytes=self.identity.block_bytes,
                    evictions=pool.evictions,
                    bytes_per_second=self._cost.rate(tier).bytes_per_second,
                    measured=self._cost.is_measured(tier),
                )
            )
        return states

    def _flows(self, leader: Leader) -> list[Flow]:
        """Every way that blocks can go, also those that none has gone yet: a dashboard needs its zeros."""
        counts, log = leader.counts, self._log
        loading: Counter[Tier] = Counter()
        storing: Counter[Tier] = Counter()
        for plan in leader.under_way():
            if isinstance(plan, LoadPlan):
                for copy in plan.copies:
                    loading[copy.tier] += len(copy.slots)
            else:
                storing[plan.copy.tier] += len(plan.copy.slots)
        target = next(iter(leader.manager.pools))
        size = self.identity.block_bytes
        flows = []
        spills = leader.spills
        if spills is None or not spills.bypass:
            flows.append(
                Flow(
                    source=DEVICE,
                    target=_name(target),
                    blocks=counts.offloaded_blocks,
                    bytes=counts.offloaded_blocks * size,
                    seconds=counts.stored_seconds.get(target, 0.0),
                    failed_blocks=log.failed_stores[target],
                    queued_blocks=storing[target],
                )
            )
        if spills is not None:
            flows.append(
                Flow(
                    source=DEVICE if spills.bypass else _name(target),
                    target=_name(Tier.DISK),
                    blocks=counts.spilled_blocks,
                    bytes=counts.spilled_blocks * size,
                    seconds=counts.stored_seconds.get(Tier.DISK, 0.0),
                    failed_blocks=counts.failed_spill_blocks,
                    queued_blocks=spills.pending_blocks,
                )
            )
        for tier in leader.manager.pools:
            blocks = counts.onboarded_blocks.get(tier, 0)
            flows.append(
                Flow(
                    source=_name(tier),
                    target=DEVICE,
                    blocks=blocks,
                    bytes=blocks * size,
                    seconds=counts.loaded_seconds.get(tier, 0.0),
                    failed_blocks=log.failed_loads[tier],
                    queued_blocks=loading[tier],
                )
            )
        return flows


def _refused(leader: Leader) -> dict[str, int]:
    refused = {"queue full": leader.counts.refused_store_blocks}
    if leader.spills is not None:
        refused["disk queue full"] = leader.counts.refused_spill_blocks
        refused["disk filter"] = leader.counts.filtered_spill_blocks
    return refused


def _name(tier: Tier) -> str:
    return tier.name.lower()


def _named(figures: Mapping[Tier, Number]) -> dict[str, Number]:
    return {_name(tier): figure for tier, figure in dict(figures).items()}


def kinds(failures: Mapping[str, int]) -> dict[str, int]:
    """Failures by kind: reasons without what an error's text says, which may be anything."""
    found: Counter[str] = Counter()
    for reason, times in dict(failures).items():
        parts = reason.split(": ")
        kind = ": ".join(parts[: 3 if parts[0].startswith("rank ") else 2])
        found[kind if kind in found or len(found) < _MOST_KINDS else _OTHER] += times
    return dict(found)
