"""The log of requests: hit rates over a window, what was saved, and why nothing was found."""

from __future__ import annotations

import hashlib

import pytest

from kvbm.core.cost import Prices
from kvbm.core.match import Match, Run
from kvbm.core.policy import Retention, Turn
from kvbm.observe.record import HintsLine, StoreLine
from kvbm.observe.requests import EVICTED, NEW, Admission, RequestLog, Seen, looked_up
from kvbm.plans import Copy, LoadPlan, StorePlan
from kvbm.simulate.hints import turn_of
from kvbm.simulate.trace import Request
from tiernames import DISK, HOST


def keys(name, count):
    return [hashlib.sha256(f"{name} {i}".encode()).digest() for i in range(count)]


def admission(request="r", looked_up=10, host=0, disk=0, loaded=None, **more):
    found = {tier: blocks for tier, blocks in ((HOST, host), (DISK, disk)) if blocks}
    loaded = host + disk if loaded is None else loaded
    return Admission(request, 170, 0, looked_up, None, found, loaded, 16, "loaded" if loaded else "not found", **more)


def load_plan(number, blocks=4):
    return LoadPlan(number, "r", [Copy(HOST, list(range(blocks)), list(range(blocks)))], True)


def test_hit_rates_are_over_the_latest_requests_only():
    log = RequestLog(window=2)
    log.admitted(admission(host=10))
    assert log.hit_rates().rate("host") == 1.0
    log.admitted(admission(host=2, disk=3))
    rates = log.hit_rates()
    assert (rates.requests, rates.blocks, rates.hits) == (2, 20, {"host": 12, "disk": 3})
    log.admitted(admission())
    rates = log.hit_rates()
    assert (rates.requests, rates.blocks, rates.hits) == (2, 20, {"host": 2, "disk": 3})
    log.admitted(admission())
    assert log.hit_rates().hits == {}
    assert log.hit_rates().rate("host") == 0.0


def test_a_request_that_asked_for_nothing_is_no_miss():
    log = RequestLog()
    log.admitted(admission(looked_up=0))
    assert log.hit_rates().requests == 0
    assert {name: count for name, count in log.outcomes.items() if count} == {"not found": 1}


def test_what_is_found_and_not_loaded_is_a_hit_all_the_same():
    log = RequestLog()
    log.admitted(admission(disk=8, loaded=0))
    assert log.hit_rates().rate("disk") == 0.8


def test_a_load_saves_what_computing_would_have_taken_less_what_it_took():
    log = RequestLog()
    log.admitted(admission(host=4, compute_seconds=0.5), plan_id=1)
    log.loaded(load_plan(1), 0.2, set())
    assert log.saved_seconds == pytest.approx(0.3)
    (request,) = log.latest(5)
    assert (request.load_seconds, request.saved_seconds) == (0.2, pytest.approx(0.3))


def test_of_a_load_of_unknown_length_nothing_is_claimed():
    log = RequestLog()
    log.admitted(admission(host=4, compute_seconds=0.5), plan_id=1)
    log.loaded(load_plan(1), 0.0, set())
    assert (log.saved_seconds, log.lost_seconds, log.loads) == (0.0, 0.0, 0)
    assert log.latest(1)[0].saved_seconds is None


def test_where_nobody_knows_how_fast_computing_is_nothing_is_claimed():
    log = RequestLog()
    log.admitted(admission(host=4), plan_id=1)
    log.loaded(load_plan(1), 0.2, set())
    assert (log.saved_seconds, log.lost_seconds, log.loads) == (0.0, 0.0, 0)
    (request,) = log.latest(1)
    assert (request.load_seconds, request.saved_seconds) == (0.2, None)


def test_what_was_looked_up_is_told_from_a_match():
    names = keys("k", 6)
    found = Match(1, [Run(HOST, [7, 8]), Run(DISK, [9])], False, names)
    seen = looked_up("r", 100, 16, 6, found, 3, 16)
    assert (seen.looked_up, seen.found, seen.missing) == (5, {HOST: 2, DISK: 1}, names[4])
    assert seen.outcome == "loaded"
    refused = looked_up("r", 100, 16, 4, found, 0, 16)
    assert (refused.missing, refused.loaded, refused.outcome) == (None, 0, "found, not loaded")
    nothing = looked_up("r", 100, 16, 6, Match(1, [], False, names), 0, 16)
    assert (nothing.missing, nothing.outcome) == (names[1], "not found")


