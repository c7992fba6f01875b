"""What callers say of their requests, made harmless: priorities, sessions and lifetimes as a `Turn`.

A hint never pins a block, and no value of one may raise: what cannot be read is as good as not said.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from math import isfinite
from typing import Any

from kvbm.core.policy import NO_HINTS, Retention, Turn

logger = logging.getLogger("kvbm")

KEYS = ("ttl", "priority", "session", "final")  # of kv_transfer_params.kvbm
_USUAL_PRIORITY = 35  # of TensorRT-LLM's retention ranges, from 0 to 100
_MAX_RANGES = 8


def number(value: object) -> float | None:
    """A finite number, or None."""
    try:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value):
            return float(value)
    except OverflowError:
        pass
    return None


def from_params(params: object, session: object = None, priority: object = None) -> Turn:
    """Hints of a vLLM request. ``params``: ``kv_transfer_params``, of which ``kvbm`` holds ``ttl`` (seconds),
    ``priority`` (above 0: keep longer), ``session`` and ``final``. ``priority``: vLLM's own, where less is more
    important and 0 is usual."""
    mine = params.get("kvbm") if isinstance(params, Mapping) else None
    said = mine if isinstance(mine, Mapping) else {}
    if not said.keys() <= set(KEYS):
        _refuse_unknown()
    name = said.get("session", session)
    important = number(said.get("priority"))
    if important is None:
        important = -(number(priority) or 0.0)
    seconds = number(said.get("ttl"))
    if seconds is not None and seconds > 0 and not important:
        important = 1.0  # a lifetime alone asks to keep the blocks
    retention = ()
    if important:
        retention = (Retention(1 if important > 0 else -1, float("inf") if seconds is None else seconds),)
    number_of_session = hash(name) if isinstance(name, str) and name else 0
    turn = Turn(session=number_of_session, is_final=said.get("final") is True, retention=retention)
    return NO_HINTS if turn == NO_HINTS else turn


@cache  # once: callers of the engine's HTTP port choose the words
def _refuse_unknown() -> None:
    logger.warning("kv_transfer_params.kvbm of a request has entries that KVBM ignores. It knows %s.", ", ".join(KEYS))


def from_priorities(first: int, priorities: Sequence[Any]) -> tuple[Retention, ...]:
    """TensorRT-LLM's priorities of a request's blocks, from block ``first`` on."""
    made: list[Retention] = []
    for at, value in enumerate(priorities, first):
        priority = number(value)
        if priority is None or priority == _USUAL_PRIORITY:
            continue
        sign = 1 if priority > _USUAL_PRIORITY else -1
        if made and made[-1].end == at and made[-1].priority == sign:
            made[-1] = made[-1]._replace(end=at + 1)
        elif len(made) < _MAX_RANGES:
            made.append(Retention(sign, start=at, end=at + 1))
    return tuple(made)


def from_retention(config: object, block_size: int) -> tuple[Retention, ...]:
    """TensorRT-LLM's ``KvCacheRetentionConfig``: ranges of tokens with a priority and a duration."""
    ranges = getattr(config, "token_range_retention_configs", None)
    made = []
    for each in list(ranges)[:_MAX_RANGES] if isinstance(ranges, (list, tuple)) else ():
        priority = number(getattr(each, "priority", None))
        start = number(getattr(each, "token_start", None)) or 0.0
        end = number(getattr(each, "token_end", None))
        if priority is None or priority == _USUAL_PRIORITY or start < 0 or (end is not None and end <= start):
            continue
        duration = getattr(each, "duration_ms", None)
        milliseconds = number(duration.total_seconds() * 1e3 if hasattr(duration, "total_seconds") else duration)
        last = 2**31 - 1 if end is None else min(int(end) // block_size, 2**31 - 1)
        seconds = float("inf") if milliseconds is None else milliseconds / 1e3
        made.append(Retention(1 if priority > _USUAL_PRIORITY else -1, seconds, int(start) // block_size, last))
    return tuple(made)
