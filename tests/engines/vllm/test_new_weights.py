"""New weights in a running engine, with vLLM's scheduler and no model: KV of the old ones is not found and not kept."""

from __future__ import annotations

import pytest
from engines import numbers

pytestmark = pytest.mark.engine

PROMPT = numbers(1, 42)
LONGER = PROMPT + numbers(2, 20)


def change_weights(engine):
    for rank in engine.ranks:
        rank.connector._adapter._weights_changed()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_reset_that_fails_turns_the_cache_off(ranks, make_clockwork, monkeypatch):
    engine = make_clockwork(ranks=ranks, overlap=False)
    engine.add("first", PROMPT, 4)
    engine.run()
    assert engine.pool.published
    engine.forget()

    def fail():
        raise OSError("reset broke")

    monkeypatch.setattr(engine.adapter.leader, "reset", fail)
    before = engine.onboarded
    change_weights(engine)
    for name in ("second", "third"):
        engine.add(name, PROMPT, 4)
        engine.run()
        engine.forget()
    assert engine.adapter.leader is None
    assert engine.onboarded == before
    assert engine.answers == dict.fromkeys(("first", "second", "third"), engine.answers["first"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_that_vllm_still_has_of_the_old_weights_are_not_stored(ranks, make_clockwork):
    engine = make_clockwork(ranks=ranks)
    engine.add("first", PROMPT, 4)
    engine.run()
    assert engine.pool.published
    change_weights(engine)
    engine.add("other", numbers(3, 42), 4)  # the leader of several ranks hears of the change with this one
    engine.run()
    before = engine.pool.published
    engine.add("second", LONGER, 4)
    engine.run()
    assert engine.pool.published == before
    assert not any(key in engine.pool for key in engine._requests[-1].block_hashes)
    engine.forget()
    engine.add("third", LONGER, 4)
    engine.run()
    engine.check()
    assert sum(key in engine.pool for key in engine._requests[-1].block_hashes) >= len(LONGER) // 4
    engine.check_idle()


def test_an_adapter_gets_no_hit_where_layers_are_in_several_groups(make_clockwork):
    """Nothing checks the adapter again when the load is over and the request runs."""
    from vllm.lora.request import LoRARequest

    from kvbm.plans import Report

    engine = make_clockwork(windows=(0, 8))
    assert engine.adapter._groups.apart
    engine.adapter._adapters.apply([Report(0, adapters={1: (1, "weights")})])
    for name, lora in (("first", 1), ("second", 1), ("plain", 0), ("plain again", 0)):
        engine.add(name, PROMPT, 4, lora_request=LoRARequest("a", 1, "/a") if lora else None)
        engine.run()
        engine.forget()
        if lora:
            assert (engine.onboarded, engine.pool.published) == (0, 0)
    assert engine.onboarded > 0


def test_a_request_of_a_name_that_was_used_before_has_keys_of_its_own(make_clockwork):
    from vllm.lora.request import LoRARequest

    from kvbm.plans import Report

    engine = make_clockwork()
    engine.adapter._adapters.apply([Report(0, adapters={1: (1, "weights")})])
    keys, request = engine.adapter._keys, engine.add("r", PROMPT, 4, lora_request=LoRARequest("a", 1, "/a"))
    keys.bind(request)
    before = list(keys.of(request))
    engine.adapter.new_request(request)
    assert before
    assert not keys.of(request)
    keys.bind(request)
    assert list(keys.of(request)) == before
    engine.run()
