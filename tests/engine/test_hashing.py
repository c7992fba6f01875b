"""The short way of hashing a prompt gives the names that vLLM gives, or is not gone."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
import vllm.v1.core.kv_cache_utils as kv_cache_utils
import vllm.v1.engine.core as engine_core
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.request import Request

from kvbm.engines.vllm import compat, hashing

pytestmark = pytest.mark.engine
SIZE = 16


@pytest.fixture(params=["sha256", "sha256_cbor"])
def function(request):
    function = get_hash_fn_by_name(request.param)
    kv_cache_utils.init_none_hash(function)
    return function


@pytest.fixture
def own(function):
    return kv_cache_utils.get_request_block_hasher(SIZE, function)


@pytest.fixture
def calls():
    return []


@pytest.fixture
def short(own, function, calls):
    """The short way; what it leaves to vLLM is in ``calls``."""

    def counted(request):
        calls.append(request)
        return own(request)

    quick = hashing.quick(counted, SIZE, function)
    calls.clear()
    return quick


def make(hasher, length, **options):
    tokens = [random.Random(length).randrange(2**31) for _ in range(length)]
    return Request("a", tokens, SamplingParams(max_tokens=64), None, block_hasher=hasher, **options)


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 32, 1000])
def test_a_plain_prompt_gets_the_names_that_vllm_gives(length, short, own, calls):
    assert make(short, length).block_hashes == make(own, length).block_hashes
    assert not calls


def test_a_request_that_decodes_gets_the_names_that_vllm_gives(short, own):
    requests = [make(hasher, 10) for hasher in (short, own)]
    for token in range(100):
        for request in requests:
            request.append_output_token_ids(token)
    assert len(requests[0].block_hashes) == 6
    assert requests[0].block_hashes == requests[1].block_hashes


def image(offset):
    return MultiModalFeatureSpec(
        data=None, modality="image", identifier="picture", mm_position=PlaceholderRange(offset=offset, length=20)
    )


@pytest.mark.parametrize(
    "options",
    [
        {"cache_salt": "tenant"},
        {"lora_request": LoRARequest("adapter", 1, "/nowhere")},
        {"mm_features": [image(40)]},
        {"prompt_embeds": torch.rand(100, 8)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_whatever_vllm_hashes_beside_tokens_is_left_to_vllm(options, short, own, calls):
    names = make(short, 100, **options).block_hashes
    assert calls
    assert names == make(own, 100, **options).block_hashes
    assert names != make(own, 100).block_hashes


def test_where_the_two_do_not_agree_vllm_has_its_way(own, function, caplog):
    def other(request):
        return [name[::-1] for name in own(request)]

    assert hashing.quick(other, SIZE, function) is other
    assert "vLLM's own way" in caplog.text


def test_a_hasher_that_wants_more_of_a_request_than_is_known_has_its_way(function):
    def other(request):
        return [request.something_new]

    assert hashing.quick(other, SIZE, function) is other


@pytest.fixture
def core(monkeypatch):
    monkeypatch.setattr(engine_core, "get_request_block_hasher", kv_cache_utils.get_request_block_hasher)
    return engine_core


def test_engines_made_from_now_on_take_the_short_way(core, function):
    hashing.quicken()
    hashing.quicken()
    hasher = core.get_request_block_hasher(SIZE, function)
    assert hasher.__module__ == hashing.__name__
    assert core.get_request_block_hasher.__wrapped__ is kv_cache_utils.get_request_block_hasher


@pytest.mark.parametrize("wanted", [True, False], ids=["wanted", "not wanted"])
def test_the_short_way_is_taken_where_it_is_wanted(wanted, core, make_clockwork):
    make_clockwork({"fast_hash": wanted})
    assert hasattr(core.get_request_block_hasher, "__wrapped__") is wanted


def test_a_release_that_nobody_has_read_keeps_its_own(core, monkeypatch):
    monkeypatch.setattr(compat, "release", lambda: (9, 9))
    hashing.quicken()
    assert core.get_request_block_hasher is kv_cache_utils.get_request_block_hasher


def test_nothing_that_vllm_hashes_beside_tokens_is_unknown(function, own):
    """Names what vLLM asks of a request while it hashes: somebody must read anything that is new."""
    asked = set()

    class Asked(SimpleNamespace):
        def __getattribute__(self, name):
            if not name.startswith("__"):
                asked.add(name)
            return super().__getattribute__(name)

    sample = hashing._samples(SIZE)[-1]
    own(Asked(**vars(sample)))
    known = {"block_hashes", "num_tokens", "all_token_ids"}
    assert asked - known == {"lora_request", "cache_salt", "mm_features", "prompt_embeds"}
