#!/usr/bin/env python3
"""Write the Grafana dashboard: deploy/observability/grafana/dashboards/kvbm.json.

    python scripts/dashboard.py            # what `make dashboard` does

A list of panels is easier to maintain than the thousand lines of JSON that Grafana needs.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

TARGET = Path(__file__).resolve().parent.parent / "deploy/observability/grafana/dashboards/kvbm.json"
# The uid of upstream's KVBM dashboard: an import replaces that dashboard, and existing links still work.
UID = "3f679257-70a5-402c-92b4-05382337b548"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24  # columns of Grafana's grid


class Query(NamedTuple):
    expr: str  # `selected` adds the variables to it
    legend: str = "__auto"


def selected(expr: str) -> str:
    """The expression for the chosen instances. ``[i]``: over four scrapes at least, of whatever interval."""
    expr = expr.replace("[i]", "[$__rate_interval]")
    expr = re.sub(r"\b(kvbm_\w+)(?![\w{])", r"\1{}", expr)
    expr = re.sub(r"\b(kvbm_\w+){(.*?)}", r'\1{instance=~"$instance",\2}', expr)
    return expr.replace('",}', '"}')


class Panel(NamedTuple):
    title: str
    description: str
    unit: str
    queries: list[Query]
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False
    most: float | None = None  # the top of the axis


class Row(NamedTuple):
    title: str
    panels: list[Panel]


def way(expr: str) -> Query:
    return Query(expr, "{{source}} → {{target}}")


# Eight panels have the titles and the plain metric names of upstream's dashboard, so they show the same figures.
ROWS = [
    Row("Is it helping?", [
        Panel("Hit rate", "Share of the blocks missing from the engine's cache that a tier held, over the "
              "latest requests (DYN_KVBM_CACHE_STATS_MAX_REQUESTS).", "percentunit",
              [Query("kvbm_host_cache_hit_rate + kvbm_disk_cache_hit_rate + kvbm_object_cache_hit_rate",
                     "{{instance}}")], "stat", 6, most=1),
        Panel("Time to first token saved", "Seconds per second, over all requests. Estimate: prefill time of the "
              "loaded tokens at the measured speed, minus their load time.", "s",
              [Query("rate(kvbm_ttft_saved_seconds_total[i]) - rate(kvbm_ttft_lost_seconds_total[i])",
                     "{{instance}}")], "stat", 6),
        Panel("Tokens loaded", "Tokens per second that were loaded instead of computed.", "short",
              [Query("rate(kvbm_matched_tokens[i])", "{{instance}}")], "stat", 6),
        Panel("Faults", "Exceptions inside KVBM in the last hour. Each cost a hit, or block events.", "short",
              [Query("sum by (instance) (increase(kvbm_failures_total[1h])) or 0 * kvbm_matched_tokens",
                     "{{instance}}")], "stat", 6),
    ]),
    Row("Time to first token", [
        Panel("Time to first token, as vLLM measures it", "Of all requests, from vLLM's own page (job vllm of "
              "prometheus.yml): with a hit and without.", "s",
              [Query(f"histogram_quantile({part}, sum by (le) (rate(vllm:time_to_first_token_seconds_bucket"
                     '{model_name=~"$model"}[i])))', name)
               for part, name in ((0.5, "median"), (0.9, "90 %"), (0.99, "99 %"))], width=12),
        Panel("Time to first token saved, by load", "Seconds that a load saved on average. Estimate: prefill time of "
              "its tokens at the measured speed, minus its load time.", "s",
              [Query("(rate(kvbm_ttft_saved_seconds_total[i]) - "
                     "rate(kvbm_ttft_lost_seconds_total[i])) / "
                     '(sum by (instance, job) (rate(kvbm_requests_total{outcome="loaded"}[i])) > 0)',
                     "{{instance}}")], width=12),
    ]),
    Row("Cache Hit", [
        Panel("Host Cache Hit Rate", "Share of the latest requests' blocks that the host tier held.", "percentunit",
              [Query("kvbm_host_cache_hit_rate")], most=1),
        Panel("Disk Cache Hit Rate", "Share of the latest requests' blocks that the disk tier held.", "percentunit",
              [Query("kvbm_disk_cache_hit_rate")], most=1),
        Panel("Matched Tokens", "Tokens that were found in KVBM's tiers, beyond the engine's own cache, and loaded.",
              "short", [Query("kvbm_matched_tokens")]),
    ]),
    Row("Offload", [
        Panel("Offload Blocks - Device to Host", "Blocks copied from the engine's cache to host memory.", "short",
              [Query("kvbm_offload_blocks_d2h")]),
        Panel("Offload Blocks - Host to Disk", "Blocks that the admission filter let through to disk.", "short",
              [Query("kvbm_offload_blocks_h2d")]),
        Panel("Offload Blocks - Device to Disk (Bypass Host)", "Blocks written to disk without a host tier.", "short",
              [Query("kvbm_offload_blocks_d2d")]),
    ]),
    Row("Onboard", [
        Panel("Onboard Blocks - Host to Device", "Blocks loaded from host memory. Grows when a prompt returns after "
              "the engine has evicted it.", "short", [Query("kvbm_onboard_blocks_h2d")], width=12),
        Panel("Onboard Blocks - Disk to Device", "Blocks loaded from disk.", "short",
              [Query("kvbm_onboard_blocks_d2d")], width=12),
    ]),
    Row("Transfers", [
        Panel("Bytes moved", "All ranks together.", "Bps", [way("rate(kvbm_transfer_bytes_total[i])")]),
        Panel("Speed while moving", "Bytes divided by transfer time, which is that of the slowest rank.", "Bps",
              [way("rate(kvbm_transfer_bytes_total[i]) / (rate(kvbm_transfer_seconds_total[i]) > 0)")]),
        Panel("Waiting to be moved", "Blocks whose transfer is planned or in flight.", "short",
              [way("kvbm_transfer_queued_blocks")]),
    ]),
    Row("Tiers", [
        Panel("Filled", "Share of slots that hold a block or are being written.", "percentunit",
              [Query('1 - sum by (instance, tier) (kvbm_slots{state="free"}) / sum by (instance, tier) (kvbm_slots)',
                     "{{tier}}")], most=1),
        Panel("Slots by state", "Free, being written, idle (hold a block), pinned (being read).", "short",
              [Query("kvbm_slots", "{{tier}} {{state}}")], stacked=True),
        Panel("Evictions", "Evicted blocks per second.", "short",
              [Query("rate(kvbm_evictions_total[i])", "{{tier}}")]),
        Panel("Size", "All ranks together.", "decbytes", [Query("kvbm_capacity_bytes", "{{tier}}")], "stat"),
        Panel("Speed of loads, as measured", "The cost model's estimate for one rank.", "Bps",
              [Query("kvbm_load_bytes_per_second", "{{tier}}")]),
        Panel("Speed of prefill, as measured", "Tokens per second, for the first tokens of a prompt.", "short",
              [Query("kvbm_prefill_tokens_per_second", "{{instance}}")]),
    ]),
    Row("Why blocks are not loaded or kept", [
        Panel("Requests by outcome", "Outcome of the lookup when the engine admitted a request.", "reqps",
              [Query("rate(kvbm_requests_total[i])", "{{outcome}}")], stacked=True),
        Panel("Missed lookups", "Lookups that ended at a block that was never computed before (new: prompts do not "
              "repeat), or at an evicted block (evicted: the tiers are too small).", "reqps",
              [Query("rate(kvbm_missed_lookups_total[i])", "{{why}}")], stacked=True),
        Panel("Found and not loaded", "Blocks whose load would take longer than the prefill, by reason.", "short",
              [Query("rate(kvbm_refused_load_blocks_total[i])", "{{reason}}"),
               Query("0 * kvbm_matched_tokens", "none")]),
        Panel("Not kept", "Blocks that were not offloaded or not moved to disk, by reason.", "short",
              [Query("rate(kvbm_refused_blocks_total[i])", "{{reason}}")]),
        Panel("Did not arrive", "Blocks whose transfer failed. A failed load is recomputed.", "short",
              [way("rate(kvbm_transfer_failed_blocks_total[i])")]),
        Panel("Faults by reason", "Exceptions inside KVBM. Each cost a hit, or block events.", "short",
              [Query("rate(kvbm_failures_total[i])", "{{reason}}"), Query("0 * kvbm_matched_tokens", "none")]),
    ]),
]  # fmt: skip


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for row in ROWS:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"h": 1, "w": WIDTH, "x": 0, "y": y},
            }
        )
        y += 1
        x = 0
        height = 4 if all(panel.kind == "stat" for panel in row.panels) else 8
        for panel in row.panels:
            if x + panel.width > WIDTH:
                x, y = 0, y + height
            panels.append(_panel(len(panels) + 1, panel, {"h": height, "w": panel.width, "x": x, "y": y}))
            x += panel.width
        y += height
    source = {**_variable("datasource", "Data source", "datasource", "prometheus"), "includeAll": False, "multi": False}
    variables = [
        source,
        _variable("model", "Model", "query", "label_values(kvbm_info, model)"),
        _variable("instance", "Instance", "query", 'label_values(kvbm_info{model=~"$model"}, instance)'),
    ]
    return {
        "uid": UID,
        "title": "KVBM Dashboard",
        "description": "Tiers, hit rates, transfers and time saved by KVBM",
        "tags": ["kvbm"],
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "schemaVersion": 41,
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": variables},
        "annotations": {"list": []},
        "links": [],
        "panels": panels,
    }


def _variable(name: str, label: str, kind: str, query: str) -> dict[str, Any]:
    variable: dict[str, Any] = {
        "name": name, "label": label, "type": kind, "query": query, "refresh": 2, "hide": 0, "includeAll": True,
        "multi": True, "options": [], "regex": "",
    }  # fmt: skip
    if kind == "query":
        variable |= {"datasource": DATASOURCE, "current": {"text": ["All"], "value": ["$__all"]}, "sort": 1}
    return variable


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    custom: dict[str, Any] = {}
    options: dict[str, Any]
    if panel.kind == "timeseries":
        custom = {
            "drawStyle": "line",
            "lineWidth": 2,
            "fillOpacity": 25 if panel.stacked else 8,
            "showPoints": "never",
            "spanNulls": True,
            "stacking": {"group": "A", "mode": "normal" if panel.stacked else "none"},
        }
        options = {
            "legend": {"calcs": ["lastNotNull"], "displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    else:
        options = {
            "colorMode": "value",
            "graphMode": "area",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "textMode": "auto",
        }
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": custom, "color": {"mode": "palette-classic"}}
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.title == "Time to first token saved":
        del defaults["min"]  # the value can be negative
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": DATASOURCE,
                "expr": selected(query.expr),
                "legendFormat": query.legend,
                "range": True,
            }
            for i, query in enumerate(panel.queries)
        ],
    }


def text() -> str:
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    TARGET.write_text(text())
    print(TARGET)
