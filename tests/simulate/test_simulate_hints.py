"""What callers say of requests: found in the trace itself, or made to be false."""

from __future__ import annotations

import math

from kvbm.simulate.hints import KINDS, sessions, turn_of
from kvbm.simulate.trace import Request, Trace, key_of


def trace_of(*chains):
    requests = [Request(at, len(chain) * 4, 1, [key_of("", n) for n in chain]) for at, chain in enumerate(chains)]
    return Trace("test", requests, 4)


# Two sessions behind a common first block, a branch of the first, and a prompt that never returns.
TRACE = trace_of([0, 1, 2], [0, 5, 6], [0, 1, 2, 3], [0, 5, 6, 7], [0, 1, 2, 3, 4], [0, 1, 2, 8], [0, 9])


def test_a_session_is_the_requests_that_go_on_with_a_whole_prompt():
    places = sessions(TRACE)
    assert [place.session for place in places] == [0, 1, 0, 1, 0, 0, 6]
    assert [place.is_last for place in places] == [False, False, False, True, True, True, True]


def test_hints_are_as_true_as_their_name_says():
    true, false = KINDS["true"](TRACE).requests, KINDS["false"](TRACE).requests
    assert [request.final for request in true] == [place.is_last for place in sessions(TRACE)]
    assert all(lie.final is not truth.final for lie, truth in zip(false, true, strict=True))
    assert any(request.ttl is not None and math.isnan(request.ttl) for request in false)
    assert KINDS["none"](KINDS["true"](TRACE)) == TRACE == KINDS["given"](TRACE)
    assert not any(request.final for request in KINDS["sessions"](TRACE).requests)


def test_hints_reach_the_policies_as_a_turn():
    first, *_, last = KINDS["true"](TRACE).requests
    assert turn_of(first).session == turn_of(first).session != turn_of(last).session
    assert turn_of(last).is_final
    assert turn_of(last).retention[0].priority < 0 < turn_of(first).retention[0].priority
    plain = turn_of(TRACE.requests[0])
    assert (plain.session, plain.is_final, plain.retention) == (0, False, ())
