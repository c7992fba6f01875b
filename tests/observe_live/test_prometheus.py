"""A real Prometheus looks at a real vLLM with two ranks: every metric has the value that the test caused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.parse
from pathlib import Path

import pytest
import yaml

from conftest import PROJECT, prompt
from kvbm.observe.metrics import METRICS
from servers import HTTP, free_port

DEPLOY = PROJECT / "deploy" / "observability"
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "kvbm.json").read_text())
FIRST, SECOND = prompt(1, 400), prompt(2, 200)  # 12 and 6 full blocks, of 32 tokens
BLOCK_BYTES = 4 * 32 * 2 * 2 * 32 * 4  # layers, tokens, K and V, heads, their size, float32: both ranks together


class Prometheus:
    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expr: str) -> list[dict]:
        text = urllib.parse.urlencode({"query": expr})
        with HTTP.open(f"{self.url}/api/v1/query?{text}", timeout=30) as response:
            answer = json.load(response)
        assert answer["status"] == "success", answer
        return answer["data"]["result"]

    def value(self, expr: str) -> float | None:
        found = self.query(expr)
        assert len(found) <= 1, found
        return float(found[0]["value"][1]) if found else None

    def wait_for(self, expr: str, wanted: float, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while (value := self.value(expr)) != wanted:
            assert time.monotonic() < deadline, f"{expr} is {value}, not {wanted}"
            time.sleep(0.3)


@pytest.fixture(scope="module")
def prometheus(start, tools, watched, tmp_path_factory) -> Prometheus:
    """With the configuration that is deployed, but for the ports and a shorter interval."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    config["global"]["scrape_interval"] = "500ms"
    ports = {"kvbm-metrics": watched.port, "vllm": int(watched.url.rpartition(":")[2])}
    for job in config["scrape_configs"]:
        job.pop("scrape_interval", None)
        job["static_configs"] = [{"targets": [f"127.0.0.1:{ports[job['job_name']]}"]}]
    whole = {name: value for name, value in config["scrape_configs"][-1].items() if name != "metric_relabel_configs"}
    config["scrape_configs"].append({**whole, "job_name": WHOLE_PAGE})
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (folder / "rules.yml").write_text((DEPLOY / "rules.yml").read_text())
    port = free_port()
    start(
        [
            tools["prometheus"],
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
    )
    server = Prometheus(f"http://127.0.0.1:{port}")
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            if server.value('up{job="kvbm-metrics"}') == server.value('up{job="vllm"}') == 1:
                return server
        except OSError:
            pass
        time.sleep(0.3)
    pytest.fail("Prometheus has not come up")


KVBM = '{job="kvbm-metrics"}'
WHOLE_PAGE = "vllm, with what is dropped"
SELDOM = ("kvbm_failures_total", "kvbm_hints_total", "kvbm_refused_load_blocks_total")  # no series before the first
OF_PEERS = ("kvbm_source_", "kvbm_served_")  # no series without peers


@pytest.fixture(scope="module")
def story(prometheus, watched) -> dict[str, float]:
    """What is sent, and what it must have caused: counted by hand."""
    prometheus.wait_for(f"kvbm_offload_blocks_d2h{KVBM}", 0)
    first = watched.stream(FIRST, 1)
    prometheus.wait_for(f"kvbm_offload_blocks_d2h{KVBM}", 12)
    watched.post("/reset_prefix_cache")
    assert watched.stream(FIRST, 1) == first
    prometheus.wait_for(f"kvbm_onboard_blocks_h2d{KVBM}", 12)
    prometheus.wait_for(f"kvbm_offload_blocks_h2d{KVBM}", 12)  # used twice, so the filter lets them pass to disk
    watched.stream(SECOND, 1)
    prometheus.wait_for(f"kvbm_offload_blocks_d2h{KVBM}", 18)
    watched.stream(SECOND, 1)  # vLLM has it itself
    prometheus.wait_for('kvbm_requests_total{job="kvbm-metrics",outcome="on the device"}', 1)
    prometheus.wait_for(f"kvbm_offload_blocks_h2d{KVBM}", 18)  # these were used twice too, wherever they were found
    watched.stream([7] * 20, 1)  # too short to be looked up; its step brings all of that to vLLM's own page
    prometheus.wait_for('kvbm_requests_total{job="kvbm-metrics",outcome="too short"}', 1)
    return {
        "kvbm_matched_tokens": 384,
        "kvbm_offload_blocks_d2h": 18,
        "kvbm_onboard_blocks_h2d": 12,
        "kvbm_host_cache_hit_rate": 12 / (12 + 12 + 6),
        'kvbm_transfer_blocks_total{source="device",target="host"}': 18,
        'kvbm_transfer_blocks_total{source="host",target="device"}': 12,
        'kvbm_transfer_bytes_total{source="device",target="host"}': 18 * BLOCK_BYTES,
        'kvbm_transfer_bytes_total{source="host",target="device"}': 12 * BLOCK_BYTES,
        'kvbm_transfer_bytes_total{source="host",target="disk"}': 18 * BLOCK_BYTES,
        'kvbm_transfer_failed_blocks_total{source="host",target="device"}': 0,
        'kvbm_transfer_queued_blocks{source="device",target="host"}': 0,
        'kvbm_slots{tier="host",state="idle"}': 18,
        'kvbm_slots{tier="host",state="free"}': 512 - 18,
        'kvbm_slots{tier="host",state="pinned"}': 0,
        'kvbm_capacity_bytes{tier="host"}': 512 * BLOCK_BYTES,
        'kvbm_slots{tier="disk",state="idle"}': 18,
        'kvbm_slots{tier="disk",state="free"}': 1024 - 18,
        'kvbm_capacity_bytes{tier="disk"}': 1024 * BLOCK_BYTES,
        'kvbm_evictions_total{tier="host"}': 0,
        "kvbm_lookups_total": 3,
        "kvbm_lookup_blocks_total": 30,
        'kvbm_matched_blocks_total{tier="host"}': 12,
        'kvbm_requests_total{outcome="loaded"}': 1,
        'kvbm_requests_total{outcome="not found"}': 2,
        'kvbm_requests_total{outcome="too short"}': 1,
        'kvbm_requests_total{outcome="on the device"}': 1,
        'kvbm_missed_lookups_total{why="new"}': 2,
        'kvbm_missed_lookups_total{why="evicted"}': 0,
        'kvbm_refused_blocks_total{reason="queue full"}': 0,
        'kvbm_refused_blocks_total{reason="disk filter"}': 18,
        "kvbm_offload_blocks_h2d": 18,
        **dict.fromkeys(
            (
                "kvbm_offload_blocks_d2d",
                "kvbm_offload_blocks_d2o",
                "kvbm_onboard_blocks_d2d",
                "kvbm_onboard_blocks_o2d",
                "kvbm_disk_cache_hit_rate",
                "kvbm_object_cache_hit_rate",
                "kvbm_object_read_failures",
                "kvbm_object_write_failures",
                "kvbm_record_dropped_total",
            ),
            0,
        ),
    }


def in_job(series: str, job: str) -> str:
    name, _, labels = series.partition("{")
    return f'{name}{{job="{job}"' + (f",{labels}" if labels else "}")


def test_every_metric_has_the_value_that_was_caused(prometheus, story):
    wrong = {
        series: (value, wanted)
        for series, wanted in story.items()
        if (value := prometheus.value(in_job(series, "kvbm-metrics"))) is None or abs(value - wanted) > 1e-9
    }
    assert not wrong


def test_the_other_metrics_are_there_too(prometheus, story):
    counted = {series.partition("{")[0] for series in story}
    for metric in METRICS:
        if metric.name not in counted and metric.name not in SELDOM and not metric.name.startswith(OF_PEERS):
            assert prometheus.query(in_job(metric.name, "kvbm-metrics")), metric.name
    seconds = in_job('kvbm_transfer_seconds_total{source="host",target="device"}', "kvbm-metrics")
    assert 0 < prometheus.value(seconds) < 10
    assert prometheus.value(in_job("kvbm_prefill_tokens_per_second", "kvbm-metrics")) > 0
    assert prometheus.value(in_job("kvbm_info", "kvbm-metrics")) == 1


def test_vllms_own_page_has_the_same_figures(prometheus, story):
    prometheus.wait_for(f'kvbm_requests_total{{job="{WHOLE_PAGE}",outcome="too short"}}', 1)
    for series, wanted in story.items():
        name, brace, labels = series.partition("{")
        kind = next(metric for metric in METRICS if metric.name == name).kind
        if kind == "counter" and not name.endswith("_total"):
            name += "_total"
        value = prometheus.value(in_job(name + brace + labels, WHOLE_PAGE))
        assert value == pytest.approx(wanted), series


def test_no_figure_is_there_twice_as_it_is_deployed(prometheus, story):
    assert prometheus.query('{__name__=~"kvbm_.*", job="kvbm-metrics"}')
    assert prometheus.query('{__name__=~"vllm:.*", job="vllm"}')
    assert prometheus.query('{__name__=~"kvbm_.*", job="vllm"}') == []


def test_vllm_logs_them(watched, story):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and "KV Transfer metrics:" not in watched.process.log.read_text():
        time.sleep(0.5)
    log = watched.process.log.read_text()
    assert re.search(r"KV Transfer metrics: .*offload_blocks_d2h=\d+", log)
    assert re.search(r"engine \S+: blocks found, last 3 requests: host 40\.0% \(12/30\)", log)


def test_promtool_finds_nothing_but_the_names_that_dashboards_know(tools, watched, story):
    text = HTTP.open(f"{watched.metrics_url}/metrics", timeout=30).read()
    found = subprocess.run([tools["promtool"], "check", "metrics"], input=text, capture_output=True, timeout=60)
    complaints = set(found.stderr.decode().splitlines())
    # Counters without _total are what existing dashboards ask for.
    known = {
        f'{metric.name} counter metrics should have "_total" suffix'
        for metric in METRICS
        if metric.kind == "counter" and not metric.customary
    }
    assert complaints == known


def test_promtool_finds_nothing_in_what_is_deployed(tools):
    found = subprocess.run(
        [tools["promtool"], "check", "config", "prometheus.yml"], cwd=DEPLOY, capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "4 rules found" in found.stdout


sys.path.append(str(PROJECT / "scripts"))
from dashboard_picture import filled  # noqa: E402

QUERIES = [
    (panel["title"], filled(target["expr"], scrape_seconds=0.5, step=60))
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", ())
    # Reasons appear with the first failure; their panels have a line of zeros beside it.
    if not target["expr"].startswith(("rate(kvbm_failures_total", "rate(kvbm_refused_load_blocks_total"))
]


@pytest.mark.parametrize(("title", "expr"), QUERIES, ids=[f"{title}: {expr[:40]}" for title, expr in QUERIES])
def test_every_panel_has_data(prometheus, story, watched, title, expr):
    if "Speed while moving" in title:  # only while something moves
        watched.stream(prompt(time.time_ns(), 200), 1)
    deadline = time.monotonic() + 120
    while not (found := prometheus.query(expr)):
        assert time.monotonic() < deadline, "no data"
        time.sleep(0.5)
    assert all(series["value"][1] != "NaN" for series in found)


def test_panels_with_reasons_are_valid_queries(prometheus):
    for name in ("kvbm_failures_total", "kvbm_refused_load_blocks_total"):
        prometheus.query(f"rate({name}[1m])")


def test_the_dashboard_is_what_the_script_writes():
    script = PROJECT / "scripts" / "dashboard.py"
    scope: dict = {"__name__": "dashboard", "__file__": str(script)}
    exec(compile(script.read_text(), str(script), "exec"), scope)
    assert scope["text"]() == Path(scope["TARGET"]).read_text()
