"""Asynchronous scheduling, which needs a GPU to run for real: vLLM's scheduler with steps that overlap.

A step is scheduled, and carried out, before the scheduler hears what became of the one before. See clockwork.py.
"""

from __future__ import annotations

import random
from contextlib import contextmanager

import pytest
from engines import numbers

from kvbm.core.match import Match
from kvbm.engines.vllm.groups import STATE
from kvbm.plans import LoadResult
from kvbm.testing.copier_faults import _Late
from kvbm.transfer.cpu import CpuCopier

pytestmark = pytest.mark.engine

BLOCK = 4


@pytest.fixture
def make_engine(make_clockwork):
    return make_clockwork


PROMPT = numbers(1, 42)


@pytest.mark.parametrize("second_runner", [False, True], ids=["runner1", "runner2"])
@pytest.mark.parametrize("mode", ["sync", "async", "auto"])
def test_what_was_kept_comes_back_while_steps_overlap(mode, second_runner, make_engine):
    engine = make_engine({"onboard": mode}, second_runner=second_runner)
    engine.add("first", PROMPT, 20)
    engine.run()
    engine.check()
    # 61 computed tokens. The last ones were still unknown when their step was planned, and no step came after it.
    assert engine.pool.published in (14, 15)
    engine.forget()
    engine.add("second", PROMPT, 20)
    engine.run()
    engine.check()
    assert engine.onboarded == 41 // BLOCK
    engine.check_idle()


def test_a_block_is_kept_only_when_its_tokens_are_known(make_engine):
    """While steps overlap the scheduler plans with tokens it has not seen; there is no key for them yet."""
    engine = make_engine()
    request = engine.add("a", PROMPT, 20)
    while engine.scheduler.has_requests():
        if engine.can_submit:
            engine.submit()
            state = engine.adapter._requests.get("a")
            assert state is None or state.stored <= request.num_tokens // BLOCK
        else:
            engine.process()
    engine.run()
    engine.check()


def test_the_check_sees_wrong_kv(make_engine):
    """The control: loads that bring zeros and claim success must show."""
    engine = make_engine({"onboard": "sync", "inject_faults": "zeros"})
    engine.add("first", PROMPT)
    engine.run()
    engine.check()
    engine.forget()
    engine.add("second", PROMPT)
    engine.run()
    with pytest.raises(AssertionError):
        engine.check()


@pytest.mark.parametrize("second_runner", [False, True], ids=["runner1", "runner2"])
@pytest.mark.parametrize("mode", ["sync", "async", "auto"])
def test_preempted_requests_come_back_while_steps_overlap(mode, second_runner, make_engine):
    engine = make_engine({"onboard": mode}, blocks=40, second_runner=second_runner)
    for i in range(6):
        engine.add(f"r{i}", numbers(10 + i, 30 + i), 30)
    engine.run()
    engine.check()
    requests = [engine.add(f"again{i}", numbers(10 + i, 30 + i), 30) for i in range(6)]
    engine.run()
    engine.check()
    assert sum(request.num_preemptions for request in requests) > 0
    assert engine.onboarded > 0
    engine.check_idle()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_blocks_that_change_hands_are_read_first(mode, make_engine):
    """Stores begin late, and an engine of ten blocks has handed theirs to the next request by then."""
    engine = make_engine({"onboard": mode, "inject_faults": "slow-store"}, blocks=11)
    prompts = [numbers(20 + i, 30) for i in range(5)]
    for i, prompt in enumerate(prompts):
        engine.add(f"r{i}", prompt, 4)
    engine.run()
    engine.check()
    assert engine.pool.published >= 5 * 7
    for i, prompt in enumerate(prompts):
        engine.add(f"again{i}", prompt, 4)
    engine.run()
    engine.check()
    assert engine.onboarded >= 5 * 7 - 2
    engine.check_idle()


