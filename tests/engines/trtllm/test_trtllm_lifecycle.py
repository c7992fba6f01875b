"""TensorRT-LLM's requests live by the rules of ``kvbm.engines.session``, as vLLM's do."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from types import SimpleNamespace

import pytest
import test_trtllm_adapter as adapter
from test_trtllm_adapter import BLOCKS, OTHERS, disk_at, request

from kvbm.core.cost import NEVER, RECOMPUTE
from kvbm.core.rate import Rate
from kvbm.observe.snapshot import REFUSED
from tiernames import DISK, HOST

modules, engine = adapter.modules, adapter.engine


def teach(adapter, load_seconds, token_seconds):
    """What a byte takes to load from either tier, and a token to compute."""
    for _ in range(60):
        for tier in (HOST, DISK):
            adapter._cost.observe_load(tier, 1, load_seconds)
        adapter._cost.observe_step(1e-3)
        adapter._cost.observe_prefill(1000, 1e-3 + 1000 * token_seconds, 0)


def admission(adapter, number):
    return adapter.observer.log._running[str(number)].admission


def test_the_rate_of_the_disk_is_the_one_that_the_ranks_have_measured(engine, tmp_path, monkeypatch):
    monkeypatch.setattr("kvbm.tiers.disk.file.measure", lambda file: Rate(123e6, 0.25))
    here = engine(**disk_at(tmp_path)).register()
    rate = here.adapter._cost.rate(DISK)
    assert (rate.bytes_per_second, rate.fixed_seconds) == (pytest.approx(123e6), 0.25)


@pytest.mark.parametrize("config", [{"hidden_size": 64}, {"text_config": {"hidden_size": 64}}])
def test_a_token_costs_more_the_farther_back_it_looks(engine, tmp_path, config):
    """As the model's hidden size says; of a model without one that can be read all tokens cost the same."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    here, unknown = engine(args={"model": str(tmp_path)}), engine()
    for subject, factor in ((here.adapter, 20), (unknown.adapter, 1)):
        teach(subject, 1e-6, 1e-3)
        early, late = (subject._cost.prefill_seconds(before, 100) for before in (0, 10_000))
        assert late >= factor * early
        assert factor > 1 or late == early


def test_the_hidden_size_of_a_hub_model_is_read_from_the_hubs_cache(engine, tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64}))
    asked = []
    monkeypatch.setattr(
        hub, "try_to_load_from_cache", lambda *about, revision: asked.append(about) or tmp_path / "config.json"
    )
    assert engine(args={"model": "some/model"}).adapter._setup.hidden_size == 64
    assert set(asked) == {("some/model", "config.json")}


@pytest.mark.parametrize("token_seconds", [1e-3, 0.2])
def test_a_load_may_take_as_long_as_computing_and_a_tenth_of_a_second_at_least(engine, token_seconds):
    """However long a disk may be silent: that is another rule, in the worker."""
    here = engine(KVBM_LOAD="auto", KVBM_DISK_LOAD_TIMEOUT_SECS=30).register()
    teach(here.adapter, 1e-9, token_seconds)
    here.keep(request(1), BLOCKS)
    onboard, plans = here.adapter.leader.onboard, []
    here.adapter.leader.onboard = lambda *about, **how: plans.append(onboard(*about, **how)) or plans[-1]
    here.offer(request(2), OTHERS)
    assert plans[0].deadline_seconds == pytest.approx(max(0.1, admission(here.adapter, 2).recompute_seconds))
    assert (plans[0].deadline_seconds > 2) is (token_seconds > 0.1)


@pytest.mark.parametrize(("load", "reason"), [("auto", RECOMPUTE), ("never", NEVER)])
def test_what_is_refused_is_counted_and_logged_by_its_reason(engine, load, reason):
    here = engine(KVBM_LOAD=load).register()
    teach(here.adapter, 1.0, 1e-9)
    here.keep(request(1), BLOCKS)
    assert here.leader.get_num_new_matched_tokens(request(2), 0) == (0, False)
    assert here.adapter.session.counts.refused_load_blocks == {reason: 4}
    seen = admission(here.adapter, 2)
    assert (seen.outcome, seen.why, seen.found, seen.loaded) == (REFUSED, reason, {HOST: 4}, 0)
    assert seen.recompute_seconds > 0


