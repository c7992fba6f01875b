"""What the leader knows of adapters, and the digest of their weights."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.request import LoRARequest

from kvbm.core.keys import Namespace
from kvbm.engines.vllm.adapter_loads import AdapterLoads, weights_digest
from kvbm.engines.vllm.adapters import Adapters
from kvbm.engines.vllm.keys import RequestKeys
from kvbm.plans import Report, StepPlan

TOKENS = list(range(1000, 1043))
CONFIG = SimpleNamespace(target_modules=None)


def request(name="r", number=1, adapter="a", path="/a", **fields):
    lora = LoRARequest(adapter, number, path)
    return SimpleNamespace(request_id=name, lora_request=lora, all_token_ids=TOKENS, block_hashes=[b""], **fields)


def report(*loads, rank=0):
    return Report(rank, adapters={number: (load, digest) for number, load, digest in loads})


def model(seed=1, number=1, alpha=4, name="q_proj", dtype=torch.float32):
    random = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(4, 8, generator=random).to(dtype) for _ in range(2))
    return LoRAModel(number, 4, {name: LoRALayerWeights(name, 4, alpha, a, b.T)})


class Pool:
    """vLLM's block pool, as far as a reset shows."""

    class Blocks: ...

    def __init__(self):
        self.reset()

    def reset(self):
        self.cached_block_hash_to_block = self.Blocks()


@pytest.fixture
def adapters():
    return Adapters(ranks=2, loads_in_any_step=True, max_loras=2)


@pytest.fixture
def keys(adapters):
    return RequestKeys(Namespace(model="m", dtype="f", layout="", block_size=4), True, adapters)


def bound(keys, asked):
    keys.bind(asked)
    return list(keys.of(asked))


def test_an_adapter_that_not_every_rank_has_reported_gives_no_keys(adapters, keys):
    asked = request()
    assert bound(keys, asked) == []
    adapters.apply([report((1, 1, "x"), rank=0)])
    assert bound(keys, asked) == []
    adapters.apply([report((1, 1, "x"), rank=1)])
    assert list(keys.of(asked)) == []  # not before vLLM asks for it again
    assert len(bound(keys, asked)) == 10


def test_equal_weights_give_equal_keys_whatever_the_adapter_is_called(adapters, keys):
    for rank in range(2):
        adapters.apply([report((1, 1, "x"), (2, 2, "x"), (3, 3, "y"), rank=rank)])
    one = bound(keys, request("one", 1))
    same = bound(keys, request("same", 2, "other name", "/other/path"))
    other = bound(keys, request("other", 3))
    salted = bound(keys, request("salted", 1, cache_salt="s"))
    assert one == same
    assert len({*one, *other, *salted}) == 30


def test_keys_of_a_request_end_with_the_weights_that_it_began_with(adapters, keys):
    for rank in range(2):
        adapters.apply([report((1, 1, "x"), rank=rank)])
    asked = request()
    before = bound(keys, asked)
    adapters.apply([report((1, 2, "y"), rank=1)])
    assert list(keys.of(asked)) == []
    adapters.apply([report((1, 3, "x"), rank=1)])
    assert list(keys.of(asked)) == []  # the old weights are back, and its blocks are of both
    assert bound(keys, asked) == before  # from its beginning
    keys.forget(asked.request_id)
    assert (keys._chains, keys._bound) == ({}, {})


def test_a_session_with_an_adapter_has_no_keys(adapters, keys):
    for rank in range(2):
        adapters.apply([report((1, 1, "x"), rank=rank)])
    assert bound(keys, request(resumable=True)) == []


def test_an_unknown_adapter_is_asked_for_once(adapters):
    lora = request().lora_request
    assert adapters.ask(lora, others_run=True)
    assert len(adapters.take_wanted(computes=True)) == 1
    assert adapters.ask(lora, others_run=True)
    assert adapters.take_wanted(computes=True) == []
    adapters.apply([report((1, 0, ""), rank=rank) for rank in range(2)])
    assert not adapters.ask(lora, others_run=True)  # the ranks have answered: it cannot be had


def test_a_step_loads_no_more_adapters_than_fit_at_a_time(adapters):
    loras = [request(number=number).lora_request for number in (1, 2, 3)]
    assert all(adapters.ask(lora, others_run=True) for lora in loras)
    assert len(adapters.take_wanted(computes=True)) == 2
    assert all(adapters.ask(lora, others_run=True) for lora in loras)
    assert len(adapters.take_wanted(computes=True)) == 1