@pytest.fixture
def hold_stores(monkeypatch):
    """No store that is late ends within this context, unless a fence asks for it."""

    @contextmanager
    def hold():
        with monkeypatch.context() as holding:
            holding.setattr(_Late, "done", lambda store: False)
            yield

    return hold


def test_a_fence_names_the_stores_of_reallocated_blocks_and_no_others(make_engine, hold_stores):
    engine = make_engine({"inject_faults": "slow-store"}, blocks=31)
    stores = {}
    with hold_stores():
        for name, seed in (("first", 2), ("second", 3)):
            engine.add(name, numbers(seed, 16), 1)
            engine.submit()
            stores |= {store.id: set(store.copy.blocks) for store in engine.ranks[0].plan.stores}
        assert len(stores) == 2
        engine.process()
        engine.process()  # both are done, and their eight blocks free again, behind 22 that nobody has used
        engine.add("third", numbers(4, 60), 1)
        engine.submit()
        assert engine.ranks[0].plan.fences == []
        engine.add("fourth", numbers(5, 40), 1)
        engine.submit()
    written = set(engine.ranks[0].blocks["fourth"])
    assert engine.ranks[0].plan.fences == [store for store, blocks in stores.items() if blocks & written]
    assert engine.ranks[0].plan.fences
    engine.run()
    engine.check()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "overlapping"])
def test_a_load_lost_in_step_taints_what_was_computed_on_it(ranks, overlap, make_engine):
    """Two steps may have been computed on blocks that did not arrive. Nothing they stored may be found."""
    faults = f"load:rank={ranks - 1}:every=3"
    engine = make_engine({"onboard": "sync", "inject_faults": faults}, ranks=ranks, overlap=overlap)
    engine.add("first", PROMPT, 4)
    engine.run()
    engine.check()
    engine.forget()
    engine.add("second", PROMPT + numbers(3, 21), 20)
    engine.run()
    assert engine.counts.failed_load_blocks == 3
    assert engine.counts.tainted_store_blocks > 0
    engine.check_pool()
    engine.check_idle()
    engine.forget()
    engine.add("third", PROMPT + numbers(3, 21), 20)
    engine.run()
    engine.check_pool()
    if not overlap:
        engine.check()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "overlapping"])
def test_a_load_lost_outside_of_a_step_is_computed_again(ranks, overlap, make_engine):
    faults = f"load:rank={ranks - 1}:every=3,slow:rank=0"
    engine = make_engine({"onboard": "async", "inject_faults": faults}, ranks=ranks, overlap=overlap)
    engine.add("first", PROMPT, 4)
    engine.run()
    engine.forget()
    engine.add("second", PROMPT + numbers(3, 21), 20)
    engine.run()
    engine.check()
    assert engine.counts.failed_load_blocks == 3
    engine.check_idle()


def test_a_request_aborted_while_its_load_is_under_way_keeps_its_blocks_until_it_is_over(make_engine):
    engine = make_engine({"onboard": "async", "inject_faults": "slow"}, blocks=20)
    engine.add("first", PROMPT, 4)
    engine.run()
    engine.forget()
    engine.add("doomed", PROMPT, 4)
    engine.turn()
    engine.abort("doomed")
    assert engine.pool.pinned == 10
    engine.add("other", numbers(6, 60), 4)  # needs the same blocks
    engine.run()
    engine.check()
    engine.add("again", PROMPT, 4)
    engine.run()
    engine.check()
    engine.check_idle()


