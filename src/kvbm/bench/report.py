"""A page with the plots and tables of benchmark results: one self-contained file, light and dark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from html import escape

from kvbm.bench.results import Result, Run, percentile
from kvbm.observe import charts
from kvbm.observe.charts import color, figure, grid, table, x_axis, y_axis
from kvbm.observe.format import columns


def page(results: Sequence[Result]) -> str:
    """The page of all results, side by side, in their order."""
    runs = [run for result in results for run in result.runs]
    targets = list(dict.fromkeys(run.target for run in runs))
    parts = [f"<h1>Time to first token: {escape(' and '.join(targets))}</h1>", _about(results)]
    if verdict := _verdict(runs, targets):
        parts.append(f'<p class="verdict">{escape(verdict)}</p>')
    parts.append(charts.legend(targets))
    swept = [run for run in runs if run.qps]
    if len({run.qps for run in swept}) > 1:
        parts.append(figure("Mean time to first token over rate",
                             _lines(swept, targets, lambda r: r.summary.ttft_mean),
                             "requests a second", "seconds"))  # fmt: skip
    parts.append(figure("Time to first token: middle half, median, 5th to 95th percentile", _boxes(runs, targets),
                         "requests a second", "seconds (logarithmic)"))  # fmt: skip
    parts.append(figure("Time to first token: part of requests within", _distribution(runs, targets),
                         "seconds (logarithmic)", "percent of requests"))  # fmt: skip
    if len({run.qps for run in swept}) > 1:
        parts.append(figure("Requests answered a second over rate",
                             _lines(swept, targets, lambda r: r.summary.requests_per_second),
                             "requests a second, asked for", "answered"))  # fmt: skip
        parts.append(figure("Tokens produced a second over rate",
                             _lines(swept, targets, lambda r: r.summary.output_tokens_per_second),
                             "requests a second", "tokens a second"))  # fmt: skip
    parts.append(_table(runs))
    parts.append(_servers(runs))
    return charts.page(f"bench: {' and '.join(targets)}", parts)


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


# -- plots ------------------------------------------------------------------------------------------------------------


def _lines(runs: Sequence[Run], targets: Sequence[str], read: Callable[[Run], float | None]) -> str:
    points = [(run.target, run.qps, value) for run in runs if (value := read(run)) is not None]
    if not points:
        return ""
    x = x_axis(0, max(qps for _, qps, _ in points) * 1.05)
    y = y_axis(0, max(value for *_, value in points) * 1.1 or 1)
    series = {
        target: sorted((qps, value, f"{qps:g}/s: {value:.3f}") for name, qps, value in points if name == target)
        for target in targets
    }
    return charts.lines(series, x, y)


def _boxes(runs: Sequence[Run], targets: Sequence[str]) -> str:
    groups = [(run, ttfts) for run in runs if (ttfts := _ttfts(run))]
    if not groups:
        return ""
    rates = sorted({run.qps for run, _ in groups})
    low = min(percentile(ttfts, 5) for _, ttfts in groups)
    high = max(percentile(ttfts, 95) for _, ttfts in groups)
    y = y_axis(low * 0.8, max(high * 1.25, low * 2), logarithmic=True)
    slot = (charts.WIDTH - charts.LEFT - charts.RIGHT) / len(rates)
    width = min(36.0, 0.8 * slot / len(targets))
    out = [grid(None, y)]
    for at, qps in enumerate(rates):
        middle = charts.LEFT + (at + 0.5) * slot
        below, label = charts.HEIGHT - charts.BOTTOM + 18, _rate(qps)
        out.append(f'<text x="{middle:.1f}" y="{below}" text-anchor="middle">{label}</text>')
        for run, ttfts in groups:
            if run.qps != qps:
                continue
            i = targets.index(run.target)
            left = middle + (i - len(targets) / 2) * width + 2
            p5, p25, p50, p75, p95 = (y.at(percentile(ttfts, p)) for p in (5, 25, 50, 75, 95))
            center = left + (width - 4) / 2
            tip = f"<title>{escape(run.target)}, {label}: median {percentile(ttfts, 50):.3f} s</title>"
            out.append(
                f'<line class="line {color(i)}" x1="{center:.1f}" x2="{center:.1f}" y1="{p5:.1f}" y2="{p95:.1f}"/>'
            )
            out.append(
                f'<rect class="box {color(i)}" x="{left:.1f}" y="{p75:.1f}" width="{width - 4:.1f}" '
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
    x = x_axis(max(min(every) * 0.9, 1e-4), max(max(every) * 1.1, min(every) * 2), logarithmic=True)
    y = y_axis(0, 100)
    out = [grid(x, y)]
    for i, ttfts in enumerate(pooled.values()):
        path = " ".join(f"{x.at(t):.1f},{y.at(100 * (n + 1) / len(ttfts)):.1f}" for n, t in enumerate(ttfts))
        out.append(f'<polyline class="line {color(i)}" points="{path}"/>')
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
        name = run.target, _rate(run.qps)
        ttfts = (s.ttft_mean, s.ttft_p50, s.ttft_p90, s.ttft_p99, s.ttft_max)
        gaps = (s.gap_mean, s.gap_p50, s.gap_p99)
        time_rows.append([*name, *map(_seconds, ttfts), *map(_milliseconds, gaps)])
        rate_rows.append(
            [*name, s.sent, s.answered, s.failed, s.without_text, s.unfinished, s.late,
             f"{s.requests_per_second:.2f}", f"{s.input_tokens_per_second:,.0f}", f"{s.output_tokens_per_second:,.1f}",
             _figure(s.tokens_per_second_of_a_request, 1), _figure(s.cached_percent, 0)]
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
    tables = table(times, time_rows) + "<h2>Requests and tokens</h2>" + table(rates, rate_rows)
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
    return "<h2>What the servers counted meanwhile</h2>" + table(header, rows)


def _figure(value: float | None, digits: int, factor: float = 1) -> str:
    return "–" if value is None else f"{factor * value:.{digits}f}"


_seconds, _milliseconds = partial(_figure, digits=3), partial(_figure, digits=1, factor=1e3)


def text(runs: Sequence[Run]) -> str:
    """The summary as a table for a terminal. Gaps, between two tokens of a request, are in milliseconds."""
    names = (
        "target", "rate", "answered", "failed", "mean TTFT", "median", "99 %", "gap ms", "99 % gap", "requests/s",
        "tokens out/s", "hit %",
    )  # fmt: skip
    rows = [
        (run.target, _rate(run.qps), str(run.summary.answered), str(run.summary.failed),
         _seconds(run.summary.ttft_mean), _seconds(run.summary.ttft_p50), _seconds(run.summary.ttft_p99),
         _milliseconds(run.summary.gap_p50), _milliseconds(run.summary.gap_p99),
         f"{run.summary.requests_per_second:.2f}", f"{run.summary.output_tokens_per_second:.1f}",
         _figure(run.hit_percent, 0))
        for run in runs
    ]  # fmt: skip
    lines = columns([names, *rows], right=range(len(names)))
    hits = [f"hits of {run.target} at {_rate(run.qps)}: {run.describe_hits()}" for run in runs]
    return "\n".join([*lines, "", *hits])


def _rate(qps: float) -> str:
    return f"{qps:g}" if qps else "trace"
