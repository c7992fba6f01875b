"""The values that a setting accepts. A `Kind` turns text of the environment, a TOML or a JSON value into a typed one.

Parsing is strict: a value that a kind does not accept raises `RejectedError`, and the loader turns that into a sentence
of `ConfigError` with the name of the setting, the value and `Kind.accepts()`.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

# Larger numbers overflow in later arithmetic, and no setting has a use for them.
MAX_NUMBER = 10**15


class ConfigError(ValueError):
    """One or more settings are invalid. `problems` has one sentence for each; the message contains all of them."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        many = f"{len(problems)} settings are invalid:\n  " if len(problems) > 1 else ""
        super().__init__(many + "\n  ".join(problems))


class RejectedError(Exception):
    """`Kind.parse` does not accept the value. The text, if any, is a hint for the user."""


class Kind(msgspec.Struct, frozen=True):
    """The base of all kinds. `example` is a valid value for error messages."""

    example: str = ""

    def accepts(self) -> str:
        """The accepted values, as the end of a sentence that begins with "expected"."""
        raise NotImplementedError

    def parse(self, raw: object) -> Any:
        """Return the typed value, or raise `RejectedError`."""
        raise NotImplementedError


class Number(Kind, frozen=True):
    """A number within limits, without sign, underscores or unit. NaN and infinity are rejected."""

    unit: str = ""
    low: int = 0
    high: int = 0  # 0: MAX_NUMBER is the only limit
    whole: bool = True
    above: bool = False  # `low` itself is excluded

    def accepts(self) -> str:
        noun = "a whole number" if self.whole else "a number"
        if self.unit:
            noun += f" of {self.unit}"
        if self.above:
            return f"{noun} > {self.low}" + (f" and <= {self.high}" if self.high else "")
        return f"{noun} from {self.low} to {self.high}" if self.high else f"{noun} >= {self.low}"

    def parse(self, raw: object) -> int | float:
        value = self._read(raw)
        # "not >=" instead of "<", because a comparison with NaN is always false.
        if not value >= self.low or (self.above and value == self.low) or (self.high and value > self.high):
            raise RejectedError
        if value > MAX_NUMBER:
            raise RejectedError(f"the largest accepted number is {MAX_NUMBER}")
        return value

    def _read(self, raw: object) -> int | float:
        if isinstance(raw, str):
            text = raw.strip()
            pattern = r"[0-9]{1,30}" if self.whole else r"([0-9]{1,30}\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?"
            if not re.fullmatch(pattern, text):
                raise RejectedError
            return int(text) if self.whole else float(text)
        # bool is a subclass of int in Python, but `true` in TOML or JSON is not meant as the number 1.
        if isinstance(raw, bool) or not isinstance(raw, int if self.whole else (int, float)):
            raise RejectedError
        return raw if self.whole or raw > MAX_NUMBER else float(raw)


class Switch(Kind, frozen=True):
    """On or off. With `presence`, every word that does not mean off means on: upstream's KVBM treats these variables as
    on when they are set to anything."""

    presence: bool = False
    blank_is_off: bool = True

    def accepts(self) -> str:
        return "1, true, on or yes to turn it on, 0, false, off or no to turn it off"

    def parse(self, raw: object) -> bool:
        if isinstance(raw, bool):
            return raw
        if isinstance(raw, int) and raw in (0, 1):
            return raw == 1
        if isinstance(raw, str):
            word = raw.strip().lower()
            if word in ("1", "true", "on", "yes"):
                return True
            if word in ("0", "false", "off", "no") or (self.blank_is_off and not word):
                return False
            if self.presence:
                return True
        raise RejectedError


class Choice(Kind, frozen=True):
    """One of a few words. `synonyms` maps other accepted spellings to them."""

    words: tuple[str, ...] = ()
    synonyms: tuple[tuple[str, str], ...] = ()

    def accepts(self) -> str:
        also = "".join(f", {other} (= {word})" for other, word in self.synonyms)
        return f"one of {', '.join(self.words)}{also}"

    def parse(self, raw: object) -> str:
        if isinstance(raw, bool) and "on" in self.words:
            return "on" if raw else "off"
        if not isinstance(raw, str):
            raise RejectedError
        word = raw.strip().lower()
        word = dict(self.synonyms).get(word, word)
        if word in self.words:
            return word
        near = closest(word, self.words)
        raise RejectedError(f"did you mean {near}?" if near else "")


class Text(Kind, frozen=True):
    """A string. A string that is not empty must match `pattern`; `noun` describes the pattern for error messages."""

    noun: str = "text"
    pattern: str = ".*"

    def accepts(self) -> str:
        return self.noun

    def parse(self, raw: object) -> str:
        if not isinstance(raw, str):
            raise RejectedError
        text = raw.strip()
        if text and not re.fullmatch(self.pattern, text, re.DOTALL):
            raise RejectedError
        return text


class Host(Kind, frozen=True):
    """A host name or an IP address that workers can connect to. URLs and wildcards are rejected."""

    def accepts(self) -> str:
        return "a host name or IP address without scheme or port"

    def parse(self, raw: object) -> str:
        host = raw.strip().removeprefix("[").removesuffix("]") if isinstance(raw, str) else ""
        # The second alternative is IPv6: it has at least two colons, and "host:port" has one.
        if not re.fullmatch(r"[A-Za-z0-9._-]+|[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9]+)?", host):
            raise RejectedError
        return host


class FilePath(Kind, frozen=True):
    """A path; `~` is the home directory. The path need not exist: the code that opens it reports that."""

    def accepts(self) -> str:
        return "a path"

    def parse(self, raw: object) -> Path:
        if not isinstance(raw, (str, Path)) or not str(raw).strip() or "\0" in str(raw):
            raise RejectedError
        try:
            return Path(str(raw).strip()).expanduser()
        except RuntimeError as error:  # ~ of a user that this machine does not have
            raise RejectedError(str(error)) from error


class Shares(Kind, frozen=True):
    """Names with a fraction each, which add up to 1 at most."""

    max_names: int = 16

    def accepts(self) -> str:
        return f"at most {self.max_names} times NAME=SHARE, separated by commas, with shares that add up to at most 1"

    def parse(self, raw: object) -> str:
        if not isinstance(raw, str):
            raise RejectedError
        shares = split_shares(raw)
        if len(shares) > self.max_names or sum(shares.values()) > 1 + 1e-9:
            raise RejectedError
        return raw.strip()


class Backends(Kind, frozen=True):
    """Switches by backend name: one variable for each in the environment, one table of all in TOML and JSON."""

    def accepts(self) -> str:
        return "a table of switches by backend name"

    def parse(self, raw: object) -> Mapping[str, object]:
        if not isinstance(raw, Mapping):
            raise RejectedError
        return raw  # The loader parses the switches one by one, because it merges the tables of all sources.


def split_shares(text: str) -> dict[str, float]:
    """The fraction of each name in the text of a `Shares` setting."""
    share = Number(low=0, high=1, above=True, whole=False)
    found: dict[str, float] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, value = part.rpartition("=")
        name = name.strip()
        if not name or name in found:
            raise RejectedError("a name is missing" if not name else f"{name} is there twice")
        found[name] = float(share.parse(value))
    return found


def closest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the element of `names` that is most similar to `name`, or an empty string."""
    import difflib  # only needed when a name or a value is wrong

    return next(iter(difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)), "")