@pytest.mark.parametrize("lost", ["a", "ab"], ids=["one of two", "both"])
@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "overlapping"])
def test_whoever_is_left_with_nothing_does_not_wait_for_ever(overlap, lost, make_engine, monkeypatch):
    """vLLM has it first in line again, and goes on keeping room for all who were to be loaded: there is too little for
    another load of it. If others have their blocks they must get past it; if nobody has, it must be computed."""
    engine = make_engine({"onboard": "async"}, blocks=26, overlap=overlap)
    prompts = {name: numbers(i, 42) for i, name in enumerate("ab")}
    for name, prompt in prompts.items():
        engine.add(name, prompt, 1)
    engine.run()
    engine.forget()
    worker = engine.ranks[0].connector._adapter._rank.worker
    result, missed = worker._result, []

    def first_is_missed(load):
        found, who = result(load), load.plan.request[0]
        if found is None or who in missed or who not in lost:
            return found
        missed.append(who)
        return LoadResult(load.plan.id, missed=list(range(len(load.plan.blocks))))

    monkeypatch.setattr(worker, "_result", first_is_missed)
    for name, prompt in prompts.items():
        engine.add(f"{name} again", prompt, 1)
    engine.run()
    assert sorted(missed) == list(lost)
    engine.check()
    engine.check_idle()


@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "overlapping"])
def test_a_load_that_cannot_be_planned_costs_those_nothing_who_share_the_blocks_before_it(
    overlap, make_engine, monkeypatch
):
    engine = make_engine({"onboard": "async"}, overlap=overlap)
    engine.add("first", PROMPT, 1)
    engine.run()
    engine.forget()
    monkeypatch.setattr(engine.adapter.leader.manager, "lookup", lambda *about, **more: Match(0, [], False, []))
    engine.add("runs", PROMPT[:21], 20)
    for _ in range(8):
        engine.turn()
    monkeypatch.undo()
    shared = set(engine.ranks[0].blocks["runs"][:5])

    def onboard(*about):
        raise OSError("no plan")

    monkeypatch.setattr(engine.adapter.leader, "onboard", onboard)
    engine.add("shares", PROMPT, 4)
    engine.submit()
    (load,) = engine.ranks[0].plan.loads
    assert len(load.blocks) == 5
    assert shared.isdisjoint(load.blocks)
    engine.run()
    engine.check()
    engine.check_idle()


FAULTS = ("", "slow", "slow-store:every=3", "load:every=5", "store:every=3", "load:every=7,store:every=4,slow:every=3")


def live(engine, source, seed, resets=0.1):
    """Requests with shared prefixes come, go and are aborted, and caches are emptied. Every answer is right, every
    block kept is right, and at the end nothing is held."""
    families = [numbers(seed * 10 + i, 60) for i in range(3)]
    running: list[str] = []
    for i in range(source.randrange(10, 25)):
        family, length = source.choice(families), source.randrange(1, 60)
        prompt = family[:length] + numbers(seed * 1000 + i, source.choice((0, 1, 9)))
        engine.add(f"r{i}", prompt, source.choice((1, 5, 20)), cache_salt=source.choice((None, None, "salt")))
        running.append(f"r{i}")
        for _ in range(source.randrange(12)):
            engine.turn()
        chance = source.random()
        if chance < 0.15:
            engine.abort(running.pop(source.randrange(len(running))))
        elif chance < 0.15 + resets:
            engine.scheduler.reset_prefix_cache()
        elif chance < 0.2 + resets:
            engine.scheduler.reset_prefix_cache(reset_connector=True)
        if source.random() < 0.3:
            engine.check_pool()
    engine.run()
    engine.check()
    engine.check_idle()


def some_fast(histories, count):
    """The others run at length."""
    return [
        pytest.param(*history, marks=[pytest.mark.long] if i >= count else []) for i, history in enumerate(histories)
    ]


# 410: a request that shares a lost block is preempted before it is computed again.
@pytest.mark.parametrize(("seed", "portion"), some_fast([(410, 0), *((seed, seed % 4) for seed in range(80))], 25))
def test_random_histories_end_with_the_right_tokens(seed, portion, make_engine, monkeypatch):
    """In an engine of some size, while transfers fail or are late and loads come as a whole or in parts."""
    monkeypatch.setattr(CpuCopier, "portion", portion)
    source = random.Random(seed)
    mode, faults = source.choice(("sync", "async", "auto")), source.choice(FAULTS)
    overlap, ranks = source.random() < 0.7, source.choice((1, 1, 2))
    if overlap and "load" in faults:
        mode = "async"  # vLLM itself does not recover from the other kind: see compat.recovers_exactly
    engine = make_engine(
        {"onboard": mode, "inject_faults": faults, "cpu_cache_override_num_blocks": source.choice((30, 200))},
        blocks=source.choice((24, 40, 80)),
        ranks=ranks,
        overlap=overlap,
        second_runner=source.random() < 0.5,
        max_num_batched_tokens=source.choice((16, 64)),
    )
    live(engine, source, seed)


