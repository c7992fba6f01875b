"""Resets of vLLM's prefix cache beside loads and steps, with vLLM's scheduler and no model. With one: test_sleep.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from engines import numbers

pytestmark = [pytest.mark.engine, pytest.mark.matrix]

PROMPT = numbers(1, 42)


def reset(engine):
    return engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)


def free_blocks(engine):
    return engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def test_blocks_of_a_submitted_step_are_free_and_given_to_no_request_before_it_is_over(make_clockwork):
    engine = make_clockwork(blocks=20)
    engine.add("runs", PROMPT[:3], 8)  # less than a block: no store that it could wait for either
    engine.submit()
    assert reset(engine) is True
    assert free_blocks(engine) == 19
    engine.submit()
    assert free_blocks(engine) == 19
    engine.process()
    engine.submit()
    assert free_blocks(engine) < 19
    engine.run()
    engine.check()
    engine.check_idle()


def test_a_failed_load_that_was_withdrawn_costs_no_other_request_its_blocks(make_clockwork):
    """vLLM hears of blocks that did not arrive by their numbers, and would take them for those of their next owner."""
    engine = make_clockwork({"onboard": "async"}, blocks=20)
    engine.add("first", PROMPT, 1)
    engine.run()
    engine.forget()
    worker = engine.ranks[0].connector._adapter._rank.worker
    result, fails = worker._result, []
    worker._result = lambda load: None
    engine.add("waits", PROMPT, 4)
    for _ in range(6):
        engine.turn()
    assert engine.adapter.leader.loads
    assert reset(engine) is True
    engine.add("other", numbers(2, 40), 30)
    for _ in range(6):
        engine.turn()
        assert free_blocks(engine) == 19

    def failed(load):
        fails.append(load)
        found = result(load)
        return found and type(found)(load.plan.id, bad=list(range(len(load.plan.blocks))))

    worker._result = failed
    engine.run()
    assert fails
    engine.check()
    engine.check_idle()


def test_a_request_that_waits_for_more_input_leaves_the_reset_to_vllm():
    """It gets blocks without a question to the connector."""
    pytest.importorskip("vllm")
    from vllm.v1.request import RequestStatus

    from kvbm.engines.vllm.resets import can_give_blocks_up

    def scheduler(*statuses):
        requests = {str(i): SimpleNamespace(status=status) for i, status in enumerate(statuses)}
        parts = {"defer_block_free": True, "deferred_frees": [], "failed_recving_kv_req_ids": set()}
        return SimpleNamespace(requests=requests, **parts)

    assert can_give_blocks_up(scheduler(RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS))
    assert not can_give_blocks_up(scheduler(RequestStatus.RUNNING, RequestStatus.WAITING_FOR_STREAMING_REQ))
    unlike = scheduler(RequestStatus.RUNNING)
    del unlike.deferred_frees
    assert not can_give_blocks_up(unlike)
