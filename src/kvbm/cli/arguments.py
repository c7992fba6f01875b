"""Types of command-line arguments: the parser refuses other values by name."""

import argparse
import re

_COUNTS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9}
_SIZES = {
    "": 1, "mb": 1e-3, "gb": 1, "tb": 1e3, "m": 1e-3, "g": 1, "t": 1e3,
    "mib": 2**20 / 1e9, "gib": 2**30 / 1e9, "tib": 2**40 / 1e9,
}  # fmt: skip
# A comma separates thousands only: "0,5" is refused.
_NUMBER = re.compile(r"(\d{1,3}(?:,\d{3})+|[\d._]+(?:e[+-]?\d+)?) *([a-z]*)")


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number") from None


def integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number") from None


def positive(text: str) -> float:
    return _positive(text, {"": 1}, "a number above 0")


def count(text: str) -> int:
    """``2000000``, ``128k`` or ``1.5M``: thousands and millions."""
    return int(_positive(text, _COUNTS, "a number of at least 1, for example 2000000, 128k or 1.5M", low=1))


def gigabytes(text: str) -> float:
    """In GB (1e9 bytes): ``80``, ``80GB``, ``80GiB`` or ``1.5TB``."""
    return _positive(text, _SIZES, "a size above 0 in GB, for example 80, 80GB or 80GiB")


def _positive(text: str, units: dict[str, float], expected: str, low: float = 0, high: float = 1e15) -> float:
    found = _NUMBER.fullmatch(text.strip().lower())
    try:
        number = float(found[1].replace(",", "")) * units[found[2]] if found else 0.0
    except (KeyError, ValueError):
        number = 0.0
    if not (number > 0 and low <= number <= high):
        raise argparse.ArgumentTypeError(f"{text!r}: expected {expected}")
    return number


def whole(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 10**9:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number above 0")
    return int(text)


def share(text: str) -> float:
    return _positive(text, {"": 1}, "a number above 0 and up to 1", high=1)
