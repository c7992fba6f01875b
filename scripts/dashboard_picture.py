#!/usr/bin/env python3
"""Draw the panels of the Grafana dashboard from a running Prometheus, into a picture for the documentation.

    python scripts/dashboard_picture.py http://127.0.0.1:9090 docs/images/dashboard.png --minutes 10

It evaluates the queries of deploy/observability/grafana/dashboards/kvbm.json as Grafana does, and lays the panels out
by its grid. Grafana itself is not needed; a browser is (`scripts/observe_tools.py` fetches one).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from html import escape
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).resolve().parent.parent / "deploy/observability/grafana/dashboards/kvbm.json"
CELL, ROW = 60, 34  # pixels of Grafana's grid
COLORS = ("#2f7d5b", "#2b6cb0", "#b7791f", "#7a4fa3", "#b3341f", "#0e7490", "#6b7280", "#9d174d")
HTTP = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def filled(expr: str, scrape_seconds: float, step: float) -> str:
    """The expression with Grafana's variables filled in: every instance, every model, and the interval for rates."""
    interval = max(step + scrape_seconds, 4 * scrape_seconds)
    values = {"$__rate_interval": f"{interval:.0f}s", "$instance": ".*", "$model": ".*"}
    for name, value in values.items():
        expr = expr.replace(name, value)
    return expr


def query_range(url: str, expr: str, end: float, seconds: float, step: float) -> list[dict[str, Any]]:
    asked = {"query": expr, "start": f"{end - seconds:.3f}", "end": f"{end:.3f}", "step": f"{step:g}"}
    with HTTP.open(f"{url}/api/v1/query_range?{urllib.parse.urlencode(asked)}", timeout=60) as response:
        found: list[dict[str, Any]] = json.load(response)["data"]["result"]
    return found


def legend(template: str, labels: dict[str, str]) -> str:
    if template == "__auto":
        return labels.get("instance", "")
    for name, value in labels.items():
        template = template.replace("{{" + name + "}}", value)
    return template


def shown(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{100 * value:.0f} %"
    if unit in ("Bps", "decbytes"):
        for name, one in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
            if value >= one:
                return f"{value / one:.3g} {name}" + ("/s" if unit == "Bps" else "")
        return f"{value:.0f} B"
    if unit == "s":
        return f"{value:.2f} s" if abs(value) >= 1 else f"{value * 1e3:.0f} ms"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def draw_panel(
    panel: dict[str, Any], series: list[tuple[str, list[tuple[float, float]]]], start: float, end: float
) -> str:
    place, unit = panel["gridPos"], panel["fieldConfig"]["defaults"]["unit"]
    width, height = place["w"] * CELL - 8, place["h"] * ROW - 8
    box = f"left:{place['x'] * CELL}px;top:{place['y'] * ROW}px;width:{width}px;height:{height}px"
    title = f"<b>{escape(panel['title'])}</b>"
    if panel["type"] == "stat":
        names = [f"{escape(name)} " if len(series) > 1 else "" for name, _ in series]
        values = "".join(
            f'<p class="stat">{name}{shown(points[-1][1], unit)}</p>'
            for name, (_, points) in zip(names, series, strict=True)
            if points
        )
        return f'<div class="panel" style="{box}">{title}{values or "<p>No data</p>"}</div>'
    w, h, left = width - 24, height - 96, 64  # below: three lines of names
    top = panel["fieldConfig"]["defaults"].get("max") or max((v for _, p in series for _, v in p), default=0) * 1.1 or 1
    parts = []
    for part in (0, 0.5, 1):
        y = h - part * (h - 8)
        parts.append(f'<line x1="{left}" x2="{w}" y1="{y}" y2="{y}"/><text x="{left - 6}" y="{y + 4}">'
                     f"{escape(shown(part * top, unit))}</text>")  # fmt: skip
    names = []
    for number, (name, points) in enumerate(series):
        color = COLORS[number % len(COLORS)]
        path = " ".join(
            f"{left + (w - left) * (at - start) / (end - start):.1f},{h - (h - 8) * max(0.0, value) / top:.1f}"
            for at, value in points
        )
        parts.append(f'<polyline points="{path}" style="stroke:{color}"/>')
        names.append(
            f'<span><i style="background:{color}"></i>{escape(name)} {escape(shown(points[-1][1], unit))}</span>'
        )
    svg = f'<svg width="{w}" height="{h + 6}">{"".join(parts)}</svg>'
    return f'<div class="panel" style="{box}">{title}{svg}<p class="names">{"".join(names) or "No data"}</p></div>'


def page(url: str, minutes: float, scrape_seconds: float) -> tuple[str, int]:
    dashboard = json.loads(DASHBOARD.read_text())
    end, seconds = time.time(), minutes * 60
    step = max(scrape_seconds, seconds / 240)
    parts, bottom = [], 0
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        bottom = max(bottom, (place["y"] + place["h"]) * ROW)
        if panel["type"] == "row":
            parts.append(f'<h2 style="top:{place["y"] * ROW}px">{escape(panel["title"])}</h2>')
            continue
        series = []
        for target in panel["targets"]:
            for found in query_range(url, filled(target["expr"], scrape_seconds, step), end, seconds, step):
                points = [(float(at), float(value)) for at, value in found["values"] if value != "NaN"]
                if points:
                    series.append((legend(target["legendFormat"], found["metric"]), points))
        parts.append(draw_panel(panel, series, end - seconds, end))
    style = (
        "body{margin:12px;font:13px system-ui,'Liberation Sans',sans-serif;background:#f4f5f7;color:#1a1f26}"
        "#g{position:relative}.panel{position:absolute;background:#fff;border:1px solid #d8dce3;border-radius:4px;"
        "box-sizing:border-box;padding:8px 10px;overflow:hidden}h2{position:absolute;margin:6px 0;font-size:15px}"
        "svg line{stroke:#e2e5ea}svg polyline{fill:none;stroke-width:2}svg text{font-size:11px;fill:#5a6472;"
        "text-anchor:end}.stat{font-size:30px;margin:14px 0;color:#2f7d5b;text-align:center}"
        ".names{margin:0;color:#5a6472}.names span{margin-right:12px;white-space:nowrap}"
        "i{display:inline-block;width:10px;height:4px;margin-right:5px}"
    )
    width = 24 * CELL
    body = f'<div id="g" style="width:{width}px;height:{bottom}px">{"".join(parts)}</div>'
    return (
        f"<!doctype html><meta charset=utf-8><style>{style}</style><h1>{escape(dashboard['title'])}</h1>{body}",
        width,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prometheus", help="its URL")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--scrape-seconds", type=float, default=2)
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    import observe_tools
    from playwright.sync_api import sync_playwright

    text, width = page(args.prometheus, args.minutes, args.scrape_seconds)
    tools = observe_tools.chromium()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        (Path(folder) / "page.html").write_text(text)
        libraries = ":".join(str(each) for each in tools["libraries"])  # type: ignore[attr-defined]
        browser = playwright.chromium.launch(
            executable_path=str(tools["chromium"]), args=["--no-sandbox", "--disable-gpu"],
            env={"LD_LIBRARY_PATH": libraries, "PATH": os.environ["PATH"]},
        )  # fmt: skip
        shot = browser.new_page(viewport={"width": width + 24, "height": 900})
        shot.goto(f"file://{folder}/page.html")
        shot.screenshot(path=args.picture, full_page=True)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
