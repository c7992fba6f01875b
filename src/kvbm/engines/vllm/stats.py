"""KVBM's figures in vLLM's own log line and on its /metrics page.

The scheduler's adapter returns the changes since vLLM's last call as plain dicts; vLLM carries them to the process that
serves its page. The figures are those of the metrics port, made from the same table; vLLM's client library adds
``_total`` to the names of counters that have none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvbm.observe.metrics import METRICS, Metric
from kvbm.observe.snapshot import Snapshot

# Without kvbm_info: vLLM's page has its own.
SHOWN: dict[str, Metric] = {metric.name: metric for metric in METRICS if metric.name != "kvbm_info"}

_SEPARATOR = "\x1f"  # between label values; none of ours holds it

Figures = dict[str, dict[str, float]]  # name -> label values, joined -> figure


def figures(snapshot: Snapshot) -> Figures:
    return {
        name: {_SEPARATOR.join(labels): value for labels, value in metric.read(snapshot)}
        for name, metric in SHOWN.items()
    }


def since(now: Figures, before: Figures) -> Figures:
    """What counters have grown by, and gauges as they are; without counters that stood still, unless they are new."""
    changes: Figures = {}
    for name, series in now.items():
        if SHOWN[name].kind == "gauge":
            changes[name] = series
            continue
        old = before.get(name, {})
        if grown := {k: value - old.get(k, 0) for k, value in series.items() if value != old.get(k)}:
            changes[name] = grown
    return changes


@dataclass
class KvbmStats(KVConnectorStats):
    """Changes since the last time vLLM asked: ``data`` is of the type Figures."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, series in other.data.items():
            mine = self.data.setdefault(name, {})
            for labels, value in series.items():
                mine[labels] = value if SHOWN[name].kind == "gauge" else mine.get(labels, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line: the counters without labels that have moved, and the rates."""
        line: dict[str, int | float] = {}
        for name, series in self.data.items():
            value = series.get("")
            if value and (SHOWN[name].kind == "counter" or name.endswith("_rate")):
                line[name.removeprefix("kvbm_").removesuffix("_total")] = round(value, 3)
        return line

    def is_empty(self) -> bool:
        return not self.data


class KvbmPromMetrics(KVConnectorPromMetrics):
    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {
            name: (self._counter_cls if metric.kind == "counter" else self._gauge_cls)(
                name=name, documentation=metric.help, labelnames=[*labelnames, *metric.labels]
            )
            for name, metric in SHOWN.items()
        }
        for name, metric in SHOWN.items():
            if not metric.labels:  # an absent counter looks like one that is not kept
                for values in per_engine_labelvalues.values():
                    self._metrics[name].labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        mine = self.per_engine_labelvalues[engine_idx]
        for name, series in transfer_stats_data.items():
            for labels, value in series.items():
                child = self._metrics[name].labels(*mine, *(labels.split(_SEPARATOR) if SHOWN[name].labels else ()))
                if SHOWN[name].kind == "counter":
                    child.inc(value)
                else:
                    child.set(value)
