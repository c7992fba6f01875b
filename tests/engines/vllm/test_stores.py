"""What a step of vLLM's completes is planned to be kept, and keeps the right neighbours."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from kvbm.config import load
from kvbm.core.manager import BlockManager
from kvbm.core.pool import Pool
from kvbm.engines.guard import Faults
from kvbm.engines.session import Session
from kvbm.engines.vllm.groups import Groups
from kvbm.engines.vllm.request import RequestState
from kvbm.engines.vllm.stores import Stores
from kvbm.plans import Report, StoreResult
from kvbm.runtime.leader import Leader
from tiernames import HOST

BLOCK = 4


class Keys:
    """One block a letter of the request's name, as far as its tokens are known."""

    def of(self, request):
        return [letter.encode() for letter in request.request_id[: request.num_tokens // BLOCK]]

    def bound_weights(self, request):
        return None


class Scheduler:
    """Makes steps whose stores are carried out at once."""

    def __init__(self, slots=16, answers=True):
        self.leader = Leader(BlockManager({HOST: Pool(slots)}), ranks=1)
        self.pool = self.leader.manager.catalogs[HOST]
        self.told = []
        config = load({"offload_decode": answers}, environ={}, files=())
        session = Session("vLLM", config, Faults(), BLOCK, step_tokens=64, hidden_size=None)
        session.leader = self.leader
        self.stores = Stores(session, Keys(), Groups(), lambda *about: self.told.append(about[2:]), Faults())
        self.requests = {}

    def add(self, name, prompt):
        """A request whose first ``prompt`` blocks are its prompt and whose others are its answer."""
        request = SimpleNamespace(request_id=name, num_tokens=prompt * BLOCK, num_prompt_tokens=prompt * BLOCK)
        self.requests[name] = RequestState(request)
        self.requests[name].new_tables([range(100, 100 + len(name))], 0)

    def step(self, **computed):
        """Compute blocks (first, end) of each request. Returns the letters that are stored, a word a plan."""
        for name, (_, end) in computed.items():
            request = self.requests[name].request
            request.num_tokens = max(request.num_tokens, end * BLOCK)
        output = SimpleNamespace(
            num_scheduled_tokens={name: (end - first) * BLOCK for name, (first, end) in computed.items()},
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=list(computed), num_computed_tokens=[first * BLOCK for first, _ in computed.values()]
            ),
        )
        plans = []
        self.stores.plan(output, self.requests, plans, [])
        self.leader.apply([Report(0, stores=[StoreResult(plan.id, True) for plan in plans])])
        return ["".join(self.pool.key_of(slot).decode() for slot in plan.copy.slots) for plan in plans]

    def found(self, name):
        return self.leader.manager.lookup(keys(name)).blocks


def keys(name):
    return [letter.encode() for letter in name]


def test_each_step_stores_what_it_completes_and_nothing_twice():
    here = Scheduler()
    here.add("abcdefgh", prompt=6)
    assert here.step(abcdefgh=(0, 6)) == ["abcdef"]
    assert here.step(abcdefgh=(6, 7)) == ["g"]
    assert here.step(abcdefgh=(7, 8)) == ["h"]
    assert here.told == [(0, 6), (6, 7), (7, 8)]
    assert here.found("abcdefgh") == 8


def test_after_a_step_back_what_is_computed_again_is_stored_again():
    """A load has failed: its bad blocks are forgotten, and vLLM computes from the first of them on."""
    here = Scheduler()
    here.add("abcdefgh", prompt=8)
    here.step(abcdefgh=(0, 8))
    here.pool.drop([b"d"])
    assert here.step(abcdefgh=(3, 8)) == ["d"]  # the pool has the others
    assert here.found("abcdefgh") == 8


def test_a_block_that_is_computed_again_has_its_new_place_in_the_engine():
    here = Scheduler()
    here.add("abcd", prompt=4)
    here.step(abcd=(0, 4))
    here.requests["abcd"].new_tables([range(200, 204)], 0)
    here.pool.clear()
    plans, offload = [], here.leader.offload
    here.leader.offload = lambda keys, blocks, *more: plans.append(blocks) or offload(keys, blocks, *more)
    here.step(abcd=(0, 4))
    assert plans == [[200, 201, 202, 203]]


def test_an_answer_does_not_push_out_its_own_prompt():
    """Without its first block nobody finds the rest; what others have left behind goes instead."""
    here = Scheduler(slots=8)
    here.add("abcdefgh", prompt=4)
    here.add("xyz", prompt=3)
    here.step(abcdefgh=(0, 4))
    here.step(xyz=(0, 3))
    for block in range(4, 8):
        assert here.step(abcdefgh=(block, block + 1)) == ["abcdefgh"[block]]
    assert here.found("abcdefgh") == 8
    assert here.found("xyz") == 0


@pytest.mark.parametrize("free", [0, 1])
def test_answers_of_one_step_push_out_no_prompt_of_theirs(free):
    here = Scheduler(slots=9 + free)
    for name in ("abcd", "efgh", "xyz"):
        here.add(name, prompt=3)
        here.step(**{name: (0, 3)})
    assert here.step(abcd=(3, 4), efgh=(3, 4)) == ["dh"]
    assert (here.found("abcd"), here.found("efgh"), here.found("xyz")) == (4, 4, 1 + free)


def test_while_there_is_room_a_step_costs_nothing_for_the_blocks_of_the_steps_before(monkeypatch):
    """A request of a million tokens would otherwise go through all of its blocks in every step."""
    here = Scheduler(slots=8)
    here.add("abcdefgh", prompt=6)
    here.step(abcdefgh=(0, 6))
    touched = []
    monkeypatch.setattr(here.pool, "touch", touched.extend)
    here.step(abcdefgh=(6, 7))
    here.step(abcdefgh=(7, 8))
    assert touched == keys("gh")


def test_where_answers_are_not_kept_prompts_are():
    here = Scheduler(answers=False)
    here.add("abcdefgh", prompt=6)
    assert here.step(abcdefgh=(0, 6)) == ["abcdef"]
    assert here.step(abcdefgh=(6, 7)) == []
    assert here.found("abcdefgh") == 6


def test_blocks_whose_tokens_are_only_guessed_wait_for_a_later_step(monkeypatch):
    here = Scheduler()
    here.add("abcdefg", prompt=4)
    here.step(abcdefg=(0, 4))
    with monkeypatch.context() as guessing:
        guessing.setattr(Keys, "of", lambda self, request: keys("abcde"))
        assert here.step(abcdefg=(4, 6)) == ["e"]
    assert here.step(abcdefg=(6, 7)) == ["fg"]