def test_what_was_expected_of_a_load_is_logged(engine):
    here = engine().register()
    here.keep(request(1), BLOCKS)
    here.offer(request(2), OTHERS)
    seen = admission(here.adapter, 2)
    assert (seen.outcome, seen.loaded) == ("loaded", 4)
    assert seen.expected_seconds > 0
    assert seen.recompute_seconds > seen.compute_seconds > 0


def test_stores_that_the_queue_has_no_room_for_are_counted(engine):
    here = engine(KVBM_MAX_PENDING_OFFLOADS=1).register()
    first, second = request(1), request(2, range(100, 133))
    for each, blocks in ((first, BLOCKS), (second, OTHERS)):
        here.leader.get_num_new_matched_tokens(each, 0)
        here.leader.update_state_after_alloc(each, blocks)
    here.step(new=[adapter.data(first, BLOCKS, 33), adapter.data(second, OTHERS, 33)])
    assert here.adapter.session.counts.refused_store_blocks == 4


def test_a_tier_smaller_than_the_engines_own_cache_is_told_once(engine, caplog):
    engine(DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS=8).register()
    assert caplog.text.count("is smaller than TensorRT-LLM's own cache") == 1


def test_an_offer_that_is_made_again_holds_its_blocks_once(engine):
    here = engine().register()
    here.keep(request(1), BLOCKS)
    pool = here.adapter.leader.manager.near
    for _ in range(2):
        assert here.leader.get_num_new_matched_tokens(request(2), 0) == (32, True)
        assert pool.pinned == 4
    here.leader.request_finished(request(2), [])
    assert pool.pinned == 0


def test_no_control_command_runs_while_a_request_ends(engine, monkeypatch):
    here = engine().register()
    here.keep(request(1), BLOCKS)
    here.offer(request(2), OTHERS)
    leader, lock, locked = here.adapter.leader, here.leader._faults.engine_lock, []
    monkeypatch.setattr(leader, "touch", lambda *_: locked.append(lock._is_owned()))
    here.leader.request_finished(request(2), OTHERS)
    assert locked == [True]


# -- an engine that makes room later, and maybe not for all (its second cache manager) ---------------------------------


def test_an_offer_that_the_engine_cancels_holds_no_blocks(engine):
    here = engine().register()
    here.keep(request(1), BLOCKS)
    pool = here.adapter.leader.manager.near
    second = request(2)
    assert here.leader.get_num_new_matched_tokens(second, 0) == (32, True)
    here.leader.cancel_load(second, 16, 32)  # a part of it: the rest is loaded
    assert pool.pinned == 4
    here.leader.cancel_load(second, 0, 32)
    assert pool.pinned == 0
    here.leader.request_finished(second, [])


def test_a_request_that_is_parked_for_a_cancelled_offer_is_computed(engine):
    """The engine has started to wait when it finds that it has no room."""
    here = engine().register()
    here.keep(request(1), BLOCKS)
    second = request(2)
    here.leader.get_num_new_matched_tokens(second, 0)
    here.leader.cancel_load(second, 0, 32)
    here.park(second)
    here.leader.update_state_after_alloc(second, OTHERS)
    here.until_loaded(2)
    assert second.context_current_position == 0
    assert here.leader._faults.counts == {}
    assert here.adapter.session.counts.matched_tokens == 0


def test_a_request_that_is_taken_back_and_comes_again_finds_what_it_had_computed(engine):
    """The engine frees its blocks, which others get, and brings it as a new one."""
    here = engine().register()
    first = request(1)
    here.keep(first, BLOCKS)
    second = request(2)
    here.offer(second, OTHERS)
    here.until_loaded(2)
    here.leader.request_reset(second)
    assert here.adapter._requests == {}
    assert here.offer(second, BLOCKS) == 32
    here.until_loaded(2)
    here.leader.request_finished(second, BLOCKS)
    here.until(lambda: here.poll() and here.adapter.leader.manager.near.pinned == 0)


