"""What callers say of their requests: sessions, ends and priorities, true or false, for traces that do not tell.

True hints come from the rest of the trace, as an application knows its own sessions. They show what hints are worth.
False ones show what they can cost: each says the opposite of the truth, or has a value that makes no sense.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple

import msgspec

from kvbm.core.keys import Key
from kvbm.core.policy import Retention, Turn
from kvbm.simulate.trace import Request, Trace

HIGH, LOW = 100, -100
WILD = (2**63, -(2**63), 0)


def turn_of(request: Request) -> Turn:
    """The hints of a request as an engine's adapter passes them on."""
    if (said := request.hints) is not None:
        kept = (Retention(priority, inf if ttl is None else ttl, *part) for priority, ttl, *part in said.retention)
        return Turn(session=said.session, is_final=said.final, retention=tuple(kept))
    retention: tuple[Retention, ...] = ()
    if request.priority is not None or request.ttl is not None:
        retention = (Retention(request.priority or 0, inf if request.ttl is None else request.ttl),)
    name = hashlib.blake2b(request.session.encode(), digest_size=8).digest() if request.session else b""
    return Turn(session=int.from_bytes(name, "big"), is_final=request.final, retention=retention)


class Place(NamedTuple):
    """Of a request in its session."""

    session: int
    is_last: bool


def sessions(trace: Trace) -> list[Place]:
    """A request goes on with the session of the latest request whose prompt it begins with, but for the last block,
    which may have been partly filled. The first block of a prompt alone makes no session: prompts share it that have
    nothing else in common."""
    ends: dict[Key, int] = {}  # last block of a request -> the request
    session: list[int] = []
    comes_back = [False] * len(trace.requests)
    for number, request in enumerate(trace.requests):
        before = next((ends[key] for key in reversed(request.keys[1:]) if key in ends), None)
        if before is None:
            session.append(number)
        else:
            session.append(session[before])
            comes_back[before] = True
        for key in request.keys[1:][-2:]:
            ends[key] = number
    return [Place(one, not back) for one, back in zip(session, comes_back, strict=True)]


def _with(change: Callable[[int, Place], dict[str, Any]]) -> Callable[[Trace], Trace]:
    """``change``: returns the fields that change in a request, given its number and its place."""

    def changed(trace: Trace) -> Trace:
        pairs = zip(trace.requests, sessions(trace), strict=True)
        requests = [
            request._replace(hints=None, **change(number, place)) for number, (request, place) in enumerate(pairs)
        ]
        return msgspec.structs.replace(trace, requests=requests)

    return changed


def _without(trace: Trace) -> Trace:
    stripped = [r._replace(session="", final=False, priority=None, ttl=None, hints=None) for r in trace.requests]
    return msgspec.structs.replace(trace, requests=stripped)


def _named(number: int, place: Place) -> dict[str, Any]:
    return {"session": str(place.session)}


def _with_ends(number: int, place: Place) -> dict[str, Any]:
    return {"session": str(place.session), "final": place.is_last}


def _with_priorities(number: int, place: Place) -> dict[str, Any]:
    return {"session": str(place.session), "priority": LOW if place.is_last else HIGH}


def _true(number: int, place: Place) -> dict[str, Any]:
    return _with_ends(number, place) | _with_priorities(number, place)


def _false(number: int, place: Place) -> dict[str, Any]:
    """Sessions that end are said to go on and the other way round; every third request has values without sense."""
    final = not place.is_last
    if number % 3 == 0:
        return {"session": "\0" * 1000, "final": final, "priority": WILD[number % len(WILD)], "ttl": float("nan")}
    name = str(number % 7) if number % 2 else str(place.session)
    return {"session": name, "final": final, "priority": HIGH if place.is_last else LOW, "ttl": 1e300}


def _random(number: int, place: Place) -> dict[str, Any]:
    drawn = random.Random(number)
    session, final = str(drawn.randrange(50)), drawn.random() < 0.5
    return {"session": session, "final": final, "priority": drawn.choice((LOW, 0, HIGH)), "ttl": 60.0}


def _greedy(number: int, place: Place) -> dict[str, Any]:
    """Every caller wants all of its blocks to stay."""
    return {"session": "me", "priority": HIGH, "ttl": 1e9}


def _turncoat(number: int, place: Place) -> dict[str, Any]:
    """True until they are believed, then false, and so on."""
    return (_false if number // 1500 % 2 else _true)(number, place)


KINDS: dict[str, Callable[[Trace], Trace]] = {
    "given": lambda trace: trace,
    "none": _without,
    "sessions": _with(_named),
    "ends": _with(_with_ends),
    "priorities": _with(_with_priorities),
    "true": _with(_true),
    "false": _with(_false),
    "random": _with(_random),
    "greedy": _with(_greedy),
    "turncoat": _with(_turncoat),
}