WINDOWS = ((0, 8), (9, 0, 9), (0, 30, 5), (0, 0), (12,), (6, 17))
STATES = ((0, STATE), (STATE, 0, STATE), (STATE, STATE, STATE, 0))


@pytest.mark.parametrize(
    ("seed", "windows"),
    [
        *some_fast([(seed, WINDOWS[seed % len(WINDOWS)]) for seed in range(100)], 24),
        *some_fast([(seed, STATES[seed % len(STATES)]) for seed in range(100, 600)], 12),
    ],
)
def test_random_histories_of_groups_end_with_the_right_tokens(seed, windows, make_engine, tmp_path, monkeypatch):
    """As above, where layers see different parts of a prompt, some blocks are on disk, and loads of the other kind are
    not made, whatever is configured."""
    from kvbm.engines.vllm import compat

    if not compat.fails_whole_requests():
        pytest.skip("with a connector this release makes one group of all layers")
    source = random.Random(1000 + seed)
    monkeypatch.setattr(CpuCopier, "portion", source.randrange(4))
    kvbm = {
        "onboard": source.choice(("sync", "async", "auto")),
        "inject_faults": source.choice(FAULTS),
        "cpu_cache_override_num_blocks": source.choice((30, 60, 400)),
    }
    if source.random() < 0.3:
        kvbm |= {"disk_cache_gb": 1, "disk_cache_override_num_blocks": 200, "disk_cache_dir": str(tmp_path)}
    # How many of its states vLLM keeps, and offers.
    kept = {"prefix_cache_retention_interval": source.choice((0, 0, 16, None))} if STATE in windows else {}
    engine = make_engine(
        kvbm,
        blocks=source.choice((30, 50, 120)) * len(windows),
        ranks=source.choice((1, 1, 2)),
        overlap=source.random() < 0.7,
        second_runner=source.random() < 0.5,
        windows=windows,
        max_num_batched_tokens=source.choice((16, 64)),
        **kept,
    )
    live(engine, source, seed, resets=0.25)


@pytest.mark.parametrize("second_runner", [False, True], ids=["runner1", "runner2"])
def test_a_prefix_comes_back_with_one_state_of_each_group(second_runner, make_engine):
    from kvbm.engines.vllm import compat

    if not compat.fails_whole_requests():
        pytest.skip("this release of vLLM offers no states to connectors")
    engine = make_engine({}, windows=(STATE, 0, STATE), second_runner=second_runner)
    engine.add("first", PROMPT, 4)
    engine.run()
    assert engine.pool.published == 45 // BLOCK + 2 * 2  # states: at the prompt's last boundary, and where it went on
    engine.forget()
    engine.add("second", PROMPT, 4)
    engine.add("branch", PROMPT[:30] + numbers(2, 10), 4)  # no state was kept within its part of the prompt
    engine.run()
    engine.check()
    assert engine.onboarded == 41 // BLOCK + 2
    engine.check_idle()


