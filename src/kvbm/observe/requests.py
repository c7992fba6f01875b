"""The latest requests: the blocks that each tier had for them, and the reason for every load or its absence.

The engine's thread writes, in a few microseconds a request; any thread reads. The log is bounded and drops the oldest
requests. It also passes each event to the record, if there is one.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

import msgspec
import numpy as np

from kvbm.core.cost import Prices
from kvbm.core.match import Match
from kvbm.core.policy import NO_HINTS, Turn
from kvbm.observe.record import HintsLine, LookupLine, Sink, StoreLine
from kvbm.observe.snapshot import (
    EVICTED,
    LOADED,
    NEW,
    NOT_FOUND,
    ON_DEVICE,
    REFUSED,
    SKIPPED,
    TOO_SHORT,
    HitRates,
    Request,
    Saved,
)  # fmt: skip
from kvbm.plans import LoadPlan, StorePlan, TierName

# Shown on the page and in `kvbm top`; a request takes about half a kilobyte here.
LATEST = 256

WHY = {
    NOT_FOUND: "no tier has the next block",
    ON_DEVICE: "the engine has all of it itself",
    TOO_SHORT: "shorter than a block and a token",
    SKIPPED: "the request wants every token computed",
}


class Admission(NamedTuple):
    """The engine admits a request: its lookup and the result, counted in blocks."""

    request: str
    prompt_tokens: int
    device_tokens: int
    looked_up: int  # 0: there was no lookup
    missing: bytes | None  # the key at which the lookup ended; None if all were found
    found: Mapping[TierName, int]
    loaded: int
    block_tokens: int
    outcome: str = NOT_FOUND
    why: str = ""
    in_step: bool = False
    compute_seconds: float | None = None  # time to compute the loaded tokens, if known
    expected_seconds: float = 0.0  # until the prompt is computed, with the load
    recompute_seconds: float = 0.0  # the same without it
    others_running: bool = False


def looked_up(
    request: str, prompt_tokens: int, device_tokens: int, limit: int, found: Match, loaded: int, block_tokens: int
) -> Admission:
    """The admission of a request whose blocks were looked up as far as block ``limit``."""
    tiers: dict[TierName, int] = {}
    for tier, slots, _ in found.runs:
        tiers[tier] = tiers.get(tier, 0) + len(slots)
    end = found.start + sum(tiers.values())
    return Admission(
        request=request,
        prompt_tokens=prompt_tokens,
        device_tokens=device_tokens,
        looked_up=limit - found.start,
        missing=found.keys[end] if end < min(limit, len(found.keys)) else None,
        found=tiers,
        loaded=loaded,
        block_tokens=block_tokens,
        outcome=LOADED if loaded else REFUSED if tiers else NOT_FOUND,
    )


class _Entry(msgspec.Struct, eq=False):
    """A request so far. Its load may end later."""

    admission: Admission
    at: float
    load_seconds: float | None = None
    failed_tokens: int = 0
    saved: float | None = None
    lookups: list[LookupLine] = []  # for the record
    stores: list[StoreLine] = []
    hints: HintsLine | None = None
    tenant: str = ""


class Seen:
    """Remembers the last four million or so blocks that were computed, in 16 MiB.

    A table of fingerprints, in which a key overwrites another one in the same place. So it may forget a block, and it
    mistakes a new block for an old one once in four billion times.
    """

    _PLACES = 1 << 22

    def __init__(self) -> None:
        self._prints = np.full(self._PLACES, 0, dtype=np.uint32)  # faulted in now, not in a step

    def add(self, keys: Sequence[bytes]) -> None:
        if keys:
            places, prints = self._split(keys)
            self._prints[places] = prints

    def __contains__(self, key: bytes) -> bool:
        places, prints = self._split([key])
        return bool(self._prints[places[0]] == prints[0])

    def _split(self, keys: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        # The first eight bytes of each key. All keys of a request have one length.
        words = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(len(keys), -1)[:, :8].copy().view("<u8")[:, 0]
        # 0 is an empty place.
        return words & np.uint64(self._PLACES - 1), (words >> np.uint64(32)).astype(np.uint32) | np.uint32(1)


class RequestLog:
    """``window``: number of the latest lookups over which hit rates are computed."""

    def __init__(self, window: int = 1000, record: Sink | None = None, latest: int = LATEST) -> None:
        self.changes = 0  # counts all events, so that a reporter sees whether there were any
        # All labels from the start: a dashboard needs its zeros.
        self.outcomes = dict.fromkeys((LOADED, REFUSED, NOT_FOUND, ON_DEVICE, TOO_SHORT, SKIPPED), 0)
        self.missed = dict.fromkeys((NEW, EVICTED), 0)
        self.lookups = 0
        self.looked_up_blocks = 0
        self.failed_loads: Counter[TierName] = Counter()
        self.failed_stores: Counter[TierName] = Counter()
        self.loads = 0  # whose time is known
        self.saved_seconds = 0.0
        self.lost_seconds = 0.0
        self.record: Sink = record or Sink()
        self._seen = Seen()
        self._latest: deque[_Entry] = deque(maxlen=latest)
        self._running: dict[str, _Entry] = {}  # by request, from its first admission to its end
        self._loading: dict[int, _Entry] = {}  # by plan
        self._order = 0  # of recorded operations
        self._window: deque[tuple[int, dict[TierName, int]]] = deque(maxlen=window)
        self._blocks = 0
        self._hits: Counter[TierName] = Counter()

    @property
    def is_recording(self) -> bool:
        return type(self.record) is not Sink

    def _next(self) -> int:
        self._order += 1
        return self._order

    def admitted(self, admission: Admission, plan_id: int | None = None, prices: Prices | None = None) -> None:
        """``plan_id``: the load that the leader has planned for it. ``prices``: those of the decision."""
        self.changes += 1
        self.outcomes[admission.outcome] += 1
        entry = _Entry(admission, time.time())
        self._latest.append(entry)
        running = self._running.setdefault(admission.request, entry)
        if self.is_recording:
            running.lookups.append(
                LookupLine(
                    order=self._next(),
                    at=self.record.now(),
                    prompt_tokens=admission.prompt_tokens,
                    device_tokens=admission.device_tokens,
                    limit=admission.device_tokens // admission.block_tokens + admission.looked_up if prices else 0,
                    found=dict(admission.found),
                    loaded=admission.loaded,
                    others_running=admission.others_running,
                    prices=prices,
                )
            )
        if plan_id is not None:
            self._loading[plan_id] = entry
        if admission.missing is not None:
            self.missed[EVICTED if admission.missing in self._seen else NEW] += 1
        if admission.looked_up:
            self.lookups += 1
            self.looked_up_blocks += admission.looked_up
            self._count(admission.looked_up, dict(admission.found))

    def stores_planned(self, parts: Sequence[tuple[str, int, int]], plan_id: int) -> None:
        """For the record: these blocks (request, first, end) are stored together. ``plan_id``: 0 without a plan."""
        order, at = self._next(), self.record.now()
        for place, (request, first, end) in enumerate(parts):
            if (entry := self._running.get(request)) is not None:
                entry.stores.append(StoreLine(order, at, first, end, plan_id, place))

    def told(self, request: str, turn: Turn, tenant: str) -> None:
        """For the record: what the caller says of a request that is about to end. ``tenant``: empty without a share."""
        if (entry := self._running.get(request)) is None:
            return
        entry.tenant = tenant
        if turn != NO_HINTS:
            kept = [(r.priority, None if r.seconds == inf else r.seconds, r.start, r.end) for r in turn.retention]
            entry.hints = HintsLine(turn.session, turn.is_final, kept)

    def finished(self, request: str, output_tokens: int, keys: Sequence[bytes], found: int = 0) -> None:
        """A request has ended. ``keys``: of all its full blocks, including those of its answer. It has computed all but
        the first ``found``, which an earlier request has computed, perhaps one of an earlier engine."""
        was_here = 0 < found <= len(keys) and keys[found - 1] in self._seen
        self._seen.add(keys[found:] if was_here else keys)
        entry = self._running.pop(request, None)
        if entry is None:
            return
        known = entry.admission
        self.record.add(
            "request",
            keys,
            request=request,
            began=entry.at,
            input_length=known.prompt_tokens,
            output_length=output_tokens,
            device_tokens=known.device_tokens,
            found=_tokens(known),
            loaded_tokens=known.loaded * known.block_tokens,
            outcome=known.outcome,
            why=known.why,
            in_step=known.in_step,
            compute_seconds=known.compute_seconds,
            expected_seconds=known.expected_seconds,
            recompute_seconds=known.recompute_seconds,
            load_seconds=entry.load_seconds,
            lookups=entry.lookups,
            stores=entry.stores,
            **({} if entry.hints is None else {"hints": entry.hints}),
            **({"cache_salt": entry.tenant} if entry.tenant else {}),
            ended=self._next(),
        )

    # -- as the leader's watcher --------------------------------------------------------------------------------------

    def loaded(self, plan: LoadPlan, seconds: float, bad: set[int]) -> None:
        self.changes += 1
        blocks: Counter[TierName] = Counter()
        at = 0
        for copy in plan.copies:
            blocks[copy.tier] += len(copy.slots)
            if bad:
                self.failed_loads[copy.tier] += sum(position in bad for position in range(at, at + len(copy.slots)))
            at += len(copy.slots)
        named = dict(blocks)
        self.record.add(
            "load", plan=plan.id, request=plan.request, blocks=named, seconds=seconds, bad=len(bad),
            lost=sorted(bad), order=self._next(),
        )  # fmt: skip
        entry = self._loading.pop(plan.id, None)
        if entry is None:
            return
        known = entry.admission
        entry.failed_tokens = min(len(bad), known.loaded) * known.block_tokens
        if not seconds:
            return
        entry.load_seconds = seconds
        if known.compute_seconds is None:
            return
        # After a failure the engine recomputes from the first missing block on. How much the load saved is then
        # unknown, so only its cost counts.
        entry.saved = (0.0 if bad else known.compute_seconds) - entry.load_seconds
        self.loads += 1
        if entry.saved >= 0:
            self.saved_seconds += entry.saved
        else:
            self.lost_seconds -= entry.saved

    def stored(self, plan: StorePlan, seconds: float, ok: bool) -> None:
        self.changes += 1
        tier, blocks = plan.copy.tier, len(plan.copy.blocks)
        if not ok:
            self.failed_stores[tier] += blocks
        self.record.add("store", plan=plan.id, tier=tier, blocks=blocks, seconds=seconds, ok=ok, order=self._next())

    def moves_planned(self) -> None:
        self.record.add("moves", order=self._next())

    def moved(self, plan_id: int, target: TierName, blocks: int, bad: int) -> None:
        self.record.add("move", plan=plan_id, tier=target, blocks=blocks, bad=bad, order=self._next())

    def reset(self) -> None:
        """The leader has forgotten every block."""
        self.changes += 1
        self.record.add("reset", order=self._next())

    def _count(self, blocks: int, hits: dict[TierName, int]) -> None:
        if len(self._window) == self._window.maxlen:
            old_blocks, old_hits = self._window[0]
            self._blocks -= old_blocks
            self._hits.subtract(old_hits)
        self._window.append((blocks, hits))
        self._blocks += blocks
        self._hits.update(hits)

    # -- for any thread -----------------------------------------------------------------------------------------------

    def hit_rates(self) -> HitRates:
        hits = {tier: blocks for tier, blocks in self._hits.copy().items() if blocks}
        return HitRates(requests=len(self._window), blocks=self._blocks, hits=hits)

    def saved(self, prefill_tokens_per_second: float, measured: bool) -> Saved:
        return Saved(
            saved_seconds=self.saved_seconds,
            lost_seconds=self.lost_seconds,
            loads=self.loads,
            prefill_tokens_per_second=prefill_tokens_per_second,
            measured=measured,
        )

    def latest(self, count: int) -> list[Request]:
        """The newest first."""
        if count <= 0:
            return []
        return [_public(entry) for entry in reversed(list(self._latest)[-count:])]


def _tokens(admission: Admission) -> dict[str, int]:
    return {tier: blocks * admission.block_tokens for tier, blocks in admission.found.items()}


def _public(entry: _Entry) -> Request:
    known = entry.admission
    return Request(
        id=known.request,
        at=entry.at,
        prompt_tokens=known.prompt_tokens,
        device_tokens=known.device_tokens,
        found=_tokens(known),
        loaded_tokens=known.loaded * known.block_tokens,
        why=known.why or WHY.get(known.outcome, ""),
        in_step=known.in_step,
        load_seconds=entry.load_seconds,
        failed_tokens=entry.failed_tokens,
        saved_seconds=entry.saved,
    )
