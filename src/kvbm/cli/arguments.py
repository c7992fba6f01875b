"""Types of command-line arguments: the parser refuses other values by name."""

import argparse


def positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number < 1e15:  # also refuses NaN
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0")
    return number


def whole(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 10**9:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number above 0")
    return int(text)


def share(text: str) -> float:
    number = positive(text)
    if number > 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0 and up to 1")
    return number
