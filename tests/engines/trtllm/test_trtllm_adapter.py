"""The TensorRT-LLM adapter, call by call: a leader and two workers in one process, and an engine of a few lines."""

from __future__ import annotations

import importlib
import itertools
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from trtllm_sim import api
from trtllm_sim.connector import AsyncRequests
from trtllm_sim.request import LlmRequest, Prompt

from kvbm.core.policy import Retention
from servers import free_ports
from tiernames import DISK

SIZE = 8
State = api.LlmRequestState


def forget_modules():
    for name in list(sys.modules):
        if name.split(".")[0] in ("tensorrt_llm", "dynamo") or name.startswith(
            ("kvbm.engines.trtllm", "kvbm.trtllm_integration")
        ):
            del sys.modules[name]


@pytest.fixture
def modules():
    """The adapter imports its engine when it is imported itself; each test gets both anew."""
    forget_modules()

    def install(generation="1.3"):
        forget_modules()
        api.install(generation, lambda own: [own, own])  # both ranks are in this process, with one model
        return importlib.import_module("kvbm.trtllm_integration.connector")

    yield install
    forget_modules()


class Manager:
    """What the engine keeps on one rank. Workers find waiting requests through the caller of ``get_finished``."""

    def __init__(self, worker):
        self.worker = worker
        self.new_async_requests, self.pending_async_requests = AsyncRequests(), AsyncRequests()
        self.local_finished_async_requests = AsyncRequests()

    def get_finished(self, finished=(), started=()):
        return self.worker.get_finished(list(finished), list(started))


class Engine:
    """One leader, two ranks, a pool each."""

    def __init__(self, connector, monkeypatch, blocks=16, ranks=2, args=None, **settings):
        pub, ack = free_ports(2)
        values = {
            "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": 32, "DYN_KVBM_LEADER_ZMQ_PUB_PORT": pub,
            "DYN_KVBM_LEADER_ZMQ_ACK_PORT": ack, "KVBM_LOAD": "always", **settings,
        }  # fmt: skip
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))
        args = args or {}
        self.model = torch.nn.Linear(2, 2)
        for parameter in self.model.parameters():
            parameter.data.fill_(1.0)
        self.leader = connector.DynamoKVBMConnectorLeader(llm_args(0, ranks, **args))
        self.workers = [connector.DynamoKVBMConnectorWorker(llm_args(rank, ranks, **args)) for rank in range(ranks)]
        self.managers = [Manager(worker) for worker in self.workers]
        self.pools = [torch.zeros((blocks, 2, 2, 64), dtype=torch.uint8) for _ in range(ranks)]

    def register(self):
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(len(self.workers)) as pool:
            list(pool.map(lambda pair: pair[0].register_kv_caches(pair[1]), zip(self.workers, self.pools, strict=True)))
        self.leader.wait_for_initialization()
        return self

    @property
    def adapter(self):
        return self.leader._adapter

    def step(self, new=(), cached=(), forward=True):
        """One iteration with a batch. The pass writes nothing: tests fill blocks themselves."""
        output = api.SchedulerOutput(list(new), list(cached))
        metadata = self.leader.build_connector_meta(output)
        for worker in self.workers:
            worker.bind_connector_meta(metadata)
            worker.start_load_kv(None)
            if forward:
                worker.register_forward_pass_callable()()
                worker.wait_for_save(None)

    def poll(self, finished=(), started=()):
        return [manager.get_finished(finished, started) for manager in self.managers]

    def until(self, condition, seconds=120.0):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "nothing happened"
            time.sleep(0.005)

    def until_loaded(self, number):
        """Until every rank has said, once, that the request has what it waits for."""
        said = [[] for _ in self.managers]
        started = [number]

        def all_have_said():
            nonlocal started
            for mine, (_, loaded) in zip(said, self.poll(started=started), strict=True):
                mine += loaded
            started = []
            return all(said)

        self.until(all_have_said)
        assert said == [[number]] * len(said)

    def keep(self, request, blocks):
        """A request whose blocks are all computed in one step, and kept."""
        assert self.leader.get_num_new_matched_tokens(request, 0) == (0, False)
        self.leader.update_state_after_alloc(request, blocks)
        self.step(new=[data(request, blocks, scheduled=request.prompt_len)])
        self.until(lambda: self.poll() and not self.adapter.leader.busy)
        self.leader.request_finished(request, blocks)

    def offer(self, request, blocks):
        """A request that loads: parked on both ranks."""
        tokens, later = self.leader.get_num_new_matched_tokens(request, 0)
        assert later
        self.park(request)
        self.leader.update_state_after_alloc(request, blocks)
        return tokens

    def park(self, request):
        request.state = State.DISAGG_GENERATION_TRANS_IN_PROGRESS
        for manager in self.managers:
            manager.pending_async_requests.loading[request.request_id] = request

    def close(self):
        self.leader.shutdown()
        for worker in self.workers:
            worker.shutdown()


