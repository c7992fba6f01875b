"""Figures, names and tables as text."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence


def size(number: float) -> str:
    """Bytes, in powers of ten."""
    for unit, one in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= one:
            return f"{number / one:.3g} {unit}" if number < 999.5 * one else f"{number / one:.0f} {unit}"
    return f"{number:.0f} B"


def gigabytes(number: float) -> str:
    """Bytes as a value for a size setting, rounded down to three digits: what it names is there."""
    amount = number / 1e9
    if amount <= 0:
        return "0"
    step = 10.0 ** (math.floor(math.log10(amount)) - 2)
    return f"{math.floor(amount / step + 1e-6) * step:.6g}"


def seconds(number: float) -> str:
    long = abs(number)
    if long >= 7200:
        return f"{number / 3600:.1f} h"
    if long >= 120:
        return f"{number / 60:.0f} min"
    return f"{number:.1f} s" if long >= 1 else f"{number * 1e3:.0f} ms"


def moment(unix_seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_seconds)) if unix_seconds else "never"


def printable(text: object, longest: int = 200) -> str:
    """Text from a file, a socket or a port, for a terminal: one line of bounded length.

    Control characters and those that change the direction of text are escaped.
    """
    shown = str(text)
    if len(shown) > longest:
        shown = f"{shown[: longest - 3]}..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Rows as lines of aligned columns; those of ``right`` are aligned at their right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:{'>' if at in right else '<'}{widths[at]}}" for at, cell in enumerate(row)).rstrip()
        for row in rows
    ]
