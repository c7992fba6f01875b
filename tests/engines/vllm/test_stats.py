"""KVBM's figures through vLLM's own hooks: what has changed, and only that."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
import observed
from kvbm.core.counts import Counts
from kvbm.engines.guard import Faults
from kvbm.engines.vllm import connector as module
from kvbm.engines.vllm.connector import DynamoConnector
from kvbm.engines.vllm.scheduler import SchedulerAdapter
from kvbm.engines.vllm.stats import SHOWN, KvbmPromMetrics, KvbmStats, figures, since

pytestmark = pytest.mark.engine


def prometheus():
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

    registry = CollectorRegistry()

    def kind(cls):
        return lambda **arguments: cls(registry=registry, **arguments)

    types = {Counter: kind(Counter), Gauge: kind(Gauge), Histogram: kind(Histogram)}

    class Config:
        kv_transfer_config = None

    metrics = KvbmPromMetrics(Config(), types, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})
    return metrics, registry


def test_counters_come_as_what_they_have_grown_by_and_gauges_as_they_are():
    before = figures(observed.SNAPSHOT)
    now = figures(observed.snapshot(matched_tokens=1000, outcomes={"loaded": 12, "not found": 18, "too short": 0}))
    changes = since(now, before)
    assert changes["kvbm_matched_tokens"] == {"": 40}
    assert changes["kvbm_requests_total"] == {"too short": 0}  # new, so that it is seen
    assert "kvbm_transfer_blocks_total" not in changes
    assert changes["kvbm_slots"] == now["kvbm_slots"]


def test_two_reports_are_worth_the_same_as_one():
    one = KvbmStats(data=since(figures(observed.SNAPSHOT), {}))
    later = observed.snapshot(matched_tokens=1000, tiers=[observed.HOST])
    both = one.aggregate(KvbmStats(data=since(figures(later), figures(observed.SNAPSHOT))))
    assert both.data["kvbm_matched_tokens"] == {"": 1000}
    assert both.data["kvbm_slots"]["host\x1ffree"] == 100


def test_the_log_line_has_what_moved():
    line = KvbmStats(data=since(figures(observed.SNAPSHOT), {})).reduce()
    assert line["matched_tokens"] == 960
    assert line["offload_blocks_d2h"] == 307
    assert line["host_cache_hit_rate"] == 0.458
    assert line["ttft_saved_seconds"] == 2.5
    assert "offload_blocks_d2d" not in line
    assert all(isinstance(value, int | float) for value in line.values())


def test_the_page_of_vllm_has_every_figure_by_engine():
    metrics, registry = prometheus()
    report = since(figures(observed.SNAPSHOT), {})
    metrics.observe(report, 0)
    metrics.observe(report, 0)
    metrics.observe(report, 1)
    way = {"model_name": "m", "source": "device", "target": "host"}

    def value(name, **labels):
        return registry.get_sample_value(name, labels)

    assert value("kvbm_transfer_blocks_total", engine="0", **way) == 2 * 307
    assert value("kvbm_transfer_blocks_total", engine="1", **way) == 307
    assert value("kvbm_offload_blocks_d2h_total", engine="1", model_name="m") == 307
    assert value("kvbm_slots", engine="0", model_name="m", tier="host", state="pinned") == 10
    shown = {family.name for family in registry.collect()}
    assert shown == {name.removesuffix("_total") for name in SHOWN}


def test_unlabelled_counters_are_there_from_the_start():
    _, registry = prometheus()
    assert registry.get_sample_value("kvbm_matched_tokens_total", {"model_name": "m", "engine": "0"}) == 0


@pytest.fixture
def connector():
    """The scheduler's side with figures of our own behind it."""
    adapter = SchedulerAdapter.__new__(SchedulerAdapter)
    adapter._active, adapter._faults = {"a request"}, Faults()
    adapter.session = SimpleNamespace(leader=None, counts=Counts())
    adapter.observer = SimpleNamespace(source=observed.FixedSource(), log=SimpleNamespace(changes=0))
    connector = DynamoConnector.__new__(DynamoConnector)
    connector._adapter, connector._faults = adapter, Faults()
    connector._reported, connector._reported_at, connector._report_due = {}, (), 0.0
    return connector


def happens(connector):
    connector._adapter.observer.log.changes += 1


def test_a_step_in_which_nothing_happened_reports_nothing(connector):
    connector._adapter._active.clear()
    assert connector.get_kv_connector_stats() is not None
    assert connector.get_kv_connector_stats() is None
    happens(connector)
    assert connector.get_kv_connector_stats() is not None


def test_while_requests_run_figures_are_reported_a_few_times_a_second(connector, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    reports = 0
    for _ in range(1000):  # ten seconds of steps
        happens(connector)
        now[0] += 0.01
        reports += connector.get_kv_connector_stats() is not None
    assert 35 <= reports <= 45
    assert connector._adapter.observer.source.asked == reports


def test_the_step_that_ends_the_last_request_reports_all(connector):
    assert connector.get_kv_connector_stats() is not None
    connector._adapter.observer.source.now = observed.snapshot(matched_tokens=5000)
    happens(connector)
    assert connector.get_kv_connector_stats() is None
    connector._adapter._active.clear()
    assert connector.get_kv_connector_stats().data["kvbm_matched_tokens"] == {"": 5000 - 960}
