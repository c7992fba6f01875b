"""The life of a request by one set of rules, whatever the engine: a leader, a host and a disk tier, and no engine."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvbm.config import load
from kvbm.core.cost import MAX_LATENESS, MIN_PATIENCE_SECONDS, NEVER, RECOMPUTE, _TierRate
from kvbm.core.match import Match, Run
from kvbm.core.rate import Rate
from kvbm.engines.guard import Faults
from kvbm.engines.session import OUTSIDE_ONLY, Completed, RequestState, Session
from kvbm.observe.snapshot import LOADED, ON_DEVICE, REFUSED, TOO_SHORT
from kvbm.plans import Hello, LoadResult, Report, StoreResult, TierHello
from kvbm.runtime.packing_notes import notes
from kvbm.tiers.base import Store
from tiernames import DISK, HOST

SIZE = 4
BYTES = 1 << 20


def keys(letters):
    return [8 * letter.encode() for letter in letters]


class Here:
    """One rank with a host tier that holds a block a letter."""

    def __init__(self, held="abcdefgh", slots=32, hidden_size=None, outside_only=True, **settings):
        config = load({"cpu_cache_override_num_blocks": slots, **settings}, environ={}, files=())
        self.faults = Faults()
        self.session = Session(
            "an engine", config, self.faults, SIZE, 8192, hidden_size, outside_only=outside_only
        )  # fmt: skip
        self.leader = self.session.begin([Hello(0, BYTES, "layout", [TierHello(HOST, slots)])], None)
        self.pool = self.leader.manager.near
        self.pool.commit(self.pool.reserve(keys(held)))
        self.log = self.session.observer.log

    def request(self, name="r"):
        return RequestState(name)

    def ask(self, state, letters, hold=False):
        """A prompt of a block a letter and a token more. Returns the decision."""
        tokens = len(letters) * SIZE + 1
        start, limit = self.session.wanted(state, tokens, 0)
        found = self.leader.manager.lookup(keys(letters), start, limit)
        decision = self.session.decide(found, tokens, others=False)
        if self.session.consider(state, found, decision, tokens, limit):
            self.session.offer(state, found, decision, decision.in_step, hold)
        return decision

    def teach(self, load_seconds, token_seconds):
        """What a block takes to load, and a token to compute."""
        for _ in range(60):
            self.session.cost.observe_load(HOST, BYTES, load_seconds)
            self.session.cost.observe_step(1e-3)
            self.session.cost.observe_prefill(1000, 1e-3 + 1000 * token_seconds)


def test_it_knows_no_engine():
    """Neither the module nor what it imports."""
    code = (
        "import sys, kvbm.engines.session\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('vllm', 'tensorrt_llm', 'sglang', 'torch')\n"
        "       or name.startswith(('kvbm.engines.vllm', 'kvbm.engines.trtllm'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


# -- lookup, decide, load ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "computed", "wanted", "outcome"),
    [
        (17, 0, (0, 4), None),
        (16, 0, (0, 3), None),  # the last token is always computed
        (17, 8, (2, 4), None),
        (4, 0, None, TOO_SHORT),
        (9, 8, None, ON_DEVICE),
        (17, 6, None, ON_DEVICE),  # within a block
    ],
)
def test_what_is_looked_up_ends_before_the_last_token(tokens, computed, wanted, outcome):
    here, state = Here(), RequestState("r")
    assert here.session.wanted(state, tokens, computed) == wanted
    here.session.admit(state)
    assert {name for name, count in here.log.outcomes.items() if count} == ({outcome} if outcome else set())


def test_a_deadline_is_the_time_that_computing_takes():
    here = Here(load="auto")
    here.teach(load_seconds=1e-6, token_seconds=0.1)
    decision = here.ask(state := here.request(), "abcdefgh")
    assert decision.blocks == 8
    assert state.deadline_seconds == decision.recompute_seconds > 2


def test_no_deadline_is_shorter_than_estimates_of_milliseconds_are_exact():
    """Whatever KVBM_DISK_LOAD_TIMEOUT_SECS says: that is about a tier which delivers nothing."""
    here = Here(load="auto", disk_load_timeout_secs=30)
    here.teach(load_seconds=1e-6, token_seconds=1e-3)
    assert here.ask(state := here.request(), "abcdefgh").blocks == 8
    assert state.deadline_seconds == MIN_PATIENCE_SECONDS <= 0.1


@pytest.mark.parametrize("mode", ["auto", "always"])
def test_a_load_waits_for_a_silent_tier_a_few_times_what_a_chunk_takes(mode):
    """Of the staged tiers only. What the user forces waits as long as the store says."""
    here = Here(load=mode)
    cost = here.session.cost
    cost._tiers[DISK] = _TierRate(Rate(1e9, 0.01))
    staged = Match(0, [Run(HOST, [1, 2]), Run(DISK, [3])], False, keys("abc"))
    small = here.session.stall(staged)
    assert small == pytest.approx(MAX_LATENESS * (0.01 + Store.chunk_bytes / 1e9) if mode == "auto" else 0.0)
    large = here.session.stall(Match(0, [Run(DISK, list(range(100)))], False, keys("a") * 100))
    assert large == pytest.approx(MAX_LATENESS * (0.01 + 100 * BYTES / 1e9) if mode == "auto" else 0.0)
    cost._tiers[DISK].alone.value = 0.001
    reads = here.session.stall(Match(0, [Run(DISK, list(range(100)), alone=True)], False, keys("a") * 100))
    assert reads == pytest.approx(MAX_LATENESS * (0.01 + Store.chunk_bytes / 1e9 + 0.1) if mode == "auto" else 0.0)
    cost._tiers[DISK] = _TierRate(Rate(1e12, 0.0))
    assert here.session.stall(staged) == (MIN_PATIENCE_SECONDS if mode == "auto" else 0.0)
    here.teach(load_seconds=1e-6, token_seconds=1e-3)
    here.ask(state := here.request(), "abcd")
    here.session.stall = lambda match: 1.5
    assert here.session.load(state, state.match, [5, 6, 7, 8], 4).stall_seconds == 1.5


def test_a_load_that_the_user_forces_has_no_deadline():
    here = Here(load="always")
    here.ask(state := here.request(), "abcd")
    assert (state.match.blocks, state.deadline_seconds) == (4, 0.0)


@pytest.mark.parametrize(("load", "reason"), [("auto", RECOMPUTE), ("never", NEVER)])
def test_a_refusal_is_counted_by_its_reason_and_once_a_request(load, reason):
    here = Here(load=load)
    here.teach(load_seconds=1.0, token_seconds=1e-6)
    state = here.request()
    for _ in range(3):
        assert here.ask(state, "abcd").blocks == 0
        assert state.match is None
    assert here.session.counts.refused_load_blocks == {reason: 4}
    here.ask(here.request("another"), "ab")
    assert here.session.counts.refused_load_blocks == {reason: 6}
    here.session.admit(state)
    assert here.log.outcomes[REFUSED] == 1
    assert here.log.latest(1)[0].why == reason


def test_a_token_costs_more_the_farther_back_it_looks():
    """With the hidden size of the model known."""
    equal, aware = Here(), Here(hidden_size=64)
    for here in (equal, aware):
        here.teach(load_seconds=1e-6, token_seconds=1e-3)
    assert equal.session.cost.prefill_seconds(10_000, 100) == pytest.approx(0.1, rel=0.1)
    early, late = (aware.session.cost.prefill_seconds(before, 100) for before in (0, 10_000))
    assert late > 20 * early


def test_a_measured_rate_takes_the_place_of_the_prior():
    here = Here()
    before = here.session.cost.rate(HOST)
    hello = Hello(0, BYTES, "layout", [TierHello(HOST, 8, rate=(123e6, 0.5))])
    here.session.begin([hello], None)
    assert here.session.cost.rate(HOST) != before
    assert here.session.cost.rate(HOST).bytes_per_second == pytest.approx(123e6)


@pytest.mark.parametrize("hold", [True, False])
def test_an_offer_is_pinned_until_it_is_loaded_or_withdrawn(hold):
    here = Here(load="always")
    here.ask(state := here.request(), "abcd", hold)
    assert here.pool.pinned == (4 if hold else 0)
    here.session.withdraw(state)
    assert (here.pool.pinned, state.match) == (0, None)
    here.ask(state, "abcd", hold)
    plan = here.session.load(state, state.match.cut(3), [7, 8, 9], 3)
    assert (here.pool.pinned, state.match) == (3, None)
    here.leader.apply([Report(0, loads=[LoadResult(plan.id, [])])])
    assert here.pool.pinned == 0
    assert here.session.counts.matched_blocks == {HOST: 3}
    assert here.session.counts.matched_tokens == 3 * SIZE


def test_a_load_that_cannot_be_planned_leaves_the_offer(monkeypatch):
    here = Here(load="always")
    here.ask(state := here.request(), "abcd", hold=True)
    monkeypatch.setattr(here.leader, "onboard", lambda *about: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        here.session.load(state, state.match, [6, 7, 8, 9], 4)
    assert (state.match.blocks, here.session.counts.matched_tokens) == (4, 0)
    here.session.finish(state, 0, keys("abcd"))
    assert here.pool.pinned == 0


def test_an_admission_tells_what_was_expected_and_why():
    here = Here(load="always")
    decision = here.ask(state := here.request(), "abcdx")
    plan = here.session.load(state, state.match, [6, 7, 8, 9], 4)
    here.session.admit(state, plan, 4)
    here.session.admit(state, plan, 4)  # an engine may come here again when the load is over
    (entry,) = here.log._running.values()
    seen = entry.admission
    assert (seen.outcome, seen.why, seen.found, seen.loaded) == (LOADED, OUTSIDE_ONLY, {HOST: 4}, 4)
    assert (seen.expected_seconds, seen.recompute_seconds) == (decision.seconds, decision.recompute_seconds)
    assert seen.recompute_seconds > seen.compute_seconds > 0
    assert here.log.outcomes[LOADED] == 1


# -- completed, store -------------------------------------------------------------------------------------------------


def store(here, state, letters, end):
    known = keys(letters)
    part = Completed(state, known, state.stored, end, state.stored * SIZE)
    plan = here.session.store([part], known[state.stored : end], list(range(state.stored, end)))
    if plan is not None:
        here.leader.apply([Report(0, stores=[StoreResult(plan.id, True)])])
    return plan


def test_a_step_completes_whole_blocks_and_answers_only_where_they_are_kept():
    for offload_decode, end in ((True, 3), (False, 2)):
        here, state = Here(offload_decode=offload_decode), RequestState("r")
        assert here.session.completed(state, 0, 15, prompt_tokens=11) == end
        state.stored = 3
        assert here.session.completed(state, 12, 3, prompt_tokens=11) <= 3


def test_a_request_that_steps_back_stores_again():
    here, state = Here(), RequestState("r")
    state.stored = 5
    assert here.session.completed(state, 2 * SIZE, SIZE, prompt_tokens=99) == 3
    assert state.stored == 2


def test_a_store_evicts_other_blocks_than_those_in_front_of_it():
    here = Here(held="", slots=4)
    state = here.request()
    store(here, state, "abcd", 2)
    store(here, here.request("other"), "xy", 2)
    store(here, state, "abcd", 4)
    assert [letter for letter in "abcdxy" if keys(letter)[0] in here.pool] == list("abcd")
    assert state.stored == 4


def test_what_the_queue_has_no_room_for_is_counted():
    here = Here(held="", max_pending_offloads=1)
    known = keys("abcdef")
    first, second = here.request("first"), here.request("second")
    assert here.session.store([Completed(first, known, 0, 2, 0)], known[:2], [0, 1]) is not None
    assert here.session.store([Completed(second, known, 0, 6, 0)], known, [2, 3, 4, 5, 6, 7]) is None
    assert here.session.counts.refused_store_blocks == 6


# -- finished, touch --------------------------------------------------------------------------------------------------


def test_blocks_of_a_request_that_has_ended_are_recent_and_its_last_go_first(monkeypatch):
    here, state = Here(), RequestState("r")
    touched, used = [], []
    monkeypatch.setattr(here.leader, "touch", lambda keys, turn, is_prefix: touched.append(keys))
    monkeypatch.setattr(here.leader, "used", used.append)
    state.stored, state.found = 3, 2
    here.session.finish(state, 1, keys("abcd"), later=True)
    assert (touched, used) == ([], [])
    here.session.finalize()
    assert (touched, used, here.session.uses) == ([keys("abc")], [keys("ab")], 1)
    here.session.finalize()
    assert len(touched) == 1


def test_the_end_of_one_request_that_fails_is_not_the_end_of_the_others(monkeypatch):
    here = Here()
    finished, told = here.log.finished, []

    def fails_once(name, *about):
        told.append(name)
        if name == "first":
            raise OSError("broken on purpose")
        finished(name, *about)

    monkeypatch.setattr(here.log, "finished", fails_once)
    for name in ("first", "second"):
        here.session.finish(RequestState(name), 0, keys("ab"), later=True)
    here.session.finalize()
    assert told == ["first", "second"]
    assert here.faults.counts == {"the end of a request: OSError": 1}


def test_a_name_that_comes_back_ends_its_first_request_first(monkeypatch):
    here = Here(load="always")
    finished, order = here.log.finished, []
    monkeypatch.setattr(here.log, "finished", lambda *about: order.append("finished") or finished(*about))
    here.session.finish(here.request("r"), 0, keys("ab"), later=True)
    here.ask(state := here.request("r"), "ab")
    here.session.admit(state)
    assert order == ["finished"]
    assert "r" in here.log._running


def test_after_a_reset_nothing_is_found_and_requests_keep_nothing_more():
    here, state = Here(load="always"), RequestState("r")
    here.session.reset([state])
    assert not state.keep
    assert here.ask(state, "abcd").blocks == 0


def test_a_leader_that_cannot_be_trusted_is_done_without(caplog):
    here = Here(load="always")
    here.ask(state := here.request(), "abcd", hold=True)
    for _ in range(2):
        here.session.switch_off(ValueError("broken on purpose"))
    assert here.session.leader is None
    assert caplog.text.count("KVBM disabled: inconsistent state. an engine goes on without it.") == 1
    here.session.finish(state, 0, keys("abcd"))
    here.session.reset([state])
    here.session.close()


def test_the_catalogs_are_closed_even_if_the_observer_is_not(monkeypatch):
    here, closed = Here(), []
    monkeypatch.setattr(here.leader.manager, "close", closed.append)

    def fail():
        raise OSError("broken on purpose")

    monkeypatch.setattr(here.session.observer, "close", fail)
    with pytest.raises(OSError, match="broken on purpose"):
        here.session.close(3.0)
    assert closed == [3.0]


# -- tenants ----------------------------------------------------------------------------------------------------------


def store_of(here, letters, salt):
    state = here.request(letters)
    state.tenant = here.session.tenant_of(salt)
    plan = here.session.store([Completed(state, keys(letters), 0, len(letters), 0)], keys(letters), range(len(letters)))
    if plan is not None:
        here.leader.apply([Report(0, stores=[StoreResult(plan.id, True)])])


@pytest.mark.parametrize("salt", ["acme", "dynamo-cache-salt:acme"])
def test_a_tenant_keeps_its_share_beside_a_flood(salt):
    here = Here(held="", slots=8, tenant_shares="acme=0.5")
    store_of(here, "abcd", salt)
    for letters in ("efgh", "ijkl", "mnop"):
        store_of(here, letters, None)
    assert set(keys("abcd")) <= set(here.pool.findable)


@pytest.mark.parametrize("salt", [None, 7, "", "another", "ACME"])
def test_other_salts_have_no_share(salt):
    here = Here(held="", slots=8, tenant_shares="acme=0.5", host_policy="lru")
    store_of(here, "abcd", salt)
    for letters in ("efgh", "ijkl"):
        store_of(here, letters, None)
    assert set(keys("abcd")).isdisjoint(here.pool.findable)


@pytest.mark.parametrize(("kind", "moved"), [("frequency", "ab"), ("session", "abc")])
def test_which_blocks_of_a_conversation_count_as_hit(kind, moved, monkeypatch):
    here = Here(disk_filter=kind)
    used = []
    monkeypatch.setattr(here.leader, "used", used.extend)
    state = here.request()
    state.stored, state.found = 3, 2
    here.session.finish(state, 1, keys("abc"))
    assert used == keys(moved)


def test_blocks_that_do_not_fit_packed_slots_are_noted_for_the_next_start(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here, config = Here(), load({}, environ={}, files=())
    hello = Hello(
        0, BYTES, "layout packed", [TierHello(HOST, 200)], raw_bytes=2 * BYTES, packing_note="kvbm-some-model"
    )
    leader = here.session.begin([hello], None)
    letters = [chr(0x4E00 + i) for i in range(150)]
    plan = leader.offload([letter.encode().rjust(8) for letter in letters], list(range(150)))
    leader.apply([Report(0, stores=[StoreResult(plan.id, unpackable=list(range(120)))])])
    assert leader.unpackable.writing.wait(60)
    (note,) = notes(config)
    assert note[0].name == "kvbm-some-model"
    assert (note[1].unpackable, note[1].kept) == (120, 30)