@pytest.mark.parametrize("second_runner", [False, True], ids=["runner1", "runner2"])
def test_what_a_step_writes_to_has_been_read_in_every_group(second_runner, make_engine, hold_stores):
    """Blocks go from one group to the other, and from requests that were preempted to those that come back."""
    from kvbm.engines.vllm import compat
    from kvbm.engines.vllm.steps import computed_of

    if not compat.fails_whole_requests():
        pytest.skip("with a connector this release makes one group of all layers")
    kvbm = {"inject_faults": "slow-store", "load": "never"}
    engine = make_engine(kvbm, blocks=40, windows=(8, 0), second_runner=second_runner)
    requests = [engine.add(f"r{i}", numbers(10 + i, 30 + i), 30) for i in range(6)]
    fenced: set[int] = set()
    resumed = False
    with hold_stores():
        while engine.scheduler.requests:
            if not engine.can_submit:
                engine.process()
                continue
            reading = dict(engine.adapter.leader._reading)
            output = engine.submit()
            fenced.update(engine.ranks[0].plan.fences)
            computed = computed_of(output)
            resumed = resumed or bool(output.scheduled_cached_reqs.resumed_req_ids)
            for name, count in output.num_scheduled_tokens.items():
                for table in engine.scheduler.kv_cache_manager.get_block_ids(name):
                    written = table[computed[name] // BLOCK : -(-(computed[name] + count) // BLOCK)]
                    assert fenced.issuperset(reading[block] for block in written if block in reading)
    engine.run()
    engine.check()
    assert fenced
    assert sum(request.num_preemptions for request in requests) > 0
    assert resumed is not second_runner


@pytest.mark.parametrize(("windows", "whole"), [((0, 8), True), ((0,), False)])
def test_of_groups_a_part_of_a_match_is_not_asked_for(windows, whole, make_engine, monkeypatch):
    """A shorter prefix needs other windows than a longer one, and they may not be there."""
    from kvbm.engines.vllm import compat

    if whole and not compat.fails_whole_requests():
        pytest.skip("with a connector this release makes one group of all layers")
    engine = make_engine(windows=windows)
    engine.add("first", PROMPT, 1)
    engine.run()
    engine.forget()
    decide, asked = engine.adapter._cost.decide, []
    monkeypatch.setattr(
        engine.adapter._cost, "decide", lambda *about, **how: asked.append(how) or decide(*about, **how)
    )
    engine.add("second", PROMPT, 1)
    engine.run()
    assert asked == [{"whole": whole}]
    assert engine.onboarded == (10 + 2 if whole else 10)


@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "overlapping"])
def test_a_prompt_in_parts_is_kept_whole_in_every_group(overlap, make_engine):
    """And of what its layers see no more before the next part is computed, everything as well."""
    from kvbm.engines.vllm import compat

    if not compat.fails_whole_requests():
        pytest.skip("with a connector this release makes one group of all layers")
    engine = make_engine(windows=(9, 0, 5), overlap=overlap, max_num_batched_tokens=16)
    engine.add("first", numbers(1, 60), 1)
    engine.run()
    engine.check()
    assert engine.pool.published == 3 * 15
    engine.check_idle()


def test_where_host_memory_is_short_what_lies_behind_a_window_goes_first(make_engine):
    """Of 15 blocks in two groups there is room for 26: for those that see all, a window of the others, and some."""
    from kvbm.engines.vllm import compat

    if not compat.fails_whole_requests():
        pytest.skip("with a connector this release makes one group of all layers")
    kvbm = {"cpu_cache_override_num_blocks": 26}
    engine = make_engine(kvbm, windows=(8, 0), overlap=False, max_num_batched_tokens=16)
    engine.add("first", numbers(1, 61), 1)
    while engine.scheduler.has_requests():
        engine.turn()
        for ticket in engine.ranks[0].connector._adapter._rank.worker._stores.tickets.values():
            ticket.wait()
    assert engine.pool.evictions == 4
    for name in ("second", "third"):
        engine.forget()
        before = engine.onboarded
        engine.add(name, numbers(1, 61), 1)
        engine.run()
        engine.check()
        assert engine.onboarded - before == 15 + 2
        engine.add(f"beside {name}", numbers(2, 9), 1)  # takes the room of what is left behind the window
        engine.run()
    engine.check_idle()
