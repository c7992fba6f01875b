"""Load or recompute, in vLLM's scheduler: what is decided is done, counted and learned from. See clockwork.py."""

from __future__ import annotations

import pytest
from engines import numbers

from kvbm import gil
from kvbm.core.cost import NEVER, RECOMPUTE
from kvbm.core.match import Run
from kvbm.engines.vllm import scheduler
from kvbm.plans import LoadPlan, LoadResult
from tiernames import DISK, HOST

pytestmark = pytest.mark.engine

PROMPT = numbers(1, 42)


@pytest.fixture
def make_engine(make_clockwork):
    return make_clockwork


def ask_twice(engine):
    engine.add("first", PROMPT)
    engine.run()
    engine.forget()
    engine.add("second", PROMPT)
    engine.run()
    engine.check()
    engine.check_idle()


def believe(engine, load_seconds, token_seconds=None):
    """Teach it that host memory takes so long to bring anything, and the engine so long to compute a token."""
    for _ in range(60):
        engine.adapter._cost.observe_load(HOST, 1, load_seconds)
        if token_seconds is not None:
            engine.adapter._cost.observe_prefill(1000, 1000 * token_seconds)


@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "overlapping"])
def test_what_recomputing_beats_is_computed_and_counted_once(overlap, make_engine):
    engine = make_engine({"load": "auto"}, overlap=overlap)
    believe(engine, load_seconds=30.0)
    ask_twice(engine)
    assert engine.onboarded == 0
    assert engine.counts.refused_load_blocks == {RECOMPUTE: 10}
    assert engine.counts.matched_tokens == 0


def test_what_beats_recomputing_is_loaded(make_engine):
    engine = make_engine({"load": "auto"})
    believe(engine, load_seconds=1e-6)
    ask_twice(engine)
    assert engine.onboarded == 10
    assert engine.counts.refused_load_blocks == {}


def test_never_means_never(make_engine):
    engine = make_engine({"load": "never"})
    believe(engine, load_seconds=1e-6)
    ask_twice(engine)
    assert engine.onboarded == 0
    assert engine.counts.refused_load_blocks == {NEVER: 10}


def test_always_means_always(make_engine):
    engine = make_engine({"load": "always"})
    believe(engine, load_seconds=30.0)
    ask_twice(engine)
    assert engine.onboarded == 10


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "overlapping"])
def test_loads_and_steps_teach_what_they_took(overlap, ranks, make_engine):
    engine = make_engine({"load": "always"}, overlap=overlap, ranks=ranks)
    cost = engine.adapter._cost
    ask_twice(engine)
    assert cost._step.count > 10
    assert cost._tiers[HOST].fixed.count + cost._tiers[HOST].byte.count == 3  # the priors and one load
    assert 0 < engine.counts.loaded_seconds[HOST] < 30
    block_bytes = 3 * 4 * 8 * ranks
    assert engine.counts.loaded_bytes == {HOST: 10 * block_bytes}
    assert engine.counts.stored_bytes[HOST] == engine.counts.offloaded_blocks * block_bytes
    assert not engine.adapter._steps._under_way


# -- several prompts at once ------------------------------------------------------------------------------------------

PROMPTS = {name: numbers(i, 42) for i, name in enumerate("abc")}


def ask_together(engine, max_tokens, load_seconds):
    """The loads of each step, (request, whether the step waits for it), when prompts come back all at once."""
    for name, prompt in PROMPTS.items():
        engine.add(name, prompt)
    engine.run()
    engine.forget()
    believe(engine, load_seconds, token_seconds=10.0)
    for name, prompt in PROMPTS.items():
        engine.add(f"{name} again", prompt, max_tokens)
    seen = []
    while engine.scheduler.has_requests():
        steps = engine.steps
        engine.turn()
        if engine.steps > steps and engine.ranks[0].plan.loads:
            seen.append([(load.request[0], load.in_step) for load in engine.ranks[0].plan.loads])
    engine.run()
    engine.check()
    engine.check_idle()
    assert engine.onboarded >= 30
    return seen


