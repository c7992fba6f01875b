"""vLLM's scheduler with steps that overlap, and layers in several groups: windows and states. See clockwork.py."""

from __future__ import annotations

import ctypes
import random

import pytest
from engines import numbers
from histories import FAULTS, live, some_fast

from kvbm.core.keys import in_group
from kvbm.engines.vllm.groups import STATE
from kvbm.transfer.cpu import CpuCopier

pytestmark = pytest.mark.engine

BLOCK = 4
PROMPT = numbers(1, 42)

WINDOWS = ((0, 8), (9, 0, 9), (0, 30, 5), (0, 0), (12,), (6, 17))
STATES = ((0, STATE), (STATE, 0, STATE), (STATE, STATE, STATE, 0))


@pytest.mark.parametrize(
    ("seed", "windows"),
    [
        *some_fast([(seed, WINDOWS[seed % len(WINDOWS)]) for seed in range(100)], 24),
        *some_fast([(seed, STATES[seed % len(STATES)]) for seed in range(100, 600)], 36),
    ],
)
def test_random_histories_of_groups_end_with_the_right_tokens(seed, windows, make_clockwork, tmp_path, monkeypatch):
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
    engine = make_clockwork(
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


@pytest.mark.parametrize("lost", range(3), ids=["state", "kv", "another state"])
def test_the_check_sees_a_wrong_state_and_wrong_kv(lost, make_clockwork):
    """The control: what has come back as zeros must show, of whichever group."""
    from kvbm.engines.vllm import compat

    if not compat.fails_whole_requests():
        pytest.skip("this release of vLLM offers no states to connectors")
    engine = make_clockwork(windows=(STATE, 0, STATE))
    request = engine.add("first", PROMPT)
    engine.run()
    engine.check()
    engine.forget()
    slab = engine.ranks[0].connector._adapter._rank._slab
    slots = [slot for key in in_group(request.block_hashes, lost) if (slot := engine.pool.find(key)) is not None]
    for slot in slots:
        ctypes.memset(slab.address + slot * slab.slot_bytes, 0, slab.slot_bytes)
    engine.add("second", PROMPT)
    engine.run()
    assert engine.onboarded == 41 // BLOCK + 2
    assert engine.answers["second"] != engine.answers["first"]
    with pytest.raises(AssertionError):
        engine.check()


@pytest.mark.parametrize("second_runner", [False, True], ids=["runner1", "runner2"])
def test_a_prefix_comes_back_with_one_state_of_each_group(second_runner, make_clockwork):
    from kvbm.engines.vllm import compat

    if not compat.fails_whole_requests():
        pytest.skip("this release of vLLM offers no states to connectors")
    engine = make_clockwork({}, windows=(STATE, 0, STATE), second_runner=second_runner)
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
def test_a_state_that_only_vllm_has_is_stored_again(second_runner, make_clockwork):
    """vLLM offers a state in the step that saves it, and not when a request goes on from it."""
    from kvbm.engines.vllm import compat

    if not compat.fails_whole_requests():
        pytest.skip("this release of vLLM offers no states to connectors")
    engine = make_clockwork(windows=(STATE, 0, STATE), second_runner=second_runner)
    request = engine.add("first", PROMPT, 1)
    engine.run()
    states = [key for group in (0, 2) for key in in_group(request.block_hashes, group) if key in engine.pool]
    assert states
    engine.pool.drop(states)
    engine.add("second", PROMPT, 1)
    engine.run()
    assert engine.onboarded == 0
    assert all(key in engine.pool for key in states)
    engine.forget()
    engine.add("third", PROMPT, 1)
    engine.run()
    engine.check()
    assert engine.onboarded == 41 // BLOCK + 2
    engine.check_idle()


@pytest.mark.parametrize("second_runner", [False, True], ids=["runner1", "runner2"])
def test_what_a_step_writes_to_has_been_read_in_every_group(second_runner, make_clockwork, hold_stores):
    """Blocks go from one group to the other, and from requests that were preempted to those that come back."""
    from kvbm.engines.vllm import compat
    from kvbm.engines.vllm.steps import computed_of

    if not compat.fails_whole_requests():
        pytest.skip("with a connector this release makes one group of all layers")
    kvbm = {"inject_faults": "slow-store", "load": "never"}
    engine = make_clockwork(kvbm, blocks=40, windows=(8, 0), second_runner=second_runner)
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
def test_of_groups_a_part_of_a_match_is_not_asked_for(windows, whole, make_clockwork, monkeypatch):
    """A shorter prefix needs other windows than a longer one, and they may not be there."""
    from kvbm.engines.vllm import compat

    if whole and not compat.fails_whole_requests():
        pytest.skip("with a connector this release makes one group of all layers")
    engine = make_clockwork(windows=windows)
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
def test_a_prompt_in_parts_is_kept_whole_in_every_group(overlap, make_clockwork):
    """And of what its layers see no more before the next part is computed, everything as well."""
    from kvbm.engines.vllm import compat

    if not compat.fails_whole_requests():
        pytest.skip("with a connector this release makes one group of all layers")
    engine = make_clockwork(windows=(9, 0, 5), overlap=overlap, max_num_batched_tokens=16)
    engine.add("first", numbers(1, 60), 1)
    engine.run()
    engine.check()
    assert engine.pool.published == 3 * 15
    engine.check_idle()


def test_where_host_memory_is_short_what_lies_behind_a_window_goes_first(make_clockwork):
    """Of 15 blocks in two groups there is room for 26: for those that see all, a window of the others, and some."""
    from kvbm.engines.vllm import compat

    if not compat.fails_whole_requests():
        pytest.skip("with a connector this release makes one group of all layers")
    kvbm = {"cpu_cache_override_num_blocks": 26}
    engine = make_clockwork(kvbm, windows=(8, 0), overlap=False, max_num_batched_tokens=16)
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
