"""A page with the plots and tables of benchmark results: one self-contained file, light and dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import NamedTuple

from kvbm.bench.results import Result, Run, percentile
from kvbm.observe.format import columns

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 12, 44
COLORS = ("a", "b", "c", "d", "e", "f")  # classes of the style sheet


def page(results: Sequence[Result]) -> str:
    """The page of all results, side by side, in their order."""
    runs = [run for result in results for run in result.runs]
    targets = list(dict.fromkeys(run.target for run in runs))
    parts = [f"<h1>Time to first token: {escape(' and '.join(targets))}</h1>", _about(results)]
    if verdict := _verdict(runs, targets):
        parts.append(f'<p class="verdict">{escape(verdict)}</p>')
    parts.append(_legend(targets))
    swept = [run for run in runs if run.qps]
    if len({run.qps for run in swept}) > 1:
        parts.append(_figure("Mean time to first token over rate",
                             _lines(swept, targets, lambda r: r.summary.ttft_mean),
                             "requests a second", "seconds"))  # fmt: skip
    parts.append(_figure("Time to first token: middle half, median, 5th to 95th percentile", _boxes(runs, targets),
                         "requests a second", "seconds (logarithmic)"))  # fmt: skip
    parts.append(_figure("Time to first token: part of requests within", _distribution(runs, targets),
                         "seconds (logarithmic)", "percent of requests"))  # fmt: skip
    if len({run.qps for run in swept}) > 1:
        parts.append(_figure("Requests answered a second over rate",
                             _lines(swept, targets, lambda r: r.summary.requests_per_second),
                             "requests a second, asked for", "answered"))  # fmt: skip
        parts.append(_figure("Tokens produced a second over rate",
                             _lines(swept, targets, lambda r: r.summary.output_tokens_per_second),
                             "requests a second", "tokens a second"))  # fmt: skip
    parts.append(_table(runs))
    parts.append(_servers(runs))
    return _PAGE.replace("{title}", escape(" and ".join(targets))).replace("{body}", "\n".join(part for part in parts))


def _about(results: Sequence[Result]) -> str:
    rows = []
    for result in results:
        shape = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in result.workload.items())
        machine = ", ".join(f"{name} {value}" for name, value in result.machine.items() if value)
        rows.append(
            f"<li>{escape(result.taken)}, model {escape(result.model)}: {escape(shape)}. {escape(machine)}.</li>"
        )
    return f"<ul>{''.join(rows)}</ul>"


def _verdict(runs: Sequence[Run], targets: Sequence[str]) -> str:
    """A comparison of the last target with the first, rate by rate."""
    if len(targets) < 2:
        return ""
    ratios = []
    for run in runs:
        other = next((r for r in runs if r.target == targets[0] and r.qps == run.qps), None)
        if run.target == targets[-1] and other is not None and other.summary.ttft_mean and run.summary.ttft_mean:
            ratios.append((run.qps, other.summary.ttft_mean / run.summary.ttft_mean))
    if not ratios:
        return ""
    said = ", ".join(f"{ratio:.1f} times at {qps:g}/s" if qps else f"{ratio:.1f} times" for qps, ratio in ratios)
    return f"The mean first token of {targets[-1]} comes sooner than that of {targets[0]} by: {said}."


def _legend(targets: Sequence[str]) -> str:
    keys = (f'<span><i class="key {_color(i)}"></i>{escape(name)}</span>' for i, name in enumerate(targets))
    return f'<p class="legend">{"".join(keys)}</p>'


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]


# -- plots ------------------------------------------------------------------------------------------------------------


class Axis(NamedTuple):
    """Maps values to positions."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        if self.logarithmic:
            part = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)

    def marks(self) -> list[float]:
        if self.logarithmic:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            every = (factor * 10**power for power in range(first, last + 1) for factor in (1, 2, 5))
            return [mark for mark in every if self.low <= mark <= self.high * 1.0001]
        step = 10 ** math.floor(math.log10((self.high - self.low) or 1))
        while (self.high - self.low) / step < 4:
            step /= 2
        count = int((self.high - self.low) / step + 1e-6) + 1
        return [self.low + i * step for i in range(count)]


def _x(low: float, high: float, logarithmic: bool = False) -> Axis:
    return Axis(low, high, LEFT, WIDTH - RIGHT, logarithmic)


def _y(low: float, high: float, logarithmic: bool = False) -> Axis:
    return Axis(low, high, HEIGHT - BOTTOM, TOP, logarithmic)


def _figure(title: str, drawing: str, x: str, y: str) -> str:
    if not drawing:
        return ""
    names = (
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x)}</text>'
        f'<text transform="translate(14 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(y)}</text>"
    )
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">{drawing}{names}</svg></figure>'
    )


def _grid(x: Axis | None, y: Axis) -> str:
    out = []
    for mark in y.marks():
        at = y.at(mark)
        out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        out.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{mark:g}</text>')
    for mark in x.marks() if x else ():
        out.append(f'<text x="{x.at(mark):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{mark:g}</text>')  # type: ignore[union-attr]
    return "".join(out)