@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "overlapping"])
def test_long_loads_of_prompts_that_end_with_their_step_have_a_step_each(overlap, make_engine):
    """The first prompt is answered while the second is on its way, and nobody who decodes is held up."""
    seen = ask_together(make_engine(overlap=overlap), max_tokens=1, load_seconds=30.0)
    assert seen == [[("a", True)], [("b", True)], [("c", True)]]


@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "overlapping"])
def test_beside_a_prompt_that_goes_on_long_loads_stay_outside_of_the_step(overlap, make_engine):
    seen = ask_together(make_engine(overlap=overlap), max_tokens=8, load_seconds=30.0)
    assert seen == [[("a", True), ("b", False), ("c", False)]]


@pytest.mark.parametrize("max_tokens", [1, 8])
def test_short_loads_share_a_step(max_tokens, make_engine):
    assert ask_together(make_engine(), max_tokens, load_seconds=1e-6) == [[("a", True), ("b", True), ("c", True)]]


def test_whoever_is_put_off_is_looked_up_once(make_engine, monkeypatch):
    """A hundred prompts in line would otherwise cost more than the load that the first one waits for."""
    for i, name in enumerate("defgh"):
        monkeypatch.setitem(PROMPTS, name, numbers(10 + i, 42))
    engine = make_engine(blocks=128)
    lookup, looked = engine.adapter.leader.manager.lookup, []
    monkeypatch.setattr(
        engine.adapter.leader.manager, "lookup", lambda *about, **how: looked.append(1) or lookup(*about, **how)
    )
    seen = ask_together(engine, max_tokens=1, load_seconds=30.0)
    assert [len(loads) for loads in seen] == [1] * 8
    cold, again, prefetched = 8, 8 + 7, 8  # each is asked once more when its turn has come
    assert len(looked) <= cold + again + prefetched


def test_nobody_is_put_off_for_ever(make_engine, monkeypatch):
    """Where a higher priority goes first, somebody may always come in between."""
    from kvbm.engines.vllm import deferral

    monkeypatch.setattr(deferral, "LONGEST_PUT_OFF", 0.0)
    seen = ask_together(make_engine(), max_tokens=1, load_seconds=30.0)
    assert seen == [[("a", True), ("b", False), ("c", False)]]


def test_a_request_whose_keys_cannot_be_had_costs_nobody_else_anything(make_engine, monkeypatch):
    engine = make_engine()
    keys = engine.adapter._keys.of

    def of(request):
        if request.request_id == "b":
            raise OSError("no keys")
        return keys(request)

    monkeypatch.setattr(engine.adapter._keys, "of", of)
    for name in "ab":
        engine.add(name, PROMPTS[name])
    engine.run()
    engine.check()
    kept = engine.pool.published
    monkeypatch.undo()
    assert kept >= 42 // 4
    assert sum(engine.adapter._faults.counts.values()) > 0


# -- fetching ahead ---------------------------------------------------------------------------------------------------


def fetched_ahead(engine, monkeypatch, **asked):
    """The blocks, by their first slot, that were fetched before vLLM had made room for them; and the loads."""
    from kvbm.engines.vllm import prefetch

    monkeypatch.setattr(prefetch, "PREFETCH_BLOCKS", 1)
    fetched = []
    monkeypatch.setattr(
        engine.adapter._prefetcher._worker, "prefetch", lambda slots, tokens: fetched.append(list(slots)) or True
    )
    seen = ask_together(engine, load_seconds=30.0, **asked)
    assert engine.adapter._prefetcher._fetched is None
    return fetched, seen


def test_while_all_wait_for_loads_the_next_in_line_is_fetched(make_engine, monkeypatch):
    fetched, seen = fetched_ahead(make_engine(), monkeypatch, max_tokens=1)
    assert [len(loads) for loads in seen] == [1, 1, 1]
    assert len(fetched) == 3
    assert len({slots[0] for slots in fetched}) == 3


def test_nobody_is_fetched_ahead_of_loads_that_have_their_blocks(make_engine, monkeypatch):
    """Its blocks would come first, over the same bus, and be thrown away."""
    fetched, seen = fetched_ahead(make_engine(blocks=30), monkeypatch, max_tokens=8)
    assert seen[0] == [("a", True), ("b", False)]  # there is no room for the third
    assert len(fetched) == 1


