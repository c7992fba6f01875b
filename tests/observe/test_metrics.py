"""The table of metrics: names that dashboards know, the text Prometheus reads, and every figure in its place."""

from __future__ import annotations

import re

import pytest

import observed
from kvbm.observe.metrics import METRICS, render
from kvbm.observe.snapshot import SourceFlow

UPSTREAM = {
    "kvbm_matched_tokens": ("counter", 960),
    "kvbm_offload_blocks_d2h": ("counter", 307),
    "kvbm_offload_blocks_h2d": ("counter", 100),
    "kvbm_offload_blocks_d2d": ("counter", 0),
    "kvbm_offload_blocks_d2o": ("counter", 0),
    "kvbm_onboard_blocks_h2d": ("counter", 55),
    "kvbm_onboard_blocks_d2d": ("counter", 5),
    "kvbm_onboard_blocks_o2d": ("counter", 0),
    "kvbm_host_cache_hit_rate": ("gauge", 55 / 120),
    "kvbm_disk_cache_hit_rate": ("gauge", 5 / 120),
    "kvbm_object_cache_hit_rate": ("gauge", 0),
    "kvbm_object_read_failures": ("counter", 0),
    "kvbm_object_write_failures": ("counter", 0),
}


@pytest.fixture(scope="module")
def text():
    return render(observed.SNAPSHOT).decode()


def value(text, series):
    return float(re.search(rf"^{re.escape(series)} (\S+)$", text, re.M).group(1))


@pytest.mark.parametrize(("name", "expected"), UPSTREAM.items())
def test_a_name_that_dashboards_know_has_no_labels_and_no_suffix(text, name, expected):
    kind, figure = expected
    assert f"# TYPE {name} {kind}\n" in text
    assert value(text, name) == figure
    assert f"{name}_total" not in text
    assert f"{name}{{" not in text


def test_upstream_names_are_exactly_these():
    assert {metric.name for metric in METRICS if not metric.customary} == set(UPSTREAM)


@pytest.mark.parametrize(
    ("series", "figure"),
    [
        ('kvbm_transfer_bytes_total{source="device",target="host"}', 307e6),
        ('kvbm_transfer_seconds_total{source="disk",target="device"}', 0.125),
        ('kvbm_transfer_failed_blocks_total{source="device",target="host"}', 2),
        ('kvbm_transfer_queued_blocks{source="device",target="host"}', 20),
        ('kvbm_slots{tier="host",state="pinned"}', 10),
        ('kvbm_slots{tier="disk",state="free"}', 900),
        ('kvbm_capacity_bytes{tier="disk"}', 1e9),
        ('kvbm_evictions_total{tier="host"}', 7),
        ('kvbm_refused_blocks_total{reason="queue full"}', 3),
        ('kvbm_refused_load_blocks_total{reason="recomputing is faster"}', 4),
        ("kvbm_unpackable_blocks_total", 5),
        ("kvbm_packed_ratio", 1),
        ("kvbm_packed_escape_ratio", 0.0005),
        ('kvbm_hints_total{outcome="taken"}', 6),
        ('kvbm_served_blocks_total{tier="peer"}', 9),
        ('kvbm_served_bytes_total{tier="peer"}', 9_000_000),
        ('kvbm_served_questions_total{tier="peer"}', 3),
        ('kvbm_served_refused_total{tier="peer",kind="secret"}', 2),
        ('kvbm_requests_total{outcome="not found"}', 18),
        ('kvbm_missed_lookups_total{why="evicted"}', 2),
        ("kvbm_ttft_saved_seconds_total", 2.5),
        ("kvbm_ttft_lost_seconds_total", 0.25),
        (r'kvbm_failures_total{reason="load: \"odd\"\\"}', 2),
        ('kvbm_info{version="2.0",engine="vllm",engine_version="0.31.0",model="a/model",ranks="2"}', 1),
    ],
)
def test_every_figure_is_in_its_place(text, series, figure):
    assert value(text, series) == figure


def test_customary_metrics_follow_the_custom():
    for metric in METRICS:
        if metric.customary:
            assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert metric.help
        assert "\n" not in metric.help


def test_slots_add_up(text):
    states = re.findall(r'^kvbm_slots{tier="host",state="\w+"} (\d+)$', text, re.M)
    assert sum(map(int, states)) == observed.HOST.slots


def test_the_client_library_reads_the_text(text):
    parser = pytest.importorskip("prometheus_client.parser")
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    assert families["kvbm_offload_blocks_d2h"].type == "counter"
    for metric in METRICS:
        family = families[metric.name.removesuffix("_total") if metric.customary else metric.name]
        assert family.type == metric.kind
        read = sorted((tuple(sample.labels.values()), sample.value) for sample in family.samples)
        assert read == sorted((labels, float(number)) for labels, number in metric.read(observed.SNAPSHOT))


def test_each_source_of_a_tier_has_its_own_series():
    source = SourceFlow(
        tier="disk", source="10.0.0.4:1", blocks=7, bytes=700, bytes_per_second=5e9, refused={"late": 2}
    )
    text = render(observed.snapshot(sources=[source])).decode()
    labels = 'tier="disk",source="10.0.0.4:1"'
    assert value(text, f"kvbm_source_blocks_total{{{labels}}}") == 7
    assert value(text, f"kvbm_source_bytes_total{{{labels}}}") == 700
    assert value(text, f"kvbm_source_bytes_per_second{{{labels}}}") == 5e9
    assert value(text, f'kvbm_source_refused_blocks_total{{{labels},kind="late"}}') == 2
