"""No exception of KVBM's reaches the engine: it costs the hit, is counted, and is told once."""

from __future__ import annotations

import pytest
from engines import do, generate, prompt

pytestmark = pytest.mark.engine

CACHE = {"cpu_cache_override_num_blocks": 512}
ANSWER = 4
PROMPT, OTHER = prompt(1, 400), prompt(2, 300)
BLOCKS = 255  # of the engine, without the one it keeps for itself

SCHEDULER, LEADER = "kvbm.engines.vllm.scheduler:SchedulerAdapter", "kvbm.runtime.leader:Leader"
BREAKABLE = [
    f"{SCHEDULER}.new_request",
    f"{SCHEDULER}.match",
    f"{SCHEDULER}._plan_load",
    f"{SCHEDULER}._follow_tables",
    "kvbm.engines.vllm.stores:Stores.plan",
    f"{LEADER}.onboard",
    f"{LEADER}.offload",
    f"{LEADER}.fences",
    "kvbm.core.manager:BlockManager.lookup",
    "kvbm.core.manager:BlockManager.load",
    "kvbm.core.manager:BlockManager.store",
    "kvbm.core.manager:BlockManager.touch",
    "kvbm.engines.vllm.keys:RequestKeys.of",
    "kvbm.engines.vllm.connector:figures",
    "kvbm.engines.vllm.worker:WorkerAdapter.wait_layer",
    "kvbm.transfer.cpu:CpuCopier.begin_step",
    "kvbm.transfer.cpu:CpuCopier.load",
    "kvbm.transfer.cpu:CpuCopier.store",
    "kvbm.transfer.cpu:FutureTicket.done",
    "kvbm.transfer.cpu:FutureTicket.bad",
    "kvbm.transfer.cpu:FutureTicket.reason",
]


@pytest.fixture(scope="module", params=["sync", "async"])
def story(request, run_scenario):
    """Breaks one thing after the other and lets the engine go through a cold prompt, a hit and a host hit each time."""
    steps = [generate(PROMPT), do("drain"), do("state", "start")]
    for number, what in enumerate(BREAKABLE):
        steps += [
            do("reset"),
            do("break", target=what),
            generate(PROMPT, OTHER, name=f"{what} host hit", max_tokens=ANSWER),
            generate(prompt(100 + number, 80), max_tokens=ANSWER),
            generate(OTHER, PROMPT, name=f"{what} engine hit", max_tokens=ANSWER),
            do("reset", f"{what} reset"),
            do("mend"),
            generate(PROMPT, OTHER, name=f"{what} mended", max_tokens=ANSWER),
            do("drain"),
            do("state", f"{what} end"),
        ]
    steps += [do("reset"), generate(PROMPT, name="last", max_tokens=ANSWER)]
    steps += [do("state", "end"), do("metrics", "metrics")]
    return run_scenario(steps, {**CACHE, "onboard": request.param})


def test_an_exception_costs_a_hit_and_nothing_else(story, baseline):
    first, second = baseline([PROMPT, OTHER], ANSWER)
    for what in BREAKABLE:
        assert story.tokens(f"{what} host hit") == [first, second], what
        assert story.tokens(f"{what} engine hit") == [second, first], what
        assert story[f"{what} reset"] is True, what
        assert story.tokens(f"{what} mended") == [first, second], what
        end = story[f"{what} end"]
        assert (end["requests"], end["pinned"], end["writing"], end["busy"]) == (0, 0, 0, False), what
        assert end["engine_blocks_free"] == BLOCKS, what


def test_an_exception_is_counted_and_told_once(story):
    before = sum(story["start"]["faults"].values())
    for what in BREAKABLE:
        now = sum(story[f"{what} end"]["faults"].values())
        assert now > before, what
        before = now
    # Once for every kind of fault; one that a worker meets inside vLLM's own call is told there as well.
    kinds = set(story["end"]["faults"])
    told = [message for level, message in story.log if level in ("WARNING", "ERROR")]
    assert len(kinds) <= len(told) <= 2 * len(kinds) < sum(story["end"]["faults"].values())


def test_hits_come_back_when_the_exceptions_end(story, baseline):
    assert story.tokens("last") == baseline([PROMPT, OTHER], ANSWER)[:1]
    assert story["last"]["cached"] == [384]
    assert story["metrics"]["kvbm_failures"] == sum(story["end"]["faults"].values())


def test_books_that_are_out_of_step_are_closed_for_good(run_scenario, baseline):
    """When a report cannot be taken in, KVBM stops: it neither waits for what was lost nor offers what may be wrong."""
    wanted = baseline([PROMPT, OTHER])
    steps = [
        generate(PROMPT),
        do("drain"),
        do("reset"),
        do("break", target="kvbm.core.manager:BlockManager.finish_load", times=1),
        generate(PROMPT, OTHER, name="broken"),
        do("drain", "steps"),
        do("reset", "reset"),
        generate(PROMPT, OTHER, name="alone"),
        do("drain"),
        do("state", "end"),
        do("metrics", "metrics"),
    ]
    story = run_scenario(steps, CACHE)
    assert story.tokens("broken") == story.tokens("alone") == wanted
    assert story["alone"]["cached"] == [0, 0]
    assert story["reset"] is True
    assert story["end"] == {"bypassed": True}
    assert story["metrics"]["kvbm_failures"] == 1
    assert len(story.said("KVBM disabled: inconsistent state")) == 1


def test_a_reset_that_fails_is_not_reported_as_done(run_scenario):
    steps = [
        generate(PROMPT),
        do("drain"),
        do("break", target="kvbm.runtime.leader:Leader.reset"),
        do("reset", "broken", connector=True),
        do("mend"),
        do("reset", "mended", connector=True),
        do("state", "end"),
    ]
    story = run_scenario(steps, CACHE)
    assert story["broken"] is False
    assert story["mended"] is True
    assert story["end"]["published"] == 0


def test_a_report_that_cannot_be_read_closes_the_books_too(make_clockwork, caplog):
    """What it told of would be waited for without end, and its slots never be free again."""
    from vllm.v1.outputs import KVConnectorOutput

    from kvbm.engines.vllm.connector import WorkerReports

    engine = make_clockwork()
    engine.add("before", list(range(40)))
    engine.run()
    for _ in range(2):
        garbled = KVConnectorOutput(kv_connector_worker_meta=WorkerReports([b"garbled"]))
        engine.scheduler.connector.update_connector_output(garbled)
    assert engine.adapter.leader is None
    assert not engine.adapter.busy
    assert caplog.text.count("KVBM disabled: inconsistent state") == 1
    engine.forget()
    engine.add("after", list(range(40)))
    engine.run()
    assert engine.answers["after"] == engine.answers["before"]


def test_changes_that_nobody_will_be_told_of_are_not_collected(make_clockwork, monkeypatch):
    from kvbm.engines.vllm.feed import EventFeed

    def broken(self, block_pool):
        raise RuntimeError("broken on purpose")

    engine = make_clockwork()
    adapter = engine.adapter
    adapter._services._feed = EventFeed(adapter.leader.manager.catalogs, 16, adapter._kv_cache_config, adapter._groups)
    assert engine.pool.on_change is not None
    monkeypatch.setattr(EventFeed, "take", broken)
    assert adapter.take_events() == []
    assert adapter._services._feed is None
    assert engine.pool.on_change is None