def test_what_was_planned_is_carried_out_whatever_becomes_of_the_next_plan(make_engine, monkeypatch):
    """Else its slots are taken for ever, and vLLM steps on and on for the sake of a store that nobody does."""
    engine = make_engine(max_num_batched_tokens=256)
    offload, planned = engine.adapter.leader.offload, []

    def only_once(*args):
        if planned:
            raise OSError("no second plan")
        planned.append(offload(*args))
        return planned[-1]

    monkeypatch.setattr(engine.adapter.leader, "offload", only_once)
    for name, prompt in PROMPTS.items():
        engine.add(name, prompt)
    engine.run()
    engine.check()
    engine.check_idle()
    assert engine.pool.published == len(planned[0].copy.blocks) == 42 // 4


def test_only_slots_of_host_memory_are_fetched_ahead(make_engine, monkeypatch, tmp_path):
    """The number of a slot on disk says nothing about host memory, and may lie far behind its end."""
    from kvbm.engines.vllm import prefetch

    disk = {"disk_cache_override_num_blocks": 200, "disk_cache_dir": str(tmp_path), "disable_disk_offload_filter": True}
    engine = make_engine(disk)
    monkeypatch.setattr(prefetch, "PREFETCH_BLOCKS", 1)
    fetched = []
    monkeypatch.setattr(
        engine.adapter._prefetcher._worker, "prefetch", lambda slots, tokens: fetched.append(list(slots)) or True
    )
    engine.add("first", PROMPT)
    engine.run()
    engine.forget()
    engine.adapter.leader.forget(HOST)
    engine.add("from disk", PROMPT)
    assert not fetched
    engine.run()
    engine.check()
    assert engine.counts.onboarded_blocks[DISK] == 10
    engine.forget()
    engine.add("from host memory", PROMPT)
    assert len(fetched) == 1
    engine.run()
    engine.check()
    engine.check_idle()


@pytest.mark.parametrize("what", ["is computed after all", "is aborted", "would find nothing since a reset"])
def test_who_was_fetched_ahead_and_is_not_loaded_holds_nothing(what, make_engine, monkeypatch):
    from kvbm.engines.vllm import prefetch

    engine = make_engine()
    engine.add("first", PROMPT)
    engine.run()
    engine.forget()
    monkeypatch.setattr(prefetch, "PREFETCH_BLOCKS", 1)
    monkeypatch.setattr(engine.adapter._prefetcher._worker, "prefetch", lambda slots, tokens: True)
    request = engine.add("second", PROMPT, 50)
    assert engine.pool.pinned == 10
    if what == "is aborted":
        engine.abort("second")
    elif what == "is computed after all":
        engine.adapter._requests["second"].refused = True
        engine.submit()
        assert request.num_computed_tokens
    else:
        engine.adapter.reset()
    assert engine.pool.pinned == 0
    engine.run()
    engine.check()


def test_when_its_books_are_closed_nothing_more_is_stored_or_fetched(make_engine, monkeypatch):
    """Nobody would take in what became of it."""
    from kvbm.engines.vllm import prefetch

    engine = make_engine()
    engine.add("first", PROMPT)
    engine.run()
    engine.forget()
    fetched = []
    monkeypatch.setattr(prefetch, "PREFETCH_BLOCKS", 1)
    monkeypatch.setattr(
        engine.adapter._prefetcher._worker, "prefetch", lambda slots, tokens: fetched.append(slots) or True
    )
    engine.adapter.leader.apply = None  # whoever calls it fails
    engine.adapter.apply([])
    assert engine.adapter.leader is None
    engine.add("again", PROMPT)
    engine.add("new", PROMPTS["b"])
    while engine.scheduler.has_requests():
        engine.turn()
        plan = engine.ranks[0].plan
        assert plan is None or not (plan.loads or plan.stores)
    assert fetched == []
    assert engine.answers["again"] == engine.answers["first"]


def test_forced_into_the_step_a_load_stays_in_it(make_engine, monkeypatch):
    from kvbm.engines.vllm import deferral

    monkeypatch.setattr(deferral, "LONGEST_PUT_OFF", 0.0)
    seen = ask_together(make_engine({"onboard": "sync"}), max_tokens=1, load_seconds=30.0)
    assert seen == [[("a", True), ("b", True), ("c", True)]]