def test_blocks_that_are_lost_are_counted_for_the_tier_they_were_in():
    log = RequestLog()
    copies = [Copy(HOST, [0, 1], [0, 1]), Copy(DISK, [5, 6], [2, 3]), Copy(HOST, [9], [4])]
    log.loaded(LoadPlan(1, "r", copies, True), 0.1, {1, 2, 3, 4})
    assert log.failed_loads == {HOST: 2, DISK: 2}
    log.stored(StorePlan(2, Copy(HOST, [1, 2], [3, 4])), 0.1, ok=False)
    assert log.failed_stores == {HOST: 2}


def test_a_load_that_was_slower_than_computing_is_a_loss_and_not_a_small_gain():
    log = RequestLog()
    for number, seconds in ((1, 0.1), (2, 0.9)):
        log.admitted(admission(host=4, compute_seconds=0.5), plan_id=number)
        log.loaded(load_plan(number), seconds, set())
    saved = log.saved(1000.0, True)
    assert saved.saved_seconds == pytest.approx(0.4)
    assert saved.lost_seconds == pytest.approx(0.4)
    assert saved.loads == 2


def test_a_load_that_failed_has_saved_nothing():
    log = RequestLog()
    log.admitted(admission(host=4, compute_seconds=5.0), plan_id=1)
    log.loaded(load_plan(1), 0.2, {0, 1, 3})
    assert log.saved_seconds == 0.0
    assert log.lost_seconds == pytest.approx(0.2)
    assert log.latest(1)[0].failed_tokens == 48


def test_the_newest_request_comes_first_and_the_oldest_is_forgotten():
    log = RequestLog(latest=3)
    for i in range(5):
        log.admitted(admission(str(i)))
    assert [request.id for request in log.latest(10)] == ["4", "3", "2"]
    assert [request.id for request in log.latest(1)] == ["4"]
    assert log.latest(0) == []


def test_a_block_that_was_there_once_is_told_from_a_new_one():
    log = RequestLog()
    known, new = keys("known", 20), keys("new", 20)
    log.admitted(admission("a")._replace(missing=known[0]))
    log.finished("a", 16, known)
    log.admitted(admission("b")._replace(missing=known[7]))
    log.admitted(admission("c")._replace(missing=new[0]))
    assert log.missed == {NEW: 2, EVICTED: 1}


def test_what_was_seen_is_remembered_in_bounded_memory():
    seen = Seen()
    before = seen._prints.nbytes
    for part in range(40):
        seen.add(keys(part, 5000))
    assert sum(key in seen for key in keys(39, 5000)) > 4950  # a few share a place
    assert sum(key in seen for key in keys("never", 5000)) == 0
    assert seen._prints.nbytes == before <= 16 << 20


@pytest.mark.parametrize("was_computed_here", [True, False])
def test_a_request_is_seen_to_compute_what_it_did_not_find(was_computed_here, monkeypatch):
    """Blocks of an earlier engine, which a disk or a store has kept, are new to this one."""
    log = RequestLog()
    blocks = keys("a", 12)
    if was_computed_here:
        log.finished("first", 1, blocks[:10])
    added = []
    monkeypatch.setattr(log._seen, "add", added.extend)
    log.finished("second", 1, blocks, found=10)
    assert added == (blocks[10:] if was_computed_here else blocks)


class Lines:
    dropped = 0

    def __init__(self):
        self.lines = []

    def now(self):
        return 5.0

    def add(self, event, keys=(), **fields):
        self.lines.append((event, len(keys), fields))