def test_a_request_that_comes_again_waits_for_its_load(engine, monkeypatch):
    """The engine kept its blocks until they were saved, gave them away, and runs it again under the same number."""
    here = engine().register()
    here.keep(request(1), BLOCKS)
    second = request(2)
    assert here.poll(finished=[2]) == [([2], [])] * 2
    with monkeypatch.context() as patch:
        for worker in here.workers:  # the load has not come to them yet
            patch.setattr(worker._adapter, "_take", lambda timeout: None)
        assert here.offer(second, OTHERS) == 32
        assert here.poll(started=[2]) == [([], [])] * 2
    said = [[], []]

    def both_have_said():
        for mine, (_, loaded) in zip(said, here.poll(), strict=True):
            mine += loaded
        return all(said)

    here.until(both_have_said)
    assert said == [[2], [2]]
    assert here.adapter.session.counts.matched_tokens == 32
    assert here.adapter.session.counts.failed_load_blocks == 0


def test_blocks_by_group_are_those_of_the_only_group(engine):
    here = engine().register()
    here.keep(request(1), BLOCKS)
    second = request(2)
    here.leader.get_num_new_matched_tokens(second, 0)
    here.park(second)
    here.leader.update_state_after_alloc_by_layer_group(second, [OTHERS])
    here.until_loaded(2)
    here.until(lambda: here.poll() and not here.adapter.leader.busy)  # the leader hears later
    assert here.adapter.session.counts.matched_tokens == 32
    assert here.leader.request_finished_by_layer_group(second, [OTHERS]) is False
    assert here.adapter._requests == {}


def test_an_engine_with_several_groups_of_layers_runs_without_kvbm(engine, caplog):
    here = engine(ranks=1)
    groups = [SimpleNamespace(layer_group_id=i, window_size=None, regions=()) for i in range(2)]
    here.workers[0].register_kv_cache_layout(SimpleNamespace(tokens_per_block=8, groups=groups))
    assert "2 groups of layers" in caplog.text
    first = request(1)
    assert here.leader.get_num_new_matched_tokens(first, 0) == (0, False)
    here.leader.update_state_after_alloc_by_layer_group(first, [BLOCKS, OTHERS])
    assert here.leader.request_finished_by_layer_group(first, [BLOCKS, OTHERS]) is False
    assert here.leader._faults.counts == {}


# -- what the ranks exchange at their start ----------------------------------------------------------------------------


class Meeting:
    """Stands for MPI's allgather: a call returns once every rank has made one."""

    def __init__(self, ranks):
        self.barrier = threading.Barrier(ranks)
        self.said = {}

    def allgather(self, own):
        self.said.setdefault(threading.current_thread().name, []).append(own)
        self.barrier.wait(60)
        return [said[-1] for _, said in sorted(self.said.items())]


@pytest.mark.parametrize("why", ["an unknown pool", "an error", "a directory"])
def test_a_rank_that_leaves_its_start_keeps_no_other_waiting(engine, tmp_path, monkeypatch, why):
    here = engine(DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS=2, **disk_at(tmp_path))
    meeting = Meeting(2)
    monkeypatch.setattr(sys.modules["tensorrt_llm._utils"], "mpi_allgather", meeting.allgather)
    good, bad = here.workers
    if why == "an error":
        monkeypatch.setattr(bad._adapter._rank, "register", lambda *_: 1 / 0)
        monkeypatch.setattr(bad._adapter, "_describe", dict)
    elif why == "a directory":
        bad.shutdown()
        bad._adapter = None

    def start(worker, pool):
        with contextlib.suppress(ZeroDivisionError, RuntimeError):  # RuntimeError: a rank is missing after two seconds
            worker.register_kv_caches(pool)

    pools = [here.pools[0], here.pools[1][:, 0, 0] if why == "an unknown pool" else here.pools[1]]
    threads = [
        threading.Thread(target=start, args=pair, name=f"rank {rank}")
        for rank, pair in enumerate(zip((good, bad), pools, strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not meeting.barrier.broken
    first, second = meeting.said["rank 0"], meeting.said["rank 1"]
    assert len(first) == len(second) == 2
    assert second == ["", "it has left its start"]