def test_what_decoding_requests_complete_is_one_store_a_step(make_engine):
    engine = make_engine()
    for name in "abc":
        engine.add(name, PROMPTS[name][:40], 16)
    most = 0
    while engine.scheduler.has_requests():
        engine.turn()
        if engine.ranks[0].plan is not None:
            stores = engine.ranks[0].plan.stores
            decoding = [store for store in stores if len(store.copy.blocks) <= 3]
            assert len(decoding) <= 1
            most = max(most, *(len(store.copy.blocks) for store in decoding), 0)
    engine.run()
    engine.check()
    assert most >= 2


# -- following vLLM ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_who_is_said_to_have_its_last_token_is_in_no_further_step(max_tokens, make_engine):
    """Said too early, loads hold up somebody who still decodes; too late, they wait for somebody who has gone."""
    from kvbm.engines.vllm.compat import has_its_last_token

    engine = make_engine(overlap=True)
    request = engine.add("a", PROMPT, max_tokens)
    said = []
    while engine.scheduler.has_requests() or engine._queue:
        before = request.num_computed_tokens and has_its_last_token(request)
        output = engine.submit() if engine.can_submit else engine.process()
        if output is not None and not request.is_finished() and request.num_computed_tokens:
            said.append((before, "a" in output.num_scheduled_tokens))
    engine.check()
    assert (True, True) not in said
    assert (False, False) not in said
    assert (True, False) in said


@pytest.mark.parametrize("first", ["whose blocks are on their way", "who decodes"])
def test_the_gap_after_a_step_is_not_left_to_somebody_who_has_no_use_for_it(first, make_engine, monkeypatch):
    """The first in line is the first who still has to be loaded, and not the first who came."""
    from kvbm.engines.vllm import prefetch

    engine = make_engine({"inject_faults": "slow"})
    for name, prompt in PROMPTS.items():
        engine.add(name, prompt)
    engine.run()
    engine.forget()
    engine.adapter._cost._mode = "async"
    engine.add("first", PROMPTS["a"] if first != "who decodes" else numbers(9, 42), 16)
    engine.submit()
    assert engine.adapter._requests["first"].loads == (first != "who decodes")
    believe(engine, load_seconds=30.0, token_seconds=10.0)
    engine.adapter._cost._mode = "sync"
    fetched = []
    monkeypatch.setattr(prefetch, "PREFETCH_BLOCKS", 1)
    monkeypatch.setattr(
        engine.adapter._prefetcher._worker, "prefetch", lambda slots, tokens: fetched.append(slots) or True
    )
    for name in "bc":
        engine.add(f"{name} again", PROMPTS[name], 1)
    engine.submit()
    assert [(load.request[0], load.in_step) for load in engine.ranks[0].plan.loads] == [("b", True)]
    wanted = engine.adapter.leader.manager.lookup(engine.adapter._keys.of(engine.scheduler.requests["c again"]), 0, 10)
    assert fetched[-1:] == [wanted.runs[0].slots]
    engine.run()
    engine.check()
    engine.check_idle()


def offered_outside(engine):
    """What is kept of a prompt is to be loaded outside of the steps."""
    engine.add("first", PROMPT)
    engine.run()
    engine.forget()
    engine.adapter._cost._mode = "async"


def test_who_waits_for_room_that_a_step_under_way_will_make_is_loaded(make_engine):
    """Steps in which there is nothing to compute may be many, where the stages of a pipeline each have one."""
    engine = make_engine(blocks=24)
    offered_outside(engine)
    engine._depth = 8
    engine.add("in the way", numbers(9, 60), 4)
    engine.turn()
    engine.add("second", PROMPT)
    engine.run()
    engine.check()
    assert engine.onboarded == 10
    engine.check_idle()


