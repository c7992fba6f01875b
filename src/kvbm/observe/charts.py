"""Charts and tables of self-contained HTML pages, light and dark, drawn as SVG without a library."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 12, 44
COLORS = ("a", "b", "c", "d", "e", "f")  # classes of the style sheet

Point = tuple[float, float, str]  # x, y, and a text for the pointer


def page(title: str, body: Iterable[str]) -> str:
    return _PAGE.replace("{title}", escape(title)).replace("{body}", "\n".join(body))


def legend(targets: Sequence[str]) -> str:
    keys = (f'<span><i class="key {color(i)}"></i>{escape(name)}</span>' for i, name in enumerate(targets))
    return f'<p class="legend">{"".join(keys)}</p>'


def color(number: int) -> str:
    return COLORS[number % len(COLORS)]


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


def x_axis(low: float, high: float, logarithmic: bool = False) -> Axis:
    return Axis(low, high, LEFT, WIDTH - RIGHT, logarithmic)


def y_axis(low: float, high: float, logarithmic: bool = False) -> Axis:
    return Axis(low, high, HEIGHT - BOTTOM, TOP, logarithmic)


def figure(title: str, drawing: str, x: str, y: str) -> str:
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


def grid(x: Axis | None, y: Axis) -> str:
    out = []
    for mark in y.marks():
        at = y.at(mark)
        out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        out.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{mark:g}</text>')
    for mark in x.marks() if x else ():
        out.append(f'<text x="{x.at(mark):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{mark:g}</text>')  # type: ignore[union-attr]
    return "".join(out)


def lines(series: Mapping[str, Sequence[Point]], x: Axis, y: Axis, dashed: str = "") -> str:
    """A line for each series, in the colors of the legend. ``dashed``: the name of a series that is only a bound."""
    out = [grid(x, y)]
    for i, (name, points) in enumerate(series.items()):
        path = " ".join(f"{x.at(at):.1f},{y.at(value):.1f}" for at, value, _ in points)
        style = ' stroke-dasharray="6 4"' if name == dashed else ""
        out.append(f'<polyline class="line {color(i)}"{style} points="{path}"/>')
        for at, value, tip in points:
            shown = f"<title>{escape(name)}, {escape(tip)}</title>"
            out.append(
                f'<circle class="dot {color(i)}" cx="{x.at(at):.1f}" cy="{y.at(value):.1f}" r="4">{shown}</circle>'
            )
    return "".join(out)


def table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>KVBM: {title}</title>
<style>
:root { --ground: #fff; --ink: #1a1f26; --soft: #5a6472; --line: #dde1e7;
  --a: #6b7280; --b: #2b6cb0; --c: #2f7d5b; --d: #8a5a2b; --e: #7a4fa3; --f: #b3341f; }
@media (prefers-color-scheme: dark) { :root { --ground: #13171c; --ink: #e8ebef; --soft: #9aa5b3; --line: #313944;
  --a: #a3acb8; --b: #63a4e8; --c: #55b98c; --d: #d09a62; --e: #b694dc; --f: #f0806b; } }
body { max-width: 1000px; margin: 0 auto; padding: 16px; background: var(--ground); color: var(--ink);
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