@pytest.fixture
def engine(modules, monkeypatch):
    made = []

    def make(generation="1.3", **settings):
        made.append(Engine(modules(generation), monkeypatch, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_setting_that_is_not_used_is_named_with_the_reason(engine, caplog):
    with caplog.at_level("INFO", logger="kvbm"):
        config = engine(DYN_CONNECTOR="kvbm").adapter._config
    reason = config.unused_because["DYN_CONNECTOR"]
    assert f"DYN_CONNECTOR is set but not used: {reason}" in caplog.text


def test_a_directory_for_sockets_that_others_can_write_to_keeps_kvbm_out(engine, tmp_path, monkeypatch, caplog):
    tmp_path.chmod(0o777)  # as an emptyDir of Kubernetes at /tmp: not sticky
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    here = engine()
    try:
        here.register()
        assert here.adapter is None
        assert caplog.text.count("chmod go-w") == 3  # the leader and each rank say what to do
        here.step()
        assert here.poll() == [([], [])] * 2
        assert here.leader.get_num_new_matched_tokens(request(1), 0) == (0, False)
    finally:
        tmp_path.chmod(0o700)


def llm_args(rank=0, ranks=2, **changes):
    mapping = SimpleNamespace(rank=rank, world_size=ranks, tp_size=ranks, pp_size=1, cp_size=1)
    args = SimpleNamespace(
        model=str(Path(__file__).with_name("conftest.py")),
        kv_cache_config=SimpleNamespace(tokens_per_block=SIZE, enable_partial_reuse=False),
        parallel_config=SimpleNamespace(to_mapping=lambda: mapping),
    )
    for name, value in changes.items():
        setattr(args, name, value)
    return args


def request(number, tokens=33, generation="1.3", **prompt):
    values = list(range(tokens)) if isinstance(tokens, int) else tokens
    made = LlmRequest(Prompt(number, values, 8, **prompt), generation)
    made.prepopulated_prompt_len = made.context_current_position = 0
    return made


def data(request, blocks, scheduled, computed=0, generation="1.3"):
    return api.request_data(generation)(request.request_id, request.get_tokens(0), list(blocks), computed, scheduled)


BLOCKS, OTHERS = [0, 1, 2, 3, 4], [5, 6, 7, 8, 9]


# -- finding the engine -----------------------------------------------------------------------------------------------


def test_without_tensorrt_llm_the_import_says_so(modules):
    with pytest.raises(ImportError, match="is for TensorRT-LLM, which is not installed here"):
        importlib.import_module("kvbm.trtllm_integration.connector")


def test_a_release_without_connectors_is_named(modules):
    api.install("1.2")
    del sys.modules["tensorrt_llm._torch.pyexecutor.kv_cache_connector"]
    with pytest.raises(ImportError, match=r"TensorRT-LLM 1\.2\.0 \(simulated\) has no KV cache connector interface"):
        importlib.import_module("kvbm.trtllm_integration.connector")


@pytest.mark.parametrize("generation", api.GENERATIONS)
def test_both_module_paths_lead_to_the_same_classes(modules, generation):
    here = modules(generation)
    older = importlib.import_module("dynamo.llm.trtllm_integration.connector")
    for name, base in (
        ("DynamoKVBMConnectorLeader", api.KvCacheConnectorScheduler),
        ("DynamoKVBMConnectorWorker", api.KvCacheConnectorWorker),
    ):
        assert getattr(here, name) is getattr(older, name)
        part = name.removeprefix("DynamoKVBMConnector").lower()
        alone = importlib.import_module(f"{here.__name__}.kvbm_connector_{part}")
        assert getattr(alone, name) is getattr(here, name)
        assert issubclass(getattr(here, name), base)


def test_the_older_module_path_leaves_dynamo_its_own(modules, tmp_path, monkeypatch):
    """As installed: Dynamo's own package, and our module in its folder."""
    modules()
    theirs = tmp_path / "dynamo" / "llm"
    (theirs / "trtllm_integration").mkdir(parents=True)
    (theirs / "__init__.py").write_text("OWNER = 'Dynamo'\n")
    here = importlib.import_module("dynamo.llm.trtllm_integration.connector").__file__
    (theirs / "trtllm_integration" / "connector.py").write_text(Path(here).read_text())
    for name in [name for name in sys.modules if name.split(".")[0] == "dynamo"]:
        del sys.modules[name]
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.import_module("dynamo.llm").OWNER == "Dynamo"
    connector = importlib.import_module("dynamo.llm.trtllm_integration.connector")
    assert connector.DynamoKVBMConnectorLeader.__module__ == "kvbm.engines.trtllm.connector"


def test_a_field_that_is_needed_and_missing_is_named_with_the_release(modules):
    modules()
    from kvbm.engines.trtllm import compat

    with pytest.raises(AttributeError, match=r"TensorRT-LLM 1\.3\.0 \(simulated\): .* has no new_block_ids"):
        compat.read_step(SimpleNamespace(request_id=1))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_beam_width": 4}, "max_beam_width is 4"),
        ({"enable_attention_dp": True}, "attention data parallelism"),
        ({"kv_cache_config": SimpleNamespace(tokens_per_block=8, host_cache_size=1 << 30)}, "host_cache_size is set"),
        ({"kv_cache_config": SimpleNamespace(tokens_per_block=8, max_attention_window=[512, 4096])}, "several sizes"),
    ],
)
def test_a_set_up_that_cannot_be_served_is_left_alone(modules, monkeypatch, caplog, changes, reason):
    connector = modules()
    monkeypatch.setenv("DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS", "4")
    args = llm_args(**changes)
    leader, worker = connector.DynamoKVBMConnectorLeader(args), connector.DynamoKVBMConnectorWorker(args)
    assert "KVBM stays out of the way" in caplog.text
    assert reason in caplog.text
    worker.register_kv_caches(torch.zeros(4, 2, 2, 8))
    leader.wait_for_initialization()
    assert leader.get_num_new_matched_tokens(request(1), 0) == (0, False)
    assert leader.request_finished(request(1), []) is False
    worker.bind_connector_meta(leader.build_connector_meta(api.SchedulerOutput()))
    assert worker.get_finished([1], [2]) == ([], [])


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("attention", {"attn_backend": "FLASHINFER"}),
        ("config", {"quant_config": "fp8"}),
        ("dtype", {"dtype": "float16"}),
    ],
)
def test_whatever_changes_the_kv_keeps_caches_apart(modules, key, changes):
    modules()
    from kvbm.engines.trtllm import compat

    before, after = compat.read_setup(llm_args()).cache, compat.read_setup(llm_args(**changes)).cache
    assert key in {name for name in before if before[name] != after[name]} <= {key, "model"}