def test_who_is_offered_in_vain_and_waits_for_nobody_is_computed(make_engine):
    """vLLM asks for more room before a load than before computing, and nobody would ever make it."""
    from clockwork import make_request

    engine = make_engine()
    offered_outside(engine)
    request = make_request("second", PROMPT)
    engine.adapter.new_request(request)
    offers = []
    while len(offers) < 20:
        offers.append(engine.adapter.match(request, 0))
        engine.submit()
        engine.process()
    assert offers[0] == (40, True)
    assert (0, False) in offers
    engine.adapter.finished(request)
    engine.check_idle()


# -- prompts that end with a block ------------------------------------------------------------------------------------


def scheduled(engine, name):
    """How many tokens of a request each step computes until it is over."""
    counts = []
    for _ in range(5000):
        if not engine.scheduler.has_requests():
            return counts
        steps = engine.steps
        engine.turn()
        if engine.steps > steps and name in engine.last_scheduled:
            counts.append(engine.last_scheduled[name])
    raise TimeoutError(f"still busy: {list(engine.scheduler.requests)}")


@pytest.fixture
def bring_back(make_engine, monkeypatch):
    """The tokens that each step computes of a prompt of so many tokens, which returns after so many of it were kept."""

    def bring_back(length, mode, kept=None, beside=True, overlap=False, loses_last=False, before=None, **options):
        engine = make_engine({"onboard": mode}, overlap=overlap, **options)
        engine.last_scheduled = {}
        plan_step = engine.adapter.plan_step

        def watch(output):
            engine.last_scheduled = dict(output.num_scheduled_tokens)
            return plan_step(output)

        monkeypatch.setattr(engine.adapter, "plan_step", watch)
        if loses_last:
            worker = engine.ranks[0].connector._adapter._rank.worker
            result = worker._result

            def last_is_missed(load):
                found = result(load)
                return found if found is None else LoadResult(load.plan.id, missed=[len(load.plan.blocks) - 1])

            monkeypatch.setattr(worker, "_result", last_is_missed)
        prompt = numbers(3, length)
        engine.add("first", prompt[:kept], 1)
        engine.run()
        engine.forget()
        if before is not None:
            before(engine, prompt)
        if beside:
            engine.add("other", numbers(4, 5), 40)
            for _ in range(5):
                engine.turn()
        engine.add("second", prompt, 4)
        counts = scheduled(engine, "second")
        engine.run()
        engine.check()
        engine.check_idle()
        return engine, counts

    return bring_back


@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "overlapping"])
def test_beside_others_a_prompt_comes_back_to_its_last_block(overlap, bring_back):
    """Then its first step is like that of a request that decodes."""
    engine, counts = bring_back(40, "async", overlap=overlap)
    assert engine.onboarded == 10
    assert counts[0] == 1


@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "overlapping"])
def test_alone_its_last_block_is_computed(overlap, bring_back):
    engine, counts = bring_back(40, "async", beside=False, overlap=overlap)
    assert engine.onboarded == 9
    assert counts[0] == 4


@pytest.mark.parametrize("beside", [False, True])
def test_in_the_step_its_last_block_is_computed(beside, bring_back):
    engine, counts = bring_back(40, "sync", beside=beside)
    assert engine.onboarded == 9
    assert counts[0] == 4


@pytest.mark.parametrize("length", [41, 43])
def test_a_prompt_that_does_not_end_with_a_block_has_its_last_tokens_computed(length, bring_back):
    engine, counts = bring_back(length, "async")
    assert engine.onboarded == 10
    assert counts[0] == length - 40


@pytest.mark.parametrize("length", [40, 41])
def test_what_is_brought_back_has_been_looked_up_and_found(length, bring_back):
    engine, _ = bring_back(length, "async")
    log = engine.adapter.observer.log
    (second,) = (request for request in log.latest(10) if request.id == "second")
    assert (second.found, second.loaded_tokens) == ({"host": 40}, 40)
    assert log.hit_rates().hits == {"host": 10}
    assert log.looked_up_blocks == (length - 1) // 4 + 1 + 10  # of the first, the other and the second


def test_a_last_block_that_does_not_arrive_is_computed(bring_back):
    engine, counts = bring_back(40, "async", loses_last=True)
    assert engine.onboarded == 9
    assert counts[0] == 4


def test_where_the_last_block_was_not_kept_it_is_computed(bring_back):
    engine, counts = bring_back(40, "async", kept=39)
    assert engine.onboarded == 9
    assert counts[0] == 4