def test_what_happens_is_handed_to_the_record():
    record = Lines()
    log = RequestLog(record=record)
    log.admitted(admission("a", host=4, compute_seconds=0.5), plan_id=1)
    log.loaded(load_plan(1), 0.2, set())
    log.stored(StorePlan(2, Copy(HOST, [1, 2], [3, 4])), 0.1, ok=True)
    log.admitted(admission("a"))  # it was preempted and comes back
    log.finished("a", 30, keys("a", 12))
    log.finished("a", 30, [])
    (load, _, load_fields), (store, _, store_fields), (request, ids, fields) = record.lines
    assert (load, load_fields["blocks"], load_fields["seconds"]) == ("load", {"host": 4}, 0.2)
    assert (store, store_fields["tier"], store_fields["blocks"]) == ("store", "host", 2)
    assert (request, ids) == ("request", 12)
    assert (fields["input_length"], fields["output_length"], fields["loaded_tokens"]) == (170, 30, 64)
    assert (fields["found"], fields["outcome"], fields["load_seconds"]) == ({"host": 64}, "loaded", 0.2)


def test_everything_that_happens_is_noticed():
    log = RequestLog()
    seen = {log.changes}
    for happens in (
        lambda: log.admitted(admission(), plan_id=1),
        lambda: log.loaded(load_plan(1), 0.1, set()),
        lambda: log.loaded(load_plan(9), 0.1, set()),
        lambda: log.stored(StorePlan(2, Copy(HOST, [1], [3])), 0.1, ok=False),
    ):
        happens()
        seen.add(log.changes)
    assert len(seen) == 5


def test_nothing_is_left_of_requests_that_are_over():
    log = RequestLog()
    for i in range(10):
        log.admitted(admission(str(i), host=1), plan_id=i)
        log.loaded(load_plan(i), 0.1, set())
        log.finished(str(i), 1, [])
    assert not log._running
    assert not log._loading


def test_a_record_has_every_operation_in_its_order():
    record = Lines()
    log = RequestLog(record=record)
    prices = Prices(0.02, 0.0001, {HOST: (5e-11, 0.0005)})
    log.admitted(admission("a", host=4), plan_id=1, prices=prices)
    log.admitted(admission("b", looked_up=0))
    log.stores_planned([("a", 0, 10), ("b", 0, 2)], plan_id=2)
    log.loaded(load_plan(1), 0.2, {3})
    log.stored(StorePlan(2, Copy(HOST, [0], [0])), 0.1, ok=False)
    log.moves_planned()
    log.finished("a", 7, keys("a", 10))
    log.moved(3, DISK, 1, 0)
    log.reset()
    log.finished("b", 0, ())
    load, store, moves, first, move, reset, second = (fields for _, _, fields in record.lines)
    (lookup,) = first["lookups"]
    assert (lookup.order, lookup.limit, lookup.found, lookup.loaded, lookup.prices) == (1, 10, {HOST: 4}, 4, prices)
    assert (second["lookups"][0].order, second["lookups"][0].limit) == (2, 0)
    assert first["stores"] == [StoreLine(3, 5.0, 0, 10, 2)]
    assert second["stores"] == [StoreLine(3, 5.0, 0, 2, 2, place=1)]
    assert (load["order"], load["lost"], store["order"], store["ok"]) == (4, [3], 5, False)
    assert (moves["order"], first["ended"], move["order"]) == (6, 7, 8)
    assert (reset["order"], second["ended"]) == (9, 10)


def test_a_record_has_the_hints_of_the_caller():
    record = Lines()
    log = RequestLog(record=record)
    turns = [Turn(session=7, is_final=True, retention=(Retention(-5), Retention(3, 2.5, 1, 4))), Turn()]
    for name, turn in zip("ab", turns, strict=True):
        log.admitted(admission(name))
        log.told(name, turn, "acme" if name == "a" else "")
        log.finished(name, 1, keys(name, 2))
    (_, _, hinted), (_, _, plain) = record.lines
    assert hinted["hints"] == HintsLine(7, True, [(-5, None, 0, 2**31 - 1), (3, 2.5, 1, 4)])
    assert "hints" not in plain
    assert (hinted["cache_salt"], "cache_salt" in plain) == ("acme", False)
    request = Request(0.0, 10, 1, [], hints=hinted["hints"])
    assert turn_of(request) == turns[0]


def test_without_a_record_nothing_is_kept_for_one():
    log = RequestLog()
    log.admitted(admission("a", host=4), plan_id=1)
    assert not log.is_recording
    assert log._running["a"].lookups == []