def _lines(runs: Sequence[Run], targets: Sequence[str], read: Callable[[Run], float | None]) -> str:
    points = [(run.target, run.qps, value) for run in runs if (value := read(run)) is not None]
    if not points:
        return ""
    x = _x(0, max(qps for _, qps, _ in points) * 1.05)
    y = _y(0, max(value for *_, value in points) * 1.1 or 1)
    out = [_grid(x, y)]
    for i, target in enumerate(targets):
        mine = sorted((qps, value) for name, qps, value in points if name == target)
        path = " ".join(f"{x.at(qps):.1f},{y.at(value):.1f}" for qps, value in mine)
        out.append(f'<polyline class="line {_color(i)}" points="{path}"/>')
        for qps, value in mine:
            tip = f"<title>{escape(target)}, {qps:g}/s: {value:.3f}</title>"
            out.append(
                f'<circle class="dot {_color(i)}" cx="{x.at(qps):.1f}" cy="{y.at(value):.1f}" r="4">{tip}</circle>'
            )
    return "".join(out)


def _boxes(runs: Sequence[Run], targets: Sequence[str]) -> str:
    groups = [(run, ttfts) for run in runs if (ttfts := _ttfts(run))]
    if not groups:
        return ""
    rates = sorted({run.qps for run, _ in groups})
    low = min(percentile(ttfts, 5) for _, ttfts in groups)
    high = max(percentile(ttfts, 95) for _, ttfts in groups)
    y = _y(low * 0.8, max(high * 1.25, low * 2), logarithmic=True)
    slot = (WIDTH - LEFT - RIGHT) / len(rates)
    width = min(36.0, 0.8 * slot / len(targets))
    out = [_grid(None, y)]
    for at, qps in enumerate(rates):
        middle = LEFT + (at + 0.5) * slot
        label = f"{qps:g}" if qps else "trace"
        out.append(f'<text x="{middle:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{label}</text>')
        for run, ttfts in groups:
            if run.qps != qps:
                continue
            i = targets.index(run.target)
            left = middle + (i - len(targets) / 2) * width + 2
            p5, p25, p50, p75, p95 = (y.at(percentile(ttfts, p)) for p in (5, 25, 50, 75, 95))
            center = left + (width - 4) / 2
            tip = f"<title>{escape(run.target)}, {label}: median {percentile(ttfts, 50):.3f} s</title>"
            out.append(
                f'<line class="line {_color(i)}" x1="{center:.1f}" x2="{center:.1f}" y1="{p5:.1f}" y2="{p95:.1f}"/>'
            )
            out.append(
                f'<rect class="box {_color(i)}" x="{left:.1f}" y="{p75:.1f}" width="{width - 4:.1f}" '
                f'height="{max(1.0, p25 - p75):.1f}">{tip}</rect>'
            )
            out.append(
                f'<line class="median" x1="{left:.1f}" x2="{left + width - 4:.1f}" y1="{p50:.1f}" y2="{p50:.1f}"/>'
            )
    return "".join(out)


def _distribution(runs: Sequence[Run], targets: Sequence[str]) -> str:
    """All rates of a target together: the steeper and the further left, the better."""
    pooled = {target: sorted(t for run in runs if run.target == target for t in _ttfts(run)) for target in targets}
    every = [ttft for ttfts in pooled.values() for ttft in ttfts]
    if not every:
        return ""
    x = _x(max(min(every) * 0.9, 1e-4), max(max(every) * 1.1, min(every) * 2), logarithmic=True)
    y = _y(0, 100)
    out = [_grid(x, y)]
    for i, ttfts in enumerate(pooled.values()):
        path = " ".join(f"{x.at(t):.1f},{y.at(100 * (n + 1) / len(ttfts)):.1f}" for n, t in enumerate(ttfts))
        out.append(f'<polyline class="line {_color(i)}" points="{path}"/>')
    return "".join(out)


def _ttfts(run: Run) -> list[float]:
    return [sample.ttft for sample in run.samples if not sample.error and sample.ttft is not None]


# -- tables -----------------------------------------------------------------------------------------------------------