def test_a_prompt_that_the_gpu_has_the_front_of_comes_back_to_its_last_block(bring_back):
    def again(engine, prompt):
        engine.add("front", prompt[:20], 1)
        engine.run()

    engine, counts = bring_back(40, "async", before=again)
    assert engine.onboarded == 4 + 5
    assert counts[0] == 1


def test_a_prompt_comes_back_to_its_last_block_while_others_are_stored(bring_back, monkeypatch):
    """Then its slots are compared with its keys once more, and all of them are known."""

    def change(engine, prompt):
        onboard, pool = engine.adapter.leader.onboard, engine.adapter.leader.manager.catalogs[HOST]

        def stored_before(*load):
            pool.commit(pool.reserve([b"another"]))
            pool.drop([b"another"])
            return onboard(*load)

        monkeypatch.setattr(engine.adapter.leader, "onboard", stored_before)

    engine, counts = bring_back(40, "async", before=change)
    assert engine.onboarded == 10
    assert counts[0] == 1


def test_a_last_block_that_lies_in_another_tier_is_computed(bring_back, monkeypatch):
    def spill(engine, prompt):
        manager = engine.adapter.leader.manager
        lookup = manager.lookup

        def look(keys, start, limit, **options):
            found = lookup(keys, start, limit, **options)
            return found._replace(runs=[Run(DISK, [0])]) if limit == start + 1 else found

        monkeypatch.setattr(manager, "lookup", look)

    engine, counts = bring_back(40, "async", before=spill)
    assert engine.onboarded == 9
    assert counts[0] == 4


def test_what_is_not_worth_bringing_back_is_not_brought_back_for_being_the_next(bring_back, monkeypatch):
    def cut(engine, prompt):
        decide = engine.adapter._cost.decide

        def at_most_four(*asked, **how):
            decision = decide(*asked, **how)
            return decision._replace(blocks=min(decision.blocks, 4))

        monkeypatch.setattr(engine.adapter._cost, "decide", at_most_four)

    engine, counts = bring_back(40, "async", before=cut)
    assert engine.onboarded == 4
    assert sum(counts[:-3]) == 24


# -- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("blocks", "beside"), [(30, True), (30, False), (5, True), (5, False)])
def test_a_request_is_finalized_in_the_step_after_its_last_token(blocks, beside, make_engine):
    """Tokens are not sent before vLLM has told the connector of all requests that have ended."""
    engine = make_engine()
    logged = []
    log = engine.adapter.observer.log
    finished = log.finished

    def watch(name, *rest):
        logged.append(name)
        finished(name, *rest)

    log.finished = watch
    if beside:
        engine.add("other", PROMPT, max_tokens=60)
    engine.add("one", numbers(7, 4 * blocks + 1), max_tokens=1)
    while "one" in engine.scheduler.requests:
        engine.turn()
    assert not logged
    assert engine.scheduler.has_requests()  # vLLM plans one more step also where nothing is left to compute
    engine.turn()
    assert logged == ["one"]
    engine.run()
    engine.check()
    engine.check_idle()


@pytest.mark.parametrize("outside", [False, True], ids=["in the step", "outside of it"])
def test_the_engine_pauses_only_for_loads_that_requests_wait_for(outside, make_engine, monkeypatch):
    """A step without work that is planned before the end of a load in the step is reported costs the next request its
    pause."""
    pauses = []
    monkeypatch.setattr(scheduler.gil, "give_turn", lambda others_notify: pauses.append(others_notify))
    engine = make_engine({"load": "always"})
    believe(engine, load_seconds=0.01)
    engine.add("first", PROMPT)
    engine.run()
    engine.forget()
    planned, pending = engine.adapter.plan_step, []

    def plan_step(output):
        if not output.num_scheduled_tokens:
            loads = [plan for plan in engine.adapter.leader.under_way() if isinstance(plan, LoadPlan)]
            pending.append(bool(loads))
            if outside:
                engine.adapter.unheard.update({plan.request: plan.id for plan in loads})
        return planned(output)

    monkeypatch.setattr(engine.adapter, "plan_step", plan_step)
    engine.add("second", PROMPT, max_tokens=1)
    engine.run()
    assert engine.onboarded == 10
    assert any(pending)
    assert bool(pauses) is outside


