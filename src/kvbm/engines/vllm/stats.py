"""KVBM's figures in vLLM's own log line and on its /metrics page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvbm.plans import Tier
from kvbm.runtime.leader import Counts

# name -> what it counts; names as upstream's dashboards know them.
COUNTERS = {
    "kvbm_matched_tokens": "Tokens found in KVBM's tiers beyond vLLM's own prefix cache",
    "kvbm_offload_blocks_d2h": "Blocks copied from the engine's cache to host memory",
    "kvbm_onboard_blocks_h2d": "Blocks copied from host memory back into the engine's cache",
    "kvbm_load_failures": "Blocks that could not be brought back and were computed again",
    "kvbm_store_failures": "Blocks that could not be kept",
    "kvbm_faults": "Faults inside KVBM that cost a hit",
}


def figures(counts: Counts, faults: int) -> dict[str, int]:
    return {
        "kvbm_matched_tokens": counts.matched_tokens,
        "kvbm_offload_blocks_d2h": counts.offloaded_blocks,
        "kvbm_onboard_blocks_h2d": counts.onboarded_blocks.get(Tier.HOST, 0),
        "kvbm_load_failures": counts.failed_load_blocks,
        "kvbm_store_failures": counts.failed_store_blocks + counts.tainted_store_blocks,
        "kvbm_faults": faults,
    }


@dataclass
class KvbmStats(KVConnectorStats):
    """Increments since the last time vLLM asked."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name.removeprefix("kvbm_"): value for name, value in self.data.items()}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class KvbmPromMetrics(KVConnectorPromMetrics):
    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, dict[int, Any]] = {}
        for name, documentation in COUNTERS.items():
            counter = self._counter_cls(name=name, documentation=documentation, labelnames=labelnames)
            self._counters[name] = {i: counter.labels(*values) for i, values in per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            if value and name in self._counters:
                self._counters[name][engine_idx].inc(value)
