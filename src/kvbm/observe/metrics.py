"""Every metric, declared once: its name, its meaning and the place of its value in a snapshot.

The table has two readers: the metrics port writes all metrics as Prometheus text, and the engine's own hooks (vLLM's
connector stats) show them on the engine's page. The first part has the names of existing dashboards for KVBM: no labels
and, against Prometheus' convention, no ``_total``. Prometheus' client library cannot write such a counter, so this
module writes the text format itself. The second part follows the convention and has more metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Literal, NamedTuple

from kvbm.observe.snapshot import DEVICE, Flow, Snapshot
from kvbm.tiers.base import Tier
from kvbm.tiers.registry import TIERS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = tuple[str, ...]
Series = Iterable[tuple[Labels, float]]


class Metric(NamedTuple):
    name: str
    kind: Literal["counter", "gauge"]
    help: str
    read: Callable[[Snapshot], Series]
    labels: Labels = ()
    customary: bool = True  # False: a name of existing dashboards, without labels


def _one(read: Callable[[Snapshot], float]) -> Callable[[Snapshot], Series]:
    return lambda snapshot: [((), read(snapshot))]


def _by_name(read: Callable[[Snapshot], Mapping[str, float]]) -> Callable[[Snapshot], Series]:
    # list(): the engine's thread may add a reason during the iteration.
    return lambda snapshot: [((name,), value) for name, value in list(read(snapshot).items())]


def _flow(
    source: str, target: str, figure: Callable[[Flow], float] = lambda flow: flow.blocks
) -> Callable[[Snapshot], Series]:
    """A figure of the flow from one place to another; an empty source means any."""

    def read(snapshot: Snapshot) -> Series:
        flows = (flow for flow in snapshot.flows if flow.target == target and source in ("", flow.source))
        return [((), sum(map(figure, flows)))]

    return read


def _flows(read: Callable[[Flow], float]) -> Callable[[Snapshot], Series]:
    return lambda snapshot: [((flow.source, flow.target), read(flow)) for flow in snapshot.flows]


def _slots(snapshot: Snapshot) -> Iterator[tuple[Labels, float]]:
    for tier in snapshot.tiers:
        for state in ("free", "writing", "idle", "pinned"):
            yield (tier.tier, state), getattr(tier, state)


def _upstream(tier: Tier) -> Iterator[Metric]:
    """The metrics of a tier under the names of existing dashboards."""
    for ending, source in tier.offload_metrics.items():
        way = f"from {source} to {tier.name}" if source else f"to {tier.name}"
        yield Metric(f"kvbm_offload_blocks_{ending}", "counter", f"Blocks offloaded {way}", _flow(source, tier.name))
    yield Metric(
        f"kvbm_onboard_blocks_{tier.onboard_metric}",
        "counter",
        f"Blocks onboarded from {tier.name} to {DEVICE}",
        _flow(tier.name, DEVICE),
    )
    yield Metric(
        f"kvbm_{tier.name}_cache_hit_rate",
        "gauge",
        f"Fraction of the latest requests' blocks that the {tier.name} tier had (0 to 1)",
        _one(lambda s: s.hit_rates.rate(tier.name)),
    )
    if tier.counts_failures:
        for what, source, target in (("read", tier.name, DEVICE), ("write", "", tier.name)):
            yield Metric(
                f"kvbm_{tier.name}_{what}_failures",
                "counter",
                f"Blocks that could not be {'read from' if what == 'read' else 'written to'} the {tier.name} tier",
                _flow(source, target, lambda flow: flow.failed_blocks),
            )


_UPSTREAM = (
    Metric("kvbm_matched_tokens", "counter", "Tokens found in KVBM's tiers beyond the engine's own cache, and loaded",
           _one(lambda s: s.matched_tokens)),
    *(metric for tier in TIERS.values() if tier.onboard_metric for metric in _upstream(tier)),
)  # fmt: skip

_WAY = ("source", "target")
_SOURCE = ("tier", "source")

_CUSTOMARY = (
    Metric("kvbm_transfer_blocks_total", "counter", "Blocks moved between tiers; a block counts once, not once a rank",
           _flows(lambda f: f.blocks), _WAY),
    Metric("kvbm_transfer_bytes_total", "counter", "Bytes moved between tiers, all ranks together",
           _flows(lambda f: f.bytes), _WAY),
    Metric("kvbm_transfer_seconds_total", "counter", "Duration of transfers, each on its slowest rank",
           _flows(lambda f: f.seconds), _WAY),
    Metric("kvbm_transfer_failed_blocks_total", "counter", "Blocks that did not arrive, and were recomputed or dropped",
           _flows(lambda f: f.failed_blocks), _WAY),
    Metric("kvbm_transfer_queued_blocks", "gauge", "Blocks whose transfer is planned or running",
           _flows(lambda f: f.queued_blocks), _WAY),
    Metric("kvbm_slots", "gauge", "Slots of a tier by state: free, writing, idle (hold a block), pinned (being read)",
           _slots, ("tier", "state")),
    Metric("kvbm_capacity_bytes", "gauge", "Size of a tier, all ranks together",
           lambda s: [((tier.tier,), tier.slots * tier.block_bytes) for tier in s.tiers], ("tier",)),
    Metric("kvbm_evictions_total", "counter", "Blocks evicted to make room for others",
           lambda s: [((tier.tier,), tier.evictions) for tier in s.tiers], ("tier",)),
    Metric("kvbm_lookups_total", "counter", "Requests whose prefix was looked up", _one(lambda s: s.lookups)),
    Metric("kvbm_lookup_blocks_total", "counter", "Blocks looked up, beyond those in the engine's own cache",
           _one(lambda s: s.looked_up_blocks)),
    Metric("kvbm_matched_blocks_total", "counter", "Blocks found and loaded, by the tier that had them",
           _by_name(lambda s: s.matched_blocks), ("tier",)),
    Metric("kvbm_missed_lookups_total", "counter", "Lookups that ended at a block that no tier has: never computed "
           "before (new), or evicted (evicted)",
           _by_name(lambda s: s.missed), ("why",)),
    Metric("kvbm_requests_total", "counter", "Requests that the engine admitted, by the outcome of their lookup",
           _by_name(lambda s: s.outcomes), ("outcome",)),
    Metric("kvbm_refused_blocks_total", "counter", "Blocks not kept, or not moved to the next tier, by reason",
           _by_name(lambda s: s.refused_blocks), ("reason",)),
    Metric("kvbm_unpackable_blocks_total", "counter", "Blocks that do not fit a packed slot, and were not kept",
           _one(lambda s: s.unpackable_blocks)),
    Metric("kvbm_packed_ratio", "gauge", "Bytes of a block in a tier, by those in the engine's memory; 1: not packed",
           _one(lambda s: s.identity.packed)),
    Metric("kvbm_packed_escape_ratio", "gauge", "Share of the values of packed blocks that need an escape, of a sample "
           "of blocks; slots have room for 0.019 of 4,096 neighbours",
           _one(lambda s: s.escapes)),
    Metric("kvbm_refused_load_blocks_total", "counter", "Blocks found but not loaded, by reason",
           _by_name(lambda s: s.refused_loads), ("reason",)),
    Metric("kvbm_hints_total", "counter", "Hints of routers and clients about where a prefix lies, by what became of "
           "them: taken, or ignored as stale, unknown or malformed",
           _by_name(lambda s: s.hints), ("outcome",)),
    Metric("kvbm_failures_total", "counter", "Faults inside KVBM that cost a hit, or events, by reason",
           _by_name(lambda s: s.failures), ("reason",)),
    Metric("kvbm_ttft_saved_seconds_total", "counter", "Time to first token saved, estimated: the time to compute the "
           "loaded tokens at the measured speed of prefill, less the time of their loads",
           _one(lambda s: s.saved.saved_seconds)),
    Metric("kvbm_ttft_lost_seconds_total", "counter", "The same for loads that took longer than computing",
           _one(lambda s: s.saved.lost_seconds)),
    Metric("kvbm_prefill_tokens_per_second", "gauge", "Speed of prefill as measured, for the first tokens of a prompt",
           _one(lambda s: s.saved.prefill_tokens_per_second)),
    Metric("kvbm_load_bytes_per_second", "gauge", "Speed of loads from a tier as measured, on one rank",
           lambda s: [((tier.tier,), tier.bytes_per_second) for tier in s.tiers], ("tier",)),
    Metric("kvbm_source_blocks_total", "counter", "Blocks that came from one source of a tier, and were verified",
           lambda s: [((each.tier, each.source), each.blocks) for each in s.sources], _SOURCE),
    Metric("kvbm_source_bytes_total", "counter", "Bytes that came from one source of a tier, all ranks together",
           lambda s: [((each.tier, each.source), each.bytes) for each in s.sources], _SOURCE),
    Metric("kvbm_source_bytes_per_second", "gauge", "Speed of reads from one source as measured, on one rank",
           lambda s: [((each.tier, each.source), each.bytes_per_second) for each in s.sources], _SOURCE),
    Metric("kvbm_source_refused_blocks_total", "counter", "Blocks of one source that did not come or were refused, and "
           "questions that it did not answer, by kind",
           lambda s: [((each.tier, each.source, kind), number) for each in s.sources
                      for kind, number in each.refused.items()], (*_SOURCE, "kind")),
    Metric("kvbm_served_blocks_total", "counter", "Blocks that other engines have read from this one; a block counts "
           "once for each rank that read it", lambda s: [((each.tier,), each.blocks) for each in s.served], ("tier",)),
    Metric("kvbm_served_bytes_total", "counter", "Bytes that other engines have read from this one",
           lambda s: [((each.tier,), each.bytes) for each in s.served], ("tier",)),
    Metric("kvbm_served_questions_total", "counter", "Questions of other engines which blocks are here",
           lambda s: [((each.tier,), each.questions) for each in s.served], ("tier",)),
    Metric("kvbm_served_refused_total", "counter", "Connections and reads of other engines that were refused, by kind",
           lambda s: [((each.tier, kind), number) for each in s.served for kind, number in each.refused.items()],
           ("tier", "kind")),
    Metric("kvbm_record_dropped_total", "counter", "Lines that the record of decisions dropped",
           _one(lambda s: s.record_dropped)),
    Metric("kvbm_start_time_seconds", "gauge", "When KVBM started, in Unix time", _one(lambda s: s.started)),
    Metric("kvbm_info", "gauge", "1, labelled with versions, engine and model",
           lambda s: [((s.identity.kvbm, s.identity.engine, s.identity.engine_version, s.identity.model,
                        str(s.identity.ranks)), 1)],
           ("version", "engine", "engine_version", "model", "ranks")),
)  # fmt: skip

METRICS: tuple[Metric, ...] = tuple(metric._replace(customary=False) for metric in _UPSTREAM) + _CUSTOMARY


def render(snapshot: Snapshot) -> bytes:
    """All metrics as Prometheus text."""
    lines: list[str] = []
    for metric in METRICS:
        lines.append(f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.kind}\n")
        lines += (f"{_start(metric, values)}{value}\n" for values, value in metric.read(snapshot))
    return "".join(lines).encode()


@cache
def _start(metric: Metric, values: Labels) -> str:
    """The part of a line before its value: constant for each series."""
    labels = ",".join(f'{name}="{_escape(value)}"' for name, value in zip(metric.labels, values, strict=True))
    return f"{metric.name}{{{labels}}} " if labels else f"{metric.name} "


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