def test_the_engine_does_not_pause_in_the_step_that_begins_a_load(make_engine, monkeypatch):
    engine = make_engine({"load": "always"})
    due = []
    monkeypatch.setattr(scheduler.gil, "give_turn", lambda others_notify: due.append(len(engine.adapter._loads)))
    offered_outside(engine)
    engine.add("second", PROMPT)
    engine.run()
    assert engine.onboarded == 10
    assert due
    assert not any(due)


def test_at_its_end_what_a_request_has_used_is_recent_and_what_it_found_was_of_use(make_engine, monkeypatch):
    """The blocks of its answer are not among them where those are not kept."""
    engine = make_engine({"offload_decode": False})
    touched, used = [], []
    monkeypatch.setattr(engine.adapter.leader, "touch", lambda keys, turn, is_prefix: touched.append(keys))
    monkeypatch.setattr(engine.adapter.leader, "used", used.append)
    for name in ("first", "second"):
        keys = engine.add(name, PROMPT, max_tokens=12).block_hashes
        engine.run()
    assert len(keys) == 13
    assert touched == [keys[:10]] * 2
    assert used == [keys[:10]]


def end_beside_another(engine, *names):
    """These requests end beside one that goes on, and are not seen off yet."""
    if "other" not in engine.scheduler.requests:
        engine.add("other", PROMPT, max_tokens=60)
    for name in names:
        engine.add(name, PROMPT[::-1], max_tokens=1)
    while any(name in engine.scheduler.requests for name in names):
        engine.turn()
    assert list(engine.adapter.session.ended) == list(names)


@pytest.fixture
def ends(make_engine, monkeypatch):
    """An engine, and what its log was told of the ends of requests."""
    engine = make_engine()
    told = []
    monkeypatch.setattr(
        engine.adapter.observer.log.record, "add", lambda kind, *_, request=None, **__: told.append((kind, request))
    )
    return engine, told


def test_who_has_ended_is_seen_off_before_everything_is_forgotten(ends):
    engine, told = ends
    end_beside_another(engine, "one")
    assert engine.adapter.reset()
    assert ("request", "one") in told
    assert engine.adapter.session.ended == {}
    engine.run()
    engine.check_idle()


def test_an_end_that_fails_is_in_nobodys_way(ends, monkeypatch):
    """Neither of others that have ended meanwhile, nor of who wants everything forgotten."""
    engine, told = ends
    log, finished = engine.adapter.observer.log, engine.adapter.observer.log.finished

    def fail_once(name, *rest):
        if name == "one":
            raise OSError("no")
        finished(name, *rest)

    monkeypatch.setattr(log, "finished", fail_once)
    end_beside_another(engine, "one", "two")
    assert engine.adapter.reset()
    assert ("request", "two") in told
    assert engine.adapter._faults.counts == {"the end of a request: OSError": 1}


def test_a_request_that_takes_the_name_of_one_that_has_just_ended_is_another(ends):
    engine, told = ends
    for _ in range(2):
        end_beside_another(engine, "one")
    engine.run()
    assert told.count(("request", "one")) == 2
    assert not engine.adapter.observer.log._running


def test_who_has_ended_is_seen_off_before_the_engine_stops(ends):
    engine, told = ends
    end_beside_another(engine, "one")
    assert ("request", "one") not in told
    engine.close()
    assert ("request", "one") in told


# -- submissions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "told"), [(1, ["over", "begins", "over", "begins", "over"]), (2, ["over"] * 6)], ids=["here", "elsewhere"]
)
def test_whoever_can_wait_is_told_of_steps_that_decode_and_are_submitted_here(ranks, told, make_engine, monkeypatch):
    heard = []
    monkeypatch.setattr(gil.decoding, "begin", lambda: heard.append("begins"))
    monkeypatch.setattr(gil.decoding, "end", lambda: heard.append("over"))
    engine = make_engine(overlap=False, ranks=ranks)
    engine.add("one", PROMPT, max_tokens=3)
    while "one" in engine.scheduler.requests:
        engine.turn()
    assert heard == told
