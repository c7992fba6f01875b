"""A simulation's results as JSON, as text and as a page with plots."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import msgspec

from kvbm.observe import charts
from kvbm.observe.charts import Point
from kvbm.observe.format import columns, seconds, size
from kvbm.plans import DEVICE, TierName
from kvbm.simulate.results import Outcome

OPTIMUM = "offline optimum"


class Bound(msgspec.Struct):
    """The offline optimum with so many slots in all tiers together."""

    slots: int
    bytes: int
    prefix_hit_rate: float


class Result(msgspec.Struct):
    """Everything that `kvbm simulate` writes."""

    kvbm: str
    taken: str
    command: list[str]
    trace: dict[str, int | float | str]
    machine: dict[str, int | float]
    possible_prefix_hit_rate: float
    outcomes: list[Outcome]
    optimum: list[Bound]
    advice: list[str]
    # Of one record with the sizes of its engine: lookups, and how many found what they found there.
    replayed_lookups: int = 0
    equal_lookups: int = 0


def to_json(result: Result) -> bytes:
    return msgspec.json.format(msgspec.json.encode(result), indent=2)


def from_json(data: bytes) -> Result:
    return msgspec.json.decode(data, type=Result)


def series_of(one: Outcome) -> str:
    """The line of a plot that an outcome is on: its settings, and the sizes of all tiers but the near one."""
    others = [f"{size(count)} of {tier}" for tier, count in list(one.bytes.items())[1:]]
    return ", ".join([one.variant, *others])


def _tiers(outcomes: Sequence[Outcome]) -> list[TierName]:
    """That any of them has, the fastest first."""
    longest = max(outcomes, key=lambda one: len(one.slots))
    return list(dict.fromkeys([*longest.slots, *(tier for one in outcomes for tier in one.slots)]))


def _size_of(one: Outcome, tier: TierName) -> str:
    return size(one.bytes[tier]) if tier in one.slots else "–"


def text(result: Result) -> str:
    """The table for a terminal, and the advice."""
    tiers = _tiers(result.outcomes)
    header = [
        "settings", *tiers, "prefix hits", *(f"in {tier}" for tier in tiers), "optimum", "tokens", "mean TTFT",
        *(f"{tier} written" for tier in tiers[1:]),
    ]  # fmt: skip
    bounds = {bound.slots: bound.prefix_hit_rate for bound in result.optimum}
    rows = [header]
    for one in result.outcomes:
        bound = bounds.get(one.total_slots)
        rows.append([
            one.variant, *(_size_of(one, tier) for tier in tiers), f"{one.prefix_hit_rate:.3f}",
            *(f"{one.tiers[tier].prefix_hit_rate:.3f}" if tier in one.slots else "–" for tier in tiers),
            "–" if bound is None else f"{bound:.3f}", f"{one.token_hit_rate:.3f}", seconds(one.mean_ttft_seconds),
            *(size(one.tiers[tier].written_bytes) if tier in one.slots else "–" for tier in tiers[1:]),
        ])  # fmt: skip
    lines = [f"For {_machine(result)}:", "", *columns(rows, right=range(1, len(header)))]
    if result.replayed_lookups:
        lines += ["", _agreement(result)]
    return "\n".join([*lines, "", *result.advice])


def _machine(result: Result) -> str:
    about = result.machine
    parts = [
        f"blocks of {size(about['block_bytes'])}", f"prefill of {about['prefill_tokens_per_second']:,.0f} tokens/s",
        *(f"{about[f'{tier}_gbps']:g} GB/s from {tier}" for tier in _tiers(result.outcomes)),
    ]  # fmt: skip
    return ", ".join(parts)


def _agreement(result: Result) -> str:
    return (
        f"With the sizes of the record, {result.equal_lookups:,} of {result.replayed_lookups:,} lookups find the "
        "blocks that they found in the engine."
    )


def page(result: Result) -> str:
    """The page: advice first, then plots, then every figure."""
    outcomes, possible = result.outcomes, result.possible_prefix_hit_rate
    names = list(dict.fromkeys(series_of(one) for one in outcomes))
    about = [
        f"<li>{escape(', '.join(f'{name} {value}' for name, value in result.trace.items()))}.</li>",
        f"<li>{escape(', '.join(f'{name} {value}' for name, value in result.machine.items()))}.</li>",
        f"<li>KVBM {escape(result.kvbm)}, {escape(result.taken)}: <code>{escape(' '.join(result.command))}</code></li>",
    ]
    if result.replayed_lookups:
        about.append(f"<li>{escape(_agreement(result))}</li>")
    parts = [
        f"<h1>Cache sizes for {escape(str(result.trace.get('name', 'a trace')))}</h1>",
        f"<ul>{''.join(about)}</ul>",
    ]
    parts += [f'<p class="verdict">{escape(sentence)}</p>' for sentence in result.advice]
    parts.append(charts.legend([*names, OPTIMUM]))
    hits: dict[str, list[Point]] = {name: [] for name in names}
    times: dict[str, list[Point]] = {name: [] for name in names}
    for one in outcomes:
        gigabytes = one.total_bytes / 1e9
        where = ", ".join(f"{size(count)} of {tier}" for tier, count in one.bytes.items())
        hits[series_of(one)].append((gigabytes, one.prefix_hit_rate, f"{where}: {one.prefix_hit_rate:.3f}"))
        times[series_of(one)].append((gigabytes, one.mean_ttft_seconds, f"{where}: {one.mean_ttft_seconds:.3f} s"))
    hits[OPTIMUM] = [
        (bound.bytes / 1e9, bound.prefix_hit_rate, f"{size(bound.bytes)}: {bound.prefix_hit_rate:.3f}")
        for bound in result.optimum
    ]
    parts.append(_over_size("Prefix hit rate over the size of all tiers", hits, "of all blocks", max(possible, 0.01)))
    parts.append(_over_size("Expected mean time to first token", times, "seconds, without queueing"))
    staged = _tiers(outcomes)[1:]
    if staged:
        parts.append(_writes(outcomes, staged, names))
    parts.append("<h2>All replays</h2>" + charts.table(*_rows(result)) + _NOTE)
    return charts.page("simulate", parts)


def _over_size(title: str, series: dict[str, list[Point]], y_name: str, high: float = 0.0) -> str:
    points = [point for line in series.values() for point in line]
    low, wide = min(x for x, *_ in points), max(x for x, *_ in points)
    x = charts.x_axis(low * 0.9, max(wide * 1.1, low * 2), logarithmic=True)
    y = charts.y_axis(0, max(high, *(value for _, value, _ in points)) * 1.1)
    drawing = charts.lines({name: sorted(line) for name, line in series.items()}, x, y, dashed=OPTIMUM)
    return charts.figure(title, drawing, "GB of all tiers (logarithmic)", y_name)


def _writes(outcomes: Sequence[Outcome], staged: Sequence[TierName], names: Sequence[str]) -> str:
    """Hits over the bytes that were written for them: upper left is best."""
    series: dict[str, list[Point]] = {name: [] for name in names}
    for one in outcomes:
        written = sum(one.tiers[tier].written_bytes for tier in staged if tier in one.slots) / 1e9
        tip = f"{written:,.0f} GB written: {one.prefix_hit_rate:.3f}"
        series[series_of(one)].append((written, one.prefix_hit_rate, tip))
    points = [point for line in series.values() for point in line]
    x = charts.x_axis(0, max(x for x, *_ in points) * 1.05 or 1)
    y = charts.y_axis(0, max(value for _, value, _ in points) * 1.1 or 1)
    drawing = charts.lines({name: sorted(line) for name, line in series.items()}, x, y)
    title = f"Prefix hit rate over bytes written to {' and '.join(staged)}"
    return charts.figure(title, drawing, "GB written", "of all blocks")


def _rows(result: Result) -> tuple[list[str], list[list[str]]]:
    sized = _tiers(result.outcomes)
    tiers = [DEVICE, *sized] if any(one.tiers[DEVICE].prefix_hit_rate for one in result.outcomes) else sized
    header = ["settings", *sized, "prefix hits", "block hits", "token hits", "mean TTFT", "median"]
    for tier in tiers:
        header += [f"{tier}: prefix", "blocks", "tokens", "read", "written", "evicted"]
    rows = []
    for one in result.outcomes:
        row = [
            one.variant, *(_size_of(one, tier) for tier in sized), f"{one.prefix_hit_rate:.4f}",
            f"{one.block_hit_rate:.4f}", f"{one.token_hit_rate:.4f}", f"{one.mean_ttft_seconds:.3f}",
            f"{one.median_ttft_seconds:.3f}",
        ]  # fmt: skip
        for tier in tiers:
            own = one.tiers.get(tier)
            if own is None:
                row += ["–"] * 6
                continue
            row += [
                f"{own.prefix_hit_rate:.4f}", f"{own.block_hit_rate:.4f}", f"{own.token_hit_rate:.4f}",
                size(own.read_bytes), size(own.written_bytes), f"{own.evicted_blocks:,}",
            ]  # fmt: skip
        rows.append(row)
    return header, rows


_NOTE = """<p><i>Prefix hits</i>: blocks found without a gap from the front of the prompt, of all blocks of the prompts;
those are of use. <i>Block hits</i> also count blocks behind a gap. <i>Token hits</i>: tokens of prefix hits, of all
prompt tokens. Times to first token are those that the cost model expects, without time in a queue. The offline optimum
knows the future: it is a bound, not a policy.</p>"""