def disk_at(folder):
    return {"DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS": 32, "DYN_KVBM_DISK_CACHE_DIR": folder}


def test_a_cache_on_disk_belongs_to_the_weights_that_were_loaded(engine, tmp_path):
    """The model's name is the same, and there are no files."""
    caches = []
    for value in (1.0, 1.0, 1.5):
        here = engine(**disk_at(tmp_path))
        here.model.bias.data[1] = value
        here.register()
        caches.append(here.adapter.session.manager.catalogs[DISK].journal.directory)
        here.close()
        del here.model
    assert caches[0] == caches[1] != caches[2]


def test_without_a_model_to_be_found_nothing_outlives_the_engine(engine, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("kvbm.engines.weights.roots", list)
    here = engine(**disk_at(tmp_path)).register()
    here.keep(request(1), BLOCKS)
    assert here.leader.get_num_new_matched_tokens(request(2), 0) == (32, True)
    assert "Cannot fingerprint the weights; persistence is off: no loaded model was found" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_loaded_different_weights_use_no_disk(engine, tmp_path, caplog, monkeypatch):
    here = engine(**disk_at(tmp_path))
    from kvbm.engines.trtllm import compat

    shards = itertools.count()
    monkeypatch.setattr(compat, "gather_over_ranks", lambda own, ranks, topic: [str(next(shards))])
    here.register()
    assert DISK not in here.adapter.session.manager.catalogs
    assert "the ranks disagree" in caplog.text


def test_a_pool_of_an_unknown_shape_is_left_alone(engine, caplog):
    here = engine(ranks=1)
    here.workers[0].register_kv_caches(torch.zeros(16, 4))
    assert "the engine's KV pool is (16, 4)" in caplog.text
    time.sleep(0.2)
    assert here.leader.get_num_new_matched_tokens(request(1), 0) == (0, False)


def test_leader_and_workers_that_do_not_meet_in_time_say_who_is_missing(engine):
    here = engine(DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS=1)
    with pytest.raises(RuntimeError, match=r"0 of 2 workers have answered \(missing: ranks 0, 1\)"):
        here.leader.wait_for_initialization()


# -- keeping and bringing back ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("generation", ["1.2", "1.3"])
def test_what_one_request_has_computed_another_gets_back(engine, generation):
    here = engine(generation).register()
    for pool in here.pools:
        pool[BLOCKS] = torch.randint(256, pool[BLOCKS].shape, dtype=torch.uint8)
    first, second = request(1, generation=generation), request(2, generation=generation)
    here.leader.get_num_new_matched_tokens(first, 0)
    here.leader.update_state_after_alloc(first, BLOCKS)
    here.step(new=[data(first, BLOCKS, 33, generation=generation)])
    here.until(lambda: here.poll() and not here.adapter.leader.busy)
    assert here.offer(second, OTHERS) == 32  # the 33rd token is computed
    here.until_loaded(2)
    for pool in here.pools:
        assert torch.equal(pool[OTHERS[:4]], pool[BLOCKS[:4]])
        assert not pool[OTHERS[4]].any()


def test_what_happens_can_be_seen(engine):
    from kvbm.observe.remote import fetch

    here = engine(DYN_KVBM_METRICS=1, DYN_KVBM_METRICS_PORT=free_ports(2)[0]).register()
    # On a busy machine a step may take so long that the cost model would measure prefill by it.
    here.adapter._cost.observe_prefill = lambda tokens, seconds, before: None
    here.keep(request(1), BLOCKS)
    here.offer(request(2), OTHERS)
    here.until_loaded(2)
    here.until(lambda: here.poll() and not here.adapter.leader.busy)
    here.leader.get_num_new_matched_tokens(request(3, tokens=5), 0)
    state = fetch(here.adapter.observer.server.url, requests=9)
    assert (state.identity.engine, state.identity.ranks, state.identity.block_tokens) == ("tensorrt_llm", 2, SIZE)
    flows = {(flow.source, flow.target): flow for flow in state.flows}
    assert flows["device", "host"].blocks == flows["host", "device"].blocks == 4
    assert flows["host", "device"].bytes == 4 * 2 * 2 * 2 * 64  # blocks, ranks, layers, K and V, bytes
    assert state.matched_tokens == 32
    outcomes = {name: count for name, count in state.outcomes.items() if count}
    assert outcomes == {"loaded": 1, "not found": 1, "too short": 1}
    assert [request.loaded_tokens for request in state.requests] == [0, 32, 0]
    assert state.saved.loads == 1
    assert not state.saved.measured  # how fast this engine computes
    assert state.requests[1].why == "loaded outside of the step (the only place with this engine or model)"


@pytest.mark.parametrize("passes_on", ["ranges", "priorities"])
def test_retention_and_the_tenant_reach_the_policy(engine, monkeypatch, passes_on):
    here = engine(KVBM_TENANT_SHARES="acme=0.5").register()
    pool = here.adapter.leader.manager.near
    told = []
    monkeypatch.setattr(pool, "end_turn", lambda keys, turn: told.append(turn.retention))
    first = request(1, salt="acme")
    if passes_on == "ranges":
        part = SimpleNamespace(token_start=0, token_end=16, priority=90, duration_ms=2000)
        first.kv_cache_retention_config = SimpleNamespace(token_range_retention_configs=[part])
    assert here.leader.get_num_new_matched_tokens(first, 0) == (0, False)
    here.leader.update_state_after_alloc(first, BLOCKS)
    computed = data(first, BLOCKS, 33)
    computed.priorities = [90, 90, 35, 35, 35]
    here.step(new=[computed])
    here.until(lambda: here.poll() and not here.adapter.leader.busy)
    here.leader.request_finished(first, BLOCKS)
    seconds = 2.0 if passes_on == "ranges" else float("inf")
    assert told == [(Retention(1, seconds, 0, 2),)]
    assert pool.tenants_of(list(pool._published.values())) == [1, 1, 1, 1]


def test_a_prefix_that_ends_within_a_block_gets_nothing(engine):
    here = engine().register()
    here.keep(request(1), BLOCKS)
    assert here.leader.get_num_new_matched_tokens(request(2), SIZE + 3) == (0, False)
    assert here.leader.get_num_new_matched_tokens(request(3), SIZE)[0] == 24


@pytest.mark.parametrize(("field", "value", "offered"), [
    ("py_return_context_logits", True, 0),
    ("py_additional_outputs", ["hidden"], 0),
    ("py_additional_outputs", [SimpleNamespace(name="hidden", gather_context=True)], 0),
    ("py_additional_outputs", [SimpleNamespace(name="hidden", gather_context=False)], 32),
    ("py_return_context_logits", False, 32),
])  # fmt: skip
def test_a_request_that_returns_something_for_every_token_gets_no_hit(engine, field, value, offered):
    """Its blocks are kept as those of any other."""
    here = engine().register()
    first, second = request(1), request(2)
    for each in (first, second):
        setattr(each, field, value)
    here.keep(first, BLOCKS)
    assert here.leader.get_num_new_matched_tokens(second, 0)[0] == offered
    assert here.leader.get_num_new_matched_tokens(request(3), 0)[0] == 32


def test_what_is_sooner_computed_than_loaded_is_not_offered(engine):
    for load, offered in (("always", True), ("never", False)):
        here = engine(KVBM_LOAD=load).register()
        here.keep(request(1), BLOCKS)
        assert here.leader.get_num_new_matched_tokens(request(2), 0) == ((32, True) if offered else (0, False))
        assert sum(here.adapter.session.counts.refused_load_blocks.values()) == (0 if offered else 4)


def test_the_cost_model_hears_what_steps_take(engine):
    here = engine(ranks=1).register()
    heard = []
    here.adapter._cost.observe_prefill = lambda tokens, seconds, before: heard.append((tokens, before))
    here.adapter._cost.observe_step = lambda seconds: heard.append("decode")
    first = request(1)
    here.leader.get_num_new_matched_tokens(first, 0)
    for computed, scheduled in ((0, 16), (16, 17), (32, 1)):
        here.step(cached=[data(first, [], scheduled, computed)])
        here.poll()
    assert heard == [(16, 0), (17, 16)]  # the engine looks at the results of a step in the one after it
    here.poll()
    assert heard == [(16, 0), (17, 16), "decode"]


def test_an_offer_that_is_not_taken_up_holds_its_blocks_for_a_while_only(engine, monkeypatch):
    here = engine().register()
    here.keep(request(1), BLOCKS)
    here.leader.get_num_new_matched_tokens(request(2), 0)
    pool = next(iter(here.adapter.leader.manager.catalogs.values()))
    assert pool.pinned == 4
    monkeypatch.setattr(sys.modules["kvbm.engines.trtllm.leader"], "OFFER_SECONDS", 0.0)
    here.poll()
    assert pool.pinned == 0


def test_a_request_that_is_cancelled_before_it_gets_blocks_is_forgotten(engine, monkeypatch):
    here = engine().register()
    module = sys.modules["kvbm.engines.trtllm.leader"]
    here.keep(request(1), BLOCKS)
    lives = request(2, range(100, 133))
    here.leader.get_num_new_matched_tokens(lives, 0)
    here.leader.update_state_after_alloc(lives, OTHERS)
    for number in range(3, 9):  # some are offered blocks, and some are not
        here.leader.get_num_new_matched_tokens(request(number, range((number % 2) * 200, (number % 2) * 200 + 33)), 0)
    monkeypatch.setattr(module, "OFFER_SECONDS", 0.0)
    monkeypatch.setattr(module, "FORGOTTEN", 2)
    here.poll()
    assert set(here.adapter._requests) == {2}
    assert list(here.adapter._forgotten) == [6, 8]
    assert not here.adapter._waiting


def test_a_request_that_comes_back_after_it_was_forgotten_is_computed(engine, monkeypatch):
    here = engine().register()
    here.keep(request(1), BLOCKS)
    late = request(2)
    assert here.leader.get_num_new_matched_tokens(late, 0) == (32, True)
    with monkeypatch.context() as hurried:
        hurried.setattr(sys.modules["kvbm.engines.trtllm.leader"], "OFFER_SECONDS", 0.0)
        here.poll()
    here.park(late)
    late.prepopulated_prompt_len = late.context_current_position = 32  # what the engine counts on
    here.leader.update_state_after_alloc(late, OTHERS)
    here.until_loaded(2)
    assert late.context_current_position == 0


def test_a_request_that_gets_room_for_part_of_the_offer_loads_that_part(engine):
    here = engine().register()
    here.keep(request(1), BLOCKS)
    second = request(2)
    assert here.offer(second, OTHERS[:2]) == 32
    here.until(lambda: here.poll(started=[2])[0][1] or not here.adapter._loads)
    assert here.adapter.session.counts.matched_tokens == 16


def test_the_forward_pass_that_never_came_leaves_nothing_to_find(engine):
    here = engine().register()
    first = request(1)
    here.leader.get_num_new_matched_tokens(first, 0)
    here.leader.update_state_after_alloc(first, BLOCKS)
    here.step(new=[data(first, BLOCKS, 33)], forward=False)
    here.step()
    here.until(lambda: here.poll() and not here.adapter.leader.busy)
    assert here.leader.get_num_new_matched_tokens(request(2), 0) == (0, False)
    assert here.adapter.session.counts.failed_store_blocks == 4


# -- accidents --------------------------------------------------------------------------------------------------------


def test_a_load_that_cannot_be_planned_is_computed(engine, monkeypatch):
    here = engine().register()
    here.keep(request(1), BLOCKS)
    second = request(2)
    second.prepopulated_prompt_len = second.context_current_position = 32

    def broken(*args, **kwargs):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(here.adapter.leader, "onboard", broken)
    here.offer(second, OTHERS)
    here.until_loaded(2)
    assert second.context_current_position == 0
    assert second.state is State.DISAGG_GENERATION_TRANS_IN_PROGRESS
    second.state = State.CONTEXT_INIT
    assert second.context_chunk_size == 33


def test_no_rank_lets_a_request_go_on_before_all_have_set_it_back(engine, monkeypatch):
    here = engine().register()
    here.keep(request(1), BLOCKS)
    second = request(2)
    monkeypatch.setattr(here.adapter.leader, "onboard", lambda *a, **k: 1 / 0)
    here.offer(second, OTHERS)
    for _ in range(50):
        assert here.managers[0].get_finished(started=[2]) == ([], [])
        time.sleep(0.002)
    here.until(lambda: here.poll(started=[2])[1][1] == [2])


def test_a_request_that_cannot_be_found_is_held_back_rather_than_computed_on_nothing(engine, monkeypatch, caplog):
    here = engine().register()
    here.keep(request(1), BLOCKS)
    monkeypatch.setattr(here.adapter.leader, "onboard", lambda *a, **k: 1 / 0)
    second = request(2)
    here.offer(second, OTHERS)
    for manager in here.managers:
        del manager.pending_async_requests  # an engine that keeps its requests elsewhere
    end = time.monotonic() + 60
    while "can neither be loaded nor be computed" not in caplog.text:
        assert time.monotonic() < end
        assert [part[1] for part in here.poll(started=[2])] == [[], []]


def test_a_plan_that_comes_after_its_request_has_ended_is_not_begun(engine):
    here = engine().register()
    for pool in here.pools:
        pool[BLOCKS] = 7
    here.keep(request(1), BLOCKS)
    second = request(2)
    here.offer(second, OTHERS)
    assert here.leader.request_finished(second, OTHERS) is True
    assert here.poll(finished=[2], started=[2]) == [([2], [2])] * 2  # it waits for nothing any more
    here.until(lambda: here.poll() and not here.adapter.leader.busy)
    assert not any(pool[OTHERS].any() for pool in here.pools)


def test_a_request_that_was_cancelled_does_not_wait_for_a_load_that_fails(engine):
    here = engine(KVBM_INJECT_FAULTS="load:rank=1,slow").register()
    here.keep(request(1), BLOCKS)
    second = request(2)
    here.offer(second, OTHERS)
    here.until(lambda: here.poll(started=[2]) and all(worker._adapter._loads for worker in here.workers))
    assert here.leader.request_finished(second, OTHERS) is True
    saved, loaded = [], []
    finished = [2]

    def through():
        nonlocal finished
        for mine, theirs in here.poll(finished=finished):
            saved.extend(mine)
            loaded.extend(theirs)
        finished = []
        return len(saved) == len(loaded) == 2

    here.until(through)


def test_a_load_waits_for_the_store_that_reads_its_blocks(engine):
    """The order to load may come before the step in which the store begins."""
    here = engine(ranks=1).register()
    here.keep(request(1), BLOCKS)
    first = request(3, tokens=list(range(100, 133)))
    here.leader.get_num_new_matched_tokens(first, 0)
    here.leader.update_state_after_alloc(first, OTHERS)
    metadata = here.leader.build_connector_meta(api.SchedulerOutput([data(first, OTHERS, 33)], []))
    assert here.leader.request_finished(first, OTHERS) is False
    here.offer(request(2), OTHERS)
    worker = here.workers[0]
    here.until(lambda: worker.get_finished([], []) and worker._adapter._late)
    assert not worker._adapter._loads
    worker.bind_connector_meta(metadata)
    worker.start_load_kv(None)
    worker.wait_for_save(None)
    here.until(lambda: here.poll(started=[2]) and not here.adapter._loads)
    assert here.adapter.session.counts.offloaded_blocks == 8


def test_saved_requests_are_given_back_one_at_a_time_and_in_order(engine):
    """TensorRT-LLM 1.2 forgets all but the first of an iteration, and their blocks with them."""
    here = engine(ranks=1).register()
    worker = here.workers[0]
    assert [worker.get_finished([5, 3, 4], [])[0]] + [worker.get_finished([], [])[0] for _ in range(3)] == [
        [5], [3], [4], [],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "target", ["match", "allocated", "plan_step", "finished", "_tick", "_plan_store", "_follow", "_load"]
)
def test_what_goes_wrong_in_the_leader_stays_there(engine, monkeypatch, target):
    here = engine().register()
    here.keep(request(1), BLOCKS)

    def broken(*args, **kwargs):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(here.adapter, target, broken)
    second = request(2)
    here.park(second)
    tokens, later = here.leader.get_num_new_matched_tokens(second, 0)
    here.leader.update_state_after_alloc(second, OTHERS)
    here.step(new=[data(second, OTHERS, 33)])
    here.poll()
    here.leader.request_finished(second, OTHERS)
    assert later is (tokens > 0)
    assert sum(here.leader._faults.counts.values()) > 0


@pytest.mark.parametrize("target", ["bind", "begin", "end", "forward_ended", "poll", "_take"])
def test_what_goes_wrong_in_a_worker_stays_there(engine, monkeypatch, target):
    here = engine().register()

    def broken(*args, **kwargs):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(here.workers[1]._adapter, target, broken)
    here.step(new=[data(request(1), BLOCKS, 33)])
    assert here.poll()[1] == ([], [])


# -- keys -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def scope_of(modules):
    modules()
    return importlib.import_module("kvbm.engines.trtllm.keys").scope_of


def test_what_changes_the_kv_is_in_the_scope(scope_of):
    scopes = [
        scope_of(SimpleNamespace(cache_salt=salt, lora_task_id=lora, py_lora_path=path, multimodal_positions=at,
                                 multimodal_hashes=hashes))
        for salt, lora, path, at, hashes in [
            (None, None, None, None, None), ("a", None, None, None, None), ("b", None, None, None, None),
            (None, 1, None, None, None), (None, 2, None, None, None), (None, 1, "/adapter", None, None),
            (None, None, None, [3], [[1, 2]]), (None, None, None, [3], [[1, 3]]), (None, None, None, [4], [[1, 2]]),
        ]
    ]  # fmt: skip
    assert None not in scopes
    assert len(set(scopes)) == len(scopes)


def test_an_adapter_means_nothing_to_another_process(scope_of):
    """Neither its number nor its path identifies the weights that the engine has read."""
    numbered = SimpleNamespace(cache_salt=None, lora_task_id=1)
    named = SimpleNamespace(cache_salt=None, lora_task_id=1, py_lora_path="/adapter")
    before = scope_of(numbered), scope_of(named)
    importlib.reload(sys.modules["kvbm.engines.trtllm.keys"])  # as another process imports it
    assert scope_of(numbered) != before[0]
    assert scope_of(named) != before[1]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_embedding_table": object()},
        {"multimodal_embedding": object()},
        {"multimodal_positions": [3], "multimodal_hashes": None},
    ],
)
def test_a_request_whose_kv_does_not_follow_from_tokens_has_no_keys(scope_of, fields):
    assert scope_of(SimpleNamespace(cache_salt=None, **fields)) is None


def test_a_request_whose_salt_cannot_be_read_shares_with_nobody(modules, scope_of):
    assert scope_of(SimpleNamespace()) is None
    modules("1.2")
    older = importlib.import_module("kvbm.engines.trtllm.keys").scope_of
    assert older(SimpleNamespace()) is not None
    assert older(SimpleNamespace(cache_salt_id=5)) != older(SimpleNamespace(cache_salt_id=6))