def test_ranks_that_load_only_in_empty_steps_keep_no_request_waiting_for_others():
    adapters = Adapters(ranks=2, loads_in_any_step=False)
    lora, other = request().lora_request, request(number=2).lora_request
    assert not adapters.ask(lora, others_run=True)
    assert adapters.ask(lora, others_run=False)
    assert adapters.take_wanted(computes=True) == []
    assert not adapters.ask(lora, others_run=False)
    assert adapters.ask(other, others_run=False)
    assert len(adapters.take_wanted(computes=False)) == 1


def test_blocks_on_the_device_are_trusted_until_an_adapter_has_had_other_weights(adapters):
    pool, lora = Pool(), request().lora_request

    def load(number, digest):
        adapters.apply([report((1, number, digest), rank=rank) for rank in range(2)])
        return adapters.weights(lora)

    assert not adapters.admit(lora, None, pool)
    first = load(1, "x")
    assert adapters.admit(lora, first, pool)  # no other weights can have made the blocks before
    second = load(2, "y")
    assert not adapters.admit(lora, second, pool)
    assert not adapters.admit(lora, second, pool)
    pool.reset()
    assert adapters.admit(lora, second, pool)
    assert not adapters.admit(lora, load(3, "x"), pool)


def test_the_digest_covers_all_that_an_adapter_consists_of_but_its_number():
    same = weights_digest(model(), CONFIG)
    assert weights_digest(model(number=7), CONFIG) == same
    others = [model(seed=2), model(alpha=8), model(name="v_proj"), model(dtype=torch.bfloat16)]
    digests = {weights_digest(other, CONFIG) for other in others}
    digests.add(weights_digest(model(), SimpleNamespace(target_modules=["v_proj"])))
    assert len(digests | {same}) == 6


@pytest.fixture
def loads():
    watching = AdapterLoads(CONFIG, rank=0)
    yield watching
    watching.close()


def changed(loads, number, adapter=1):
    adapters = Adapters(1, True)
    adapters.apply([report((adapter, number, "x"))])
    weights = adapters.weights(request(number=adapter).lora_request)
    return loads.changed(StepPlan(adapters=[weights.used_by(stores=[5])]))


def test_every_change_of_weights_has_a_number_of_its_own(loads):
    loads.loaded(None, model())
    (first,) = loads.take_news().values()
    loads.loaded(None, model())  # dropped by vLLM, and read again
    assert loads.take_news() == {}
    assert changed(loads, first[0]) == []
    loads.loaded(None, model(seed=2))
    (second,) = loads.take_news().values()
    loads.loaded(None, model())
    (third,) = loads.take_news().values()
    assert first[1] == third[1] != second[1]
    assert len({first[0], second[0], third[0]}) == 3
    assert [use.stores for use in changed(loads, first[0])] == [[5]]
    assert changed(loads, third[0]) == []
    assert changed(loads, third[0], adapter=2) != []


def test_weights_that_cannot_be_identified_give_no_keys(loads, caplog):
    odd = model()
    odd.loras["q_proj"].something = object()
    loads.loaded(None, odd)
    ((number, (load, digest)),) = loads.take_news().items()
    assert (number, digest, load > 0) == (1, "", True)
    assert "cannot identify the weights" in caplog.text
    adapters = Adapters(1, True)
    adapters.apply([report((number, load, digest))])
    assert adapters.weights(request().lora_request) is None


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_that_is_overwritten_does_not_change_weights_that_were_loaded(loads, tmp_path, packed):
    file = tmp_path / "weights"
    file.write_bytes(bytes(128))
    read = model()
    mapped = torch.from_file(str(file), shared=True, size=32).reshape(4, 8)
    read.loras["q_proj"].lora_a = [mapped, None] if packed else mapped
    loads.loaded(None, read)
    with file.open("r+b") as overwritten:
        overwritten.write(b"\1" * 128)
    kept = read.loras["q_proj"].lora_a
    assert not (kept[0] if packed else kept).any()


def test_a_release_without_the_method_that_loads_adapters_costs_their_hits(monkeypatch, caplog):
    import msgspec
    from vllm.lora.worker_manager import WorkerLoRAManager

    monkeypatch.delattr(WorkerLoRAManager, "_load_adapter")
    watching = AdapterLoads(CONFIG, rank=0)
    assert "KVBM cannot see which LoRA adapters vLLM loads: AttributeError" in caplog.text
    watching.load_wanted([msgspec.msgpack.encode(request().lora_request)])
    assert watching.take_news() == {1: (0, "")}  # at once: no request waits for an answer
    watching.close()
