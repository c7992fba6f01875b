"""Figures and names as people read them."""

from __future__ import annotations


def size(number: float) -> str:
    """Bytes, in powers of ten as everywhere in KVBM."""
    for unit, one in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= one:
            return f"{number / one:.3g} {unit}" if number < 1000 * one else f"{number / one:.0f} {unit}"
    return f"{number:.0f} B"


def seconds(number: float) -> str:
    long = abs(number)
    if long >= 7200:
        return f"{number / 3600:.1f} h"
    if long >= 120:
        return f"{number / 60:.0f} min"
    return f"{number:.1f} s" if long >= 1 else f"{number * 1e3:.0f} ms"


def printable(text: object, longest: int = 200) -> str:
    """A name or text from a file, for a terminal: one line, no control character and none that changes the direction of
    the text, of bounded length."""
    shown = str(text)
    if len(shown) > longest:
        shown = f"{shown[: longest - 3]}..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)
