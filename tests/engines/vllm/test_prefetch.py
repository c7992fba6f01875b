"""What is fetched before vLLM has made room for it is what it will ask for, and is held no longer than needed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from kvbm.core.manager import BlockManager
from kvbm.core.pool import Pool
from kvbm.engines.guard import Faults
from kvbm.engines.vllm import prefetch
from kvbm.engines.vllm.prefetch import Prefetcher
from kvbm.engines.vllm.request import RequestState
from kvbm.plans import LoadPlan
from kvbm.runtime.leader import Leader
from tiernames import DISK, HOST

BLOCK = 4


def keys(name):
    return [letter.encode() for letter in name]


def request(name):
    """One block a letter, and a token more."""
    return SimpleNamespace(request_id=name, num_tokens=len(name) * BLOCK + 1)


def load(name, in_step=True, layered=True):
    return LoadPlan(1, name, [], in_step, layered=layered)


class Here:
    """A host tier with a block a letter, and a worker who does what it is told."""

    def __init__(self, letters="abcdefgh", disk=""):
        pools = {HOST: Pool(32), DISK: Pool(32)}
        for pool, held in zip(pools.values(), (letters, disk), strict=True):
            pool.commit(pool.reserve(keys(held)))
        self.leader = Leader(BlockManager(pools), ranks=1)
        self.pool = pools[HOST]
        self.faults = Faults()
        self.does = []
        self.able = True
        self.on_device = set()
        self.most = 99
        self.prefetcher = Prefetcher(
            self.leader,
            self,
            SimpleNamespace(of=lambda request: keys(request.request_id)),
            BLOCK,
            lambda request, found: SimpleNamespace(blocks=min(found.blocks, self.most)),
            self.on_device.__contains__,
            self.faults,
        )

    def prefetch(self, slots, tokens):
        self.does.append(("fetch", "".join(self.pool.key_of(slot).decode() for slot in slots), tokens))
        return self.able

    def end_prefetch(self):
        self.does.append("end")

    def start_early(self, plan):
        self.does.append(("start", plan.request))


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch):
    monkeypatch.setattr(prefetch, "PREFETCH_BLOCKS", 4)


@pytest.fixture
def here():
    return Here()


def test_a_prompt_is_fetched_as_it_arrives_and_its_load_begins_with_what_is_there(here):
    here.prefetcher.arrived(request("abcd"), alone=True)
    assert here.does == [("fetch", "abcd", 1)]
    assert here.pool.pinned == 4
    here.prefetcher.load_planned(load("abcd", in_step=False))
    assert here.does[1:] == [("start", "abcd"), "end"]
    assert here.pool.pinned == 0


def line(*requests):
    """Requests that wait, as the scheduler's adapter hands them over."""
    return iter([RequestState(each) for each in requests])


def test_a_request_that_needs_every_token_is_not_fetched(here):
    asks = request("abcd")
    asks.skip_reading_prefix_cache = True
    here.prefetcher.arrived(asks, alone=True)
    here.prefetcher.step_planned([load("x")], line(asks))
    assert here.does == []


def test_beside_requests_that_decode_nobody_is_fetched(here):
    here.prefetcher.arrived(request("abcd"), alone=False)
    here.prefetcher.step_planned([], line(request("abcd")))
    here.prefetcher.step_planned([load("x", layered=False)], line(request("abcd")))
    here.prefetcher.arrived(request("abcd"), alone=False)
    assert here.does == []


def test_after_a_step_that_waits_for_loads_the_first_in_line_is_fetched_and_nobody_else(here):
    here.prefetcher.step_planned([load("x")], line(request("short"), request("abcd")))
    assert here.does == []  # nothing of the first one is known: it is computed in that gap
    here.prefetcher.step_planned([load("x")], line(request("abcd"), request("efgh")))
    assert here.does == [("fetch", "abcd", 1)]


def test_in_the_gap_that_such_a_step_leaves_somebody_new_is_fetched_too(here):
    here.prefetcher.step_planned([load("x")], line())
    here.prefetcher.arrived(request("abcd"), alone=False)
    assert here.does == [("fetch", "abcd", 1)]


def test_nobody_is_fetched_in_front_of_loads_outside_of_the_step(here):
    here.prefetcher.step_planned([load("x"), load("y", in_step=False)], line(request("abcd")))
    assert here.does == []


def test_one_prompt_is_fetched_at_a_time(here):
    here.prefetcher.arrived(request("abcd"), alone=True)
    here.prefetcher.arrived(request("efgh"), alone=True)
    assert here.does == [("fetch", "abcd", 1)]
    here.prefetcher.not_loaded("abcd")
    here.prefetcher.arrived(request("efgh"), alone=True)
    assert here.does[1:] == ["end", ("fetch", "efgh", 1)]


@pytest.mark.parametrize(
    "why", ["short", "few found", "on the device", "computed", "being written", "on disk", "the worker"]
)
def test_what_would_not_be_loaded_from_host_memory_is_neither_fetched_nor_held(why):
    here = Here("abc" if why == "few found" else "abcd", disk="e" if why == "on disk" else "")
    name = {"short": "abc", "on disk": "abcde", "being written": "abcde"}.get(why, "abcd")
    if why == "on the device":
        here.on_device.add(b"a")
    elif why == "being written":
        here.pool.reserve([b"e"])
    here.most = 3 if why == "computed" else 99
    here.able = why != "the worker"
    here.prefetcher.arrived(request(name), alone=True)
    assert here.does == ([("fetch", "abcd", 1)] if why == "the worker" else [])
    assert here.pool.pinned == 0
    here.prefetcher.load_planned(load(name, in_step=False))
    assert "end" not in here.does


def test_what_was_fetched_is_held_until_it_is_clear_that_its_load_will_not_come(here):
    here.prefetcher.arrived(request("abcd"), alone=True)
    here.prefetcher.not_loaded("somebody else")
    assert here.pool.pinned == 4
    here.prefetcher.not_loaded("abcd")
    assert here.pool.pinned == 0
    here.prefetcher.let_go()
    assert here.does == [("fetch", "abcd", 1), "end"]


def test_a_load_that_comes_layer_by_layer_begins_at_once_and_another_with_its_step(here):
    here.prefetcher.load_planned(load("a"))
    here.prefetcher.load_planned(load("b", in_step=False))
    here.prefetcher.load_planned(load("c", layered=False))
    assert here.does == [("start", "a")]


def test_a_worker_that_fails_leaves_nothing_held(here, monkeypatch):
    def broken(*_):
        raise OSError("broken")

    here.prefetcher.arrived(request("abcd"), alone=True)
    monkeypatch.setattr(here, "start_early", broken)
    here.prefetcher.load_planned(load("abcd"))
    assert here.faults.counts == {"starting a load early: OSError": 1}
    assert here.pool.pinned == 0
    here.prefetcher.arrived(request("abcd"), alone=True)
    monkeypatch.setattr(here, "end_prefetch", broken)
    with pytest.raises(OSError):
        here.prefetcher.let_go()
    assert here.pool.pinned == 0