def _table(runs: Sequence[Run]) -> str:
    """Two tables: one with every figure would be wider than a screen."""
    times = ("target", "rate", "mean", "median", "90 %", "99 %", "worst", "mean gap", "median gap", "99 % gap")
    rates = (
        "target", "rate", "sent", "answered", "failed", "no text", "unfinished", "late", "requests/s", "tokens in/s",
        "tokens out/s", "tokens/s a request", "cached %",
    )  # fmt: skip
    time_rows, rate_rows = [], []
    for run in runs:
        s = run.summary
        name = run.target, f"{run.qps:g}" if run.qps else "trace"
        ttfts = (s.ttft_mean, s.ttft_p50, s.ttft_p90, s.ttft_p99, s.ttft_max)
        gaps = (s.gap_mean, s.gap_p50, s.gap_p99)
        time_rows.append([*name, *map(_seconds, ttfts), *map(_milliseconds, gaps)])
        rate_rows.append(
            [*name, s.sent, s.answered, s.failed, s.without_text, s.unfinished, s.late,
             f"{s.requests_per_second:.2f}", f"{s.input_tokens_per_second:,.0f}", f"{s.output_tokens_per_second:,.1f}",
             "–" if s.tokens_per_second_of_a_request is None else f"{s.tokens_per_second_of_a_request:.1f}",
             "–" if s.cached_percent is None else f"{s.cached_percent:.0f}"]
        )  # fmt: skip
    note = (
        "<p>Times to first token in seconds: from sending a request to the first text that is not empty. <i>Gap</i>: "
        "milliseconds between two pieces of text of a request. <i>No text</i>: answered without any, so without such "
        "a time. <i>Late</i>: questions that came more than a second after their turn, because the answer before them "
        "was not there yet.</p>"
    )
    failures = [
        f"<li>{escape(run.target)}, {run.qps:g}/s: {count} × {escape(error)}</li>"
        for run in runs
        for error, count in run.summary.errors.items()
    ]
    failed = f"<h2>Why requests failed</h2><ul>{''.join(failures)}</ul>" if failures else ""
    tables = _html_table(times, time_rows) + "<h2>Requests and tokens</h2>" + _html_table(rates, rate_rows)
    return f"<h2>Times</h2>{tables}{note}{failed}"


def _servers(runs: Sequence[Run]) -> str:
    """The counters of the servers, beside the client's own count."""
    names = list(dict.fromkeys(name for run in runs for name in run.server))
    if not names:
        return ""
    header = ["counter", *(f"{run.target} {run.qps:g}/s" if run.qps else f"{run.target} trace" for run in runs)]
    seen = (sum(sample.prompt_tokens for sample in run.samples if not sample.error) for run in runs)
    rows = [["prompt tokens, from outside", *(f"{each:,}" for each in seen)]]
    for name in names:
        counted = (f"{run.server[name]:,.0f}" if name in run.server else "–" for run in runs)
        rows.append([name.replace("_", " "), *counted])
    return "<h2>What the servers counted meanwhile</h2>" + _html_table(header, rows)


def _html_table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{1e3 * value:.1f}"


def text(runs: Sequence[Run]) -> str:
    """The summary as a table for a terminal. Gaps, between two tokens of a request, are in milliseconds."""
    names = (
        "target", "rate", "answered", "failed", "mean TTFT", "median", "99 %", "gap ms", "99 % gap", "requests/s",
        "tokens out/s",
    )  # fmt: skip
    rows = [
        (run.target, f"{run.qps:g}" if run.qps else "trace", str(run.summary.answered), str(run.summary.failed),
         _seconds(run.summary.ttft_mean), _seconds(run.summary.ttft_p50), _seconds(run.summary.ttft_p99),
         _milliseconds(run.summary.gap_p50), _milliseconds(run.summary.gap_p99),
         f"{run.summary.requests_per_second:.2f}", f"{run.summary.output_tokens_per_second:.1f}")
        for run in runs
    ]  # fmt: skip
    return "\n".join(columns([names, *rows], right=range(len(names))))


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>KVBM bench: {title}</title>
<style>
:root { --ground: #fff; --ink: #1a1f26; --soft: #5a6472; --line: #dde1e7;
  --a: #6b7280; --b: #2b6cb0; --c: #2f7d5b; --d: #8a5a2b; --e: #7a4fa3; --f: #b3341f; }
@media (prefers-color-scheme: dark) { :root { --ground: #13171c; --ink: #e8ebef; --soft: #9aa5b3; --line: #313944;
  --a: #a3acb8; --b: #63a4e8; --c: #55b98c; --d: #d09a62; --e: #b694dc; --f: #f0806b; } }
body { max-width: 1180px; margin: 0 auto; padding: 16px; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Liberation Sans", sans-serif; font-variant-numeric: tabular-nums; }
h1 { font-size: 22px; } h2 { font-size: 17px; } ul { padding-left: 20px; color: var(--soft); }
.verdict { padding: 10px 14px; border-left: 4px solid var(--c);
  background: color-mix(in srgb, var(--c) 12%, transparent); }
.legend span { margin-right: 20px; } .key { display: inline-block; width: 12px; height: 12px; margin-right: 6px; }
figure { margin: 24px 0; } figcaption { font-weight: 600; margin-bottom: 6px; } svg { width: 100%; max-width: 800px; }
svg text { fill: var(--soft); font-size: 12px; } .grid { stroke: var(--line); }
.line { fill: none; stroke-width: 2; } .median { stroke: var(--ground); stroke-width: 2; } .box { opacity: 0.85; }
.a { --c0: var(--a); } .b { --c0: var(--b); } .c { --c0: var(--c); } .d { --c0: var(--d); } .e { --c0: var(--e); }
.f { --c0: var(--f); } .line { stroke: var(--c0); } .dot, .box { fill: var(--c0); } .key { background: var(--c0); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; }
th, td { padding: 4px 8px; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { color: var(--soft); font-weight: 500; white-space: normal; vertical-align: bottom; }
td:first-child, th:first-child { text-align: left; }
</style>
</head>
<body>
{body}
</body>
</html>
"""
