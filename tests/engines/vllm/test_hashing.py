"""The short way of hashing a prompt gives the names that vLLM gives, or is not gone."""

from __future__ import annotations

import importlib
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import vllm.v1.core.kv_cache_utils as kv_cache_utils
import vllm.v1.engine.core as engine_core
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.request import Request

from kvbm.engines.vllm import compat
from kvbm.engines.vllm.shortcuts import hashing

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
def counted(function):
    """The hash function, and the blocks it was given."""
    blocks = []

    def hash_block(block):
        blocks.append(block)
        return function(block)

    return hash_block, blocks


def prompt(length, seed=0):
    source = random.Random(seed)
    return [source.randrange(150_000) for _ in range(length)]


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
    return Request("a", prompt(length), SamplingParams(max_tokens=64), None, block_hasher=hasher, **options)


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


def named(own, tokens):
    return Request("a", tokens, SamplingParams(max_tokens=1), None, block_hasher=own).block_hashes


def test_a_prompt_that_returns_is_named_without_being_hashed(own, counted):
    hash_block, blocks = counted
    names = hashing.Names(SIZE, hash_block)
    tokens = prompt(3000)
    assert names.of(tokens) == named(own, tokens)
    del blocks[:]
    assert names.of(tokens + prompt(500, seed=1)) == named(own, tokens + prompt(500, seed=1))
    assert len(blocks) == (3500 - 2048) // SIZE  # behind the last stretch that was whole


def test_the_same_tokens_behind_others_have_other_names(own, function):
    names = hashing.Names(SIZE, function)
    same = prompt(2048)
    prompts = [prompt(1024, seed) + same for seed in (1, 2, 3)] + [same]
    found = [names.of(tokens) for tokens in prompts]
    assert found == [named(own, tokens) for tokens in prompts]
    assert len({name for part in found for name in part}) == 3 * 192 + 128


def test_a_single_token_makes_all_names_behind_it_others(own, function):
    names = hashing.Names(SIZE, function)
    tokens = prompt(4096)
    names.of(tokens)
    for place in (0, 1023, 1024, 2000, 4095):
        other = [*tokens[:place], tokens[place] + 1, *tokens[place + 1 :]]
        assert names.of(other) == named(own, other)


def test_only_so_much_is_remembered_and_the_oldest_goes_first(counted, monkeypatch):
    monkeypatch.setattr(hashing, "_STRETCHES", 3)
    hash_block, blocks = counted
    names = hashing.Names(SIZE, hash_block)
    for seed in (1, 2, 3, 1, 4):
        names.of(prompt(1024, seed))
    del blocks[:]
    for seed in (1, 3, 4):
        names.of(prompt(1024, seed))
    assert not blocks
    names.of(prompt(1024, 2))
    assert len(blocks) == 64
    assert len(names._known) == 3


@pytest.mark.parametrize("odd", [-1, 2**32, 2**70])
def test_tokens_that_are_none_are_named_as_vllm_names_them(odd, own, function):
    names = hashing.Names(SIZE, function)
    tokens = [odd, *prompt(2000)]
    assert names.of(tokens) == named(own, tokens)
    assert not names._known


@pytest.mark.parametrize("kind", [np.int64, np.uint32])
def test_numbers_of_another_kind_do_not_name_plain_ones(kind):
    function = get_hash_fn_by_name("sha256")
    kv_cache_utils.init_none_hash(function)
    own = kv_cache_utils.get_request_block_hasher(SIZE, function)
    names = hashing.Names(SIZE, function)
    for place in (0, 500, 1023):
        tokens = [1] * 1024
        odd = [*tokens[:place], kind(1), *tokens[place + 1 :]]
        assert names.of(odd) == named(own, odd)
        assert not names._known
    assert names.of(tokens) == named(own, tokens)


@pytest.mark.parametrize("size", [1, 24, 128, 2048])
def test_blocks_of_any_size_are_named_as_vllm_names_them(size, function):
    own = kv_cache_utils.get_request_block_hasher(size, function)
    names = hashing.Names(size, function)
    for length in (3000, 5000, 5000):
        assert names.of(prompt(length)) == named(own, prompt(length))


def test_several_threads_may_ask(function, monkeypatch):
    monkeypatch.setattr(hashing, "_STRETCHES", 2)
    names = hashing.Names(SIZE, function)
    prompts = [prompt(1024, seed % 4) + prompt(1024, seed) for seed in range(8)]
    expected = [hashing.Names(SIZE, function).of(tokens) for tokens in prompts]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            assert list(pool.map(names.of, prompts)) == expected


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
    assert "using vLLM's own" in caplog.text


def test_a_hasher_that_wants_more_of_a_request_than_is_known_has_its_way(function):
    def other(request):
        return [request.something_new]

    assert hashing.quick(other, SIZE, function) is other


@pytest.fixture
def core(monkeypatch):
    monkeypatch.setattr(engine_core, "get_request_block_hasher", kv_cache_utils.get_request_block_hasher)
    return engine_core


def test_engines_made_from_now_on_take_the_short_way(core, function):
    hashing.install()
    hashing.install()
    hasher = core.get_request_block_hasher(SIZE, function)
    assert hasher.__module__ == hashing.__name__
    assert core.get_request_block_hasher.__wrapped__ is kv_cache_utils.get_request_block_hasher


@pytest.mark.parametrize("wanted", [True, False], ids=["wanted", "not wanted"])
def test_the_short_way_is_taken_where_it_is_wanted(wanted, core, make_clockwork):
    make_clockwork({"fast_prompts": wanted})
    assert hasattr(core.get_request_block_hasher, "__wrapped__") is wanted


def test_a_release_that_nobody_has_read_keeps_its_own(core, monkeypatch):
    monkeypatch.setattr(compat, "release", lambda: (9, 9))
    hashing.install()
    assert core.get_request_block_hasher is kv_cache_utils.get_request_block_hasher


@pytest.mark.parametrize("gone", ["the function", "the module"])
def test_a_release_that_has_nothing_where_others_have_it_starts_like_any_other(gone, core, monkeypatch):
    monkeypatch.setattr(compat, "release", lambda: (9, 9))
    if gone == "the module":
        monkeypatch.setitem(sys.modules, "vllm.v1.engine.core", None)
        monkeypatch.delattr("vllm.v1.engine.core")
    else:
        monkeypatch.delattr(core, "get_request_block_hasher")
    importlib.reload(hashing).install()


def test_only_long_prompts_wait_for_those_who_decode(own, function, monkeypatch):
    waits = []
    monkeypatch.setattr(hashing.decoding, "wait", lambda: waits.append(1))
    quick = hashing.quick(own, SIZE, function)
    for length in (100, 4095):
        make(quick, length)
    assert waits == []
    make(quick, 4096)
    assert waits == [1]


def test_a_request_that_lacks_what_is_asked_of_it_is_left_to_vllm(function):
    """Raised there, an error would be the end of the request, or of the engine."""

    def other(request):
        return hashing.Names(SIZE, function).of(request.all_token_ids)

    quick = hashing.quick(other, SIZE, function)
    assert quick is not other
    bare = SimpleNamespace(block_hashes=[], all_token_ids=prompt(100))
    assert quick(bare) == other(bare)


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
