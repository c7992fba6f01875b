"""The dashboard at a scrape interval of a minute: every panel has data, and rates are right. No engine is needed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time

import msgspec
import pytest

import observed
from conftest import PROJECT
from kvbm.observe import metrics
from servers import free_port

sys.path.append(str(PROJECT / "scripts"))
from dashboard_picture import DASHBOARD, filled, query_range

PANELS = [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]
SCRAPE_SECONDS, MINUTES = 60, 60
LOADED = 25  # tokens a second
LABELS = 'instance="a:6880",job="kvbm-metrics"'


def growing(minute: int):
    """A snapshot of an engine that has worked for so many minutes."""
    now = observed.SNAPSHOT
    seconds = 60 * minute
    flows = [
        msgspec.structs.replace(flow, blocks=10 * seconds, bytes=10_000_000 * seconds, seconds=0.1 * seconds)
        for flow in now.flows
    ]
    counts = {
        name: dict.fromkeys(getattr(now, name), seconds)
        for name in ("refused_blocks", "refused_loads", "outcomes", "missed", "failures")
    }
    saved = msgspec.structs.replace(now.saved, saved_seconds=0.5 * seconds, lost_seconds=0.0)
    return observed.snapshot(flows=flows, matched_tokens=LOADED * seconds, saved=saved, **counts)


@pytest.fixture(scope="module")
def prometheus(start, tools, tmp_path_factory) -> tuple[str, float]:
    """(its URL, the time of the last sample): an hour of samples, one a minute, as if Prometheus had scraped them."""
    folder = tmp_path_factory.mktemp("minutely")
    first = time.time() // 60 * 60 - 60 * MINUTES
    lines: dict[str, list[str]] = {}
    for minute in range(MINUTES + 1):
        at = first + 60 * minute
        text = metrics.render(growing(minute)).decode()
        text += "".join(
            f'vllm:time_to_first_token_seconds_bucket{{model_name="a/model",le="{le}"}} {60 * minute * share}\n'
            for le, share in (("0.1", 0.5), ("1.0", 0.9), ("+Inf", 1.0))
        )
        for name, labels, value in re.findall(r"^([a-z0-9_:]+)(?:{(.*)})? (\S+)$", text, re.MULTILINE):
            both = f"{labels},{LABELS}" if labels else LABELS
            lines.setdefault(name, []).append(f"{name}{{{both}}} {value} {at}")
    text = "".join(f"# TYPE {name} unknown\n" + "\n".join(each) + "\n" for name, each in lines.items())
    (folder / "samples").write_text(text + "# EOF\n")
    command = [tools["promtool"], "tsdb", "create-blocks-from", "openmetrics", folder / "samples", folder / "data"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert made.returncode == 0, made.stderr
    (folder / "prometheus.yml").write_text("global: {}\n")
    port = free_port()
    flags = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    start([tools["prometheus"], *flags, f"--web.listen-address=127.0.0.1:{port}"])
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            query_range(url, "up", time.time(), 60, 60)
            return url, first + 60 * MINUTES
        except OSError:
            time.sleep(0.2)
    pytest.fail("Prometheus has not come up")


def ask(prometheus, expr: str) -> list[dict]:
    url, end = prometheus
    step = 60 * MINUTES / 240
    return query_range(url, filled(expr, SCRAPE_SECONDS, step), end, 1800, step)


@pytest.mark.parametrize("panel", PANELS, ids=[panel["title"] for panel in PANELS])
def test_every_panel_has_data_at_a_scrape_a_minute(prometheus, panel):
    for target in panel["targets"]:
        found = ask(prometheus, target["expr"])
        assert found, target["expr"]
        assert all(len(series["values"]) > 100 for series in found)  # without holes


def test_rates_are_right(prometheus):
    panel = next(panel for panel in PANELS if panel["title"] == "Tokens loaded")
    (series,) = ask(prometheus, panel["targets"][0]["expr"])
    assert [float(value) for _, value in series["values"]] == pytest.approx([LOADED] * len(series["values"]))


def test_a_rate_over_a_fixed_minute_would_have_holes(prometheus):
    (whole,) = ask(prometheus, "rate(kvbm_matched_tokens[$__rate_interval])")
    (holes,) = ask(prometheus, "rate(kvbm_matched_tokens[1m])")
    assert len(holes["values"]) < len(whole["values"]) / 2


def test_every_query_follows_the_variables():
    for panel in PANELS:
        for target in panel["targets"]:
            expr = target["expr"]
            assert "[1m]" not in expr
            for metric, selector in re.findall(r"(kvbm_\w+|vllm:\w+)({[^}]*})?", expr):
                assert ("$model" if metric.startswith("vllm") else "$instance") in selector, expr
