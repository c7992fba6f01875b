"""The adapter against vLLM's own classes, without an engine: keys, releases, set-ups it stays out of."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.engine

TOKENS = list(range(1000, 1043))


@pytest.fixture(scope="module")
def vllm():
    return pytest.importorskip("vllm")


@pytest.fixture
def keys(vllm):
    """Makes a RequestKeys for one of vLLM's hash functions, in an engine that has loaded adapters 1 and 2."""
    from kvbm.core.keys import Namespace
    from kvbm.engines.vllm import fingerprint
    from kvbm.engines.vllm.adapters import Adapters
    from kvbm.engines.vllm.keys import RequestKeys
    from kvbm.plans import Report

    def make(algorithm="sha256", hash_block_size=4, persistent=False):
        namespace = Namespace(model="m", dtype="float32", layout="", block_size=4)
        cache = SimpleNamespace(block_size=4, prefix_caching_hash_algo=algorithm)
        reuses = fingerprint.reuses_engine_hashes(
            SimpleNamespace(cache_config=cache), SimpleNamespace(hash_block_size=hash_block_size), persistent
        )
        adapters = Adapters(ranks=1, loads_in_any_step=True)
        adapters.apply([Report(0, adapters={1: (1, "first"), 2: (2, "second")})])
        return RequestKeys(namespace, reuses, adapters)

    return make


@pytest.mark.parametrize("algorithm", ["sha256", "xxhash"])
def test_two_adapters_give_two_sets_of_keys(algorithm, keys):
    from clockwork import make_request
    from vllm.lora.request import LoRARequest

    found = keys(algorithm)
    adapters = [None, LoRARequest("first", 1, "/first"), LoRARequest("second", 2, "/second")]
    sets = []
    for i, adapter in enumerate(adapters):
        request, again = (make_request(f"{name}{i}", TOKENS, lora_request=adapter) for name in ("r", "again"))
        if adapter is not None:
            assert not found.of(request)
            found.bind(request)
            found.bind(again)
        sets.append(set(found.of(request)))
        # The same adapter in another request: the same keys.
        assert set(found.of(again)) == sets[-1]
    assert [len(each) for each in sets] == [10, 10, 10]
    assert len(set.union(*sets)) == 30


@pytest.mark.parametrize("algorithm", ["sha256", "xxhash"])
def test_two_salts_give_two_sets_of_keys(algorithm, keys):
    from clockwork import make_request

    found = keys(algorithm)
    requests = [make_request(f"r{i}", TOKENS, cache_salt=salt) for i, salt in enumerate((None, "a", "b", "a"))]
    none, first, second, again = (set(found.of(request)) for request in requests)
    assert first == again
    assert len(none | first | second) == 30


def test_hashes_that_can_be_made_to_collide_are_not_taken_as_keys(keys):
    from clockwork import make_request

    request = make_request("r", TOKENS)
    assert keys("sha256").of(request) is request.block_hashes
    for own in (keys("xxhash"), keys("xxhash_cbor"), keys("sha256", hash_block_size=2)):
        assert set(own.of(request)).isdisjoint(request.block_hashes)
        own.forget("r")
        assert not own._chains


def test_a_session_that_takes_tokens_back_is_left_alone(keys, monkeypatch):
    """Up to 0.31 vLLM keeps the hash of a block whose last token it has taken back: the block has a wrong name then."""
    from clockwork import make_request

    from kvbm.engines.vllm import compat

    session = make_request("s", TOKENS, resumable=True)
    monkeypatch.setattr(compat, "release", lambda: (0, 31))
    assert list(keys("sha256").of(session)) == []
    assert list(keys("xxhash").of(session)) == []
    monkeypatch.setattr(compat, "release", lambda: (0, 32))
    assert keys("sha256").of(session) is session.block_hashes
    assert list(keys("xxhash").of(session)) == []


def test_every_method_of_the_base_class_has_been_read(vllm):
    """Fails with a release that adds one: somebody must read what it asks of us, and add it to KNOWN_MEMBERS."""
    from kvbm.engines.vllm import compat

    assert compat.unknown_members() == set()


def test_a_new_method_of_the_base_class_is_noticed(vllm, monkeypatch):
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from kvbm.engines.vllm import compat

    monkeypatch.setattr(KVConnectorBase_V1, "fold_space", lambda self: None, raising=False)
    assert compat.unknown_members() == {"fold_space"}


@pytest.mark.parametrize("version", ["0.99.0", "1.0.0rc1", "dev"])
def test_an_unknown_release_is_tried_with_a_warning(version, vllm, monkeypatch, caplog):
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from kvbm.engines.vllm import compat

    monkeypatch.setattr(vllm, "__version__", version)
    monkeypatch.setattr(KVConnectorBase_V1, "fold_space", lambda self: None, raising=False)
    caplog.set_level(logging.WARNING, logger="kvbm")
    compat.warn_if_untested()
    assert f"not been tested with vLLM {version}" in caplog.text
    assert "fold_space" in caplog.text


def groups(*specs):
    return SimpleNamespace(
        num_blocks=16, kv_cache_groups=[SimpleNamespace(layer_names=["a"], kv_cache_spec=spec) for spec in specs]
    )


@pytest.fixture
def specs(vllm):
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

    shape = {"block_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    return SimpleNamespace(
        full=FullAttentionSpec(**shape),
        sliding=SlidingWindowSpec(**shape, sliding_window=8),
        twice_as_long=FullAttentionSpec(**{**shape, "block_size": 8}),
        twice_as_wide=SlidingWindowSpec(**{**shape, "head_size": 16}, sliding_window=8),
        states=MambaSpec(block_size=4, shapes=((2, 3),), dtypes=(torch.float32,)),
    )


def test_set_ups_that_cannot_be_served_are_left_alone_with_a_sentence(specs, model, caplog):
    """And then every call of vLLM gets a neutral answer."""
    from clockwork import make_config, make_request
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from kvbm.vllm_integration.connector import DynamoConnector

    config = make_config(model, {"cpu_cache_gb": 1})
    caplog.set_level(logging.WARNING, logger="kvbm")
    for cache, sentence in (
        (groups(specs.full, specs.states), "layers of the model keep a state, and vLLM saves none"),
        (groups(specs.full, specs.twice_as_long), "--disable-hybrid-kv-cache-manager"),
        (groups(specs.full, specs.twice_as_wide), "the model has 2 KV cache groups"),
        (groups(), "the model has 0 KV cache groups"),
        (groups(specs.states), "layers of the model keep a state"),
        (groups(SimpleNamespace(kv_cache_specs={"a": specs.full, "b": specs.sliding})), "SlidingWindowSpec"),
        (None, "did not say how its KV cache is made up"),
    ):
        caplog.clear()
        connector = DynamoConnector(config, KVConnectorRole.SCHEDULER, cache)
        assert "KVBM stays out of the way" in caplog.text
        assert sentence in caplog.text
        request = make_request("r", TOKENS)
        assert connector.on_new_request(request) is None
        assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
        assert connector.update_state_after_alloc(request, None, 0) is None
        assert connector.build_connector_meta(None) is not None
        assert connector.request_finished(request, []) == (False, None)
        assert connector.request_finished_all_groups(request, ([], [])) == (False, None)
        assert connector.has_pending_push_work() is False
        assert connector.reset_cache() is True
        assert connector.get_kv_connector_stats() is None
        assert connector.requires_kv_delivery is False
        worker = DynamoConnector(config, KVConnectorRole.WORKER, cache)
        worker.register_kv_caches({})
        worker.handle_preemptions(connector.build_connector_meta(None))
        worker.bind_connector_metadata(connector.build_connector_meta(None))
        worker.start_load_kv(None)
        worker.wait_for_layer_load("a")
        worker.wait_for_save()
        assert worker.get_finished({"r"}) == (None, None)
        assert worker.get_block_ids_with_load_errors() == set()
        assert worker.build_connector_worker_meta() is None
        assert worker.get_handshake_metadata() is None
        worker.shutdown()


def test_ordinary_attention_is_served(specs):
    from kvbm.engines.vllm import compat

    (group,) = groups(specs.full).kv_cache_groups
    assert compat.unsupported_attention(group) is None


def test_layers_that_see_a_window_are_served_where_a_lost_load_can_be_told_of(specs, model, caplog):
    from clockwork import make_cache, make_config
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, supports_hma

    from kvbm.engines.vllm import compat
    from kvbm.vllm_integration.connector import DynamoConnector

    served = compat.fails_whole_requests()
    assert supports_hma(DynamoConnector) is served
    config = make_config(model, {"cpu_cache_gb": 1, "onboard": "sync"})
    for cache, windows in ((groups(specs.full, specs.sliding), [0, 8]), (groups(specs.sliding), [8])):
        caplog.clear()
        connector = DynamoConnector(config, KVConnectorRole.SCHEDULER, cache)
        assert ("KVBM stays out of the way" in caplog.text) is not served
        assert ("KVBM_ONBOARD=sync has no effect" in caplog.text) is served
        assert compat.windows(config, cache) == (windows if served else None)
        connector.shutdown()
    shape = {"block_size": 8, "num_kv_heads": 1, "head_size": 4, "dtype": specs.full.dtype}  # as many bytes
    for full, sliding in (
        (type(specs.full)(**shape), specs.sliding),
        (specs.full, type(specs.sliding)(**shape, sliding_window=8)),
        (replace(specs.full, non_causal=True), specs.sliding),
        (specs.full, replace(specs.sliding, extra_retained_tokens=3) if served else specs.states),
    ):
        assert full.page_size_bytes == specs.full.page_size_bytes
        assert sliding.page_size_bytes == specs.full.page_size_bytes or not served
        assert compat.windows(config, groups(full, sliding)) is None
    of_this_engine_only = groups(specs.full, specs.sliding)
    of_this_engine_only.kv_cache_groups[1].enable_kv_transfer = False
    assert compat.windows(config, of_this_engine_only) is None
    config.speculative_config = SimpleNamespace(method="eagle3")
    assert compat.windows(config, groups(specs.full, specs.sliding)) is None
    config.speculative_config = SimpleNamespace(method="ngram")
    assert compat.windows(config, groups(specs.full, specs.sliding)) == ([0, 8] if served else None)
    states = make_cache((0, compat.STATE), 16)
    assert compat.windows(config, states) is None
    config.speculative_config = None
    assert compat.windows(config, states) == ([0, compat.STATE] if served else None)


def test_hashes_of_half_a_block_name_no_block(specs, model):
    """With ``--prefix-match-unit`` vLLM hashes several groups' tokens in smaller steps. The third hash of a prompt is
    then that of others, too, which have another third block. Only since 0.32 the cache itself says so."""
    from clockwork import make_config

    from kvbm.engines.vllm import compat, fingerprint

    config = make_config(model, {"cpu_cache_gb": 1})
    one, two = groups(specs.full), groups(specs.full, specs.sliding)
    if not hasattr(config.cache_config, "prefix_match_unit"):
        pytest.skip("this release has no such option")
    for unit, reused in ((None, True), (4, True), (2, False)):
        config.cache_config.prefix_match_unit = unit
        assert fingerprint.reuses_engine_hashes(config, one, False)  # of a single group vLLM hashes blocks in any case
        assert fingerprint.reuses_engine_hashes(config, two, False) is reused
        assert (compat.windows(config, two) is not None) is (reused and compat.fails_whole_requests())
        assert compat.hashed_tokens(config, SimpleNamespace(**vars(two), hash_block_size=2)) == 2


def test_groups_whose_blocks_vllm_clears_are_left_alone(specs, model):
    """It does so before a fence can hold it back. A single group's it does not clear, whatever is in there."""
    import torch
    from clockwork import make_config
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    from kvbm.engines.vllm import compat

    other = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=16, dtype=torch.float16)
    mixed = KVCacheConfig(
        num_blocks=16,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["a"], specs.sliding), KVCacheGroupSpec(["b"], other)],
    )
    assert other.page_size_bytes == specs.sliding.page_size_bytes
    if not compat.clears_blocks(mixed):
        pytest.skip("this release does not clear them")
    assert compat.windows(make_config(model, {"cpu_cache_gb": 1}), mixed) is None


def test_groups_whose_blocks_lie_in_the_same_memory_in_different_ways_are_refused_with_what_to_do(specs, model):
    """As in a layout where heads come before layers and one group has fewer layers than the other."""
    import torch
    from clockwork import make_config
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from kvbm.engines.vllm import compat
    from kvbm.vllm_integration.connector import DynamoConnector

    if not compat.fails_whole_requests():
        pytest.skip("with a connector this release makes one group of all layers")
    config = make_config(model, {"cpu_cache_override_num_blocks": 4})
    worker = DynamoConnector(config, KVConnectorRole.WORKER, groups(specs.full, specs.sliding))
    memory = torch.zeros(16, 2, 3, 4)
    with pytest.raises(ValueError, match=r"blocks differently.*unset VLLM_KV_CACHE_LAYOUT .* or add --disable-hybrid"):
        worker.register_kv_caches({"a": memory[:, :, 0], "b": memory.view(16, 3, 2, 4)[:, 0]})
    worker.shutdown()


def test_all_ranks_of_a_pipeline_have_one_name_for_their_cache(specs, model, monkeypatch):
    from clockwork import make_config

    from kvbm.engines.vllm import fingerprint

    config = make_config(model, {"cpu_cache_gb": 1})
    first, second = groups(specs.full, specs.sliding), groups(specs.full, specs.sliding)
    for group in second.kv_cache_groups:
        group.layer_names = ["layers of the second stage"]
    assert fingerprint.describe(config, first) == fingerprint.describe(config, second)
    apart = [groups(specs.full), groups(specs.sliding, specs.full), groups(specs.full, specs.sliding, specs.sliding)]
    names = {str(fingerprint.describe(config, cache)) for cache in (first, *apart)}
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "3,5")
    assert len(names | {str(fingerprint.describe(config, first))}) == 5


@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallelism_is_left_alone(name, specs, model, caplog):
    from clockwork import make_config
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from kvbm.vllm_integration.connector import DynamoConnector

    config = make_config(model, {"cpu_cache_gb": 1})
    setattr(config.parallel_config, name, 2)
    caplog.set_level(logging.WARNING, logger="kvbm")
    DynamoConnector(config, KVConnectorRole.SCHEDULER, groups(specs.full))
    assert f"{name} is 2" in caplog.text


def test_an_engine_in_which_not_all_ranks_take_part_runs_without_a_cache(specs, model, caplog):
    from clockwork import make_config, make_request
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from kvbm.plans import Hello, TierHello
    from kvbm.vllm_integration.connector import DynamoConnector
    from tiernames import HOST

    config = make_config(model, {"cpu_cache_gb": 1})
    config.parallel_config.world_size = 2
    connector = DynamoConnector(config, KVConnectorRole.SCHEDULER, groups(specs.full))
    caplog.set_level(logging.WARNING, logger="kvbm")
    connector._adapter.meet([Hello(1, 64, "", [TierHello(HOST, 8)])])
    assert "KVBM stays out of the way: workers of ranks [1] take part, expected 0 to 1" in caplog.text
    assert connector._adapter.leader is None
    assert connector.get_num_new_matched_tokens(make_request("r", TOKENS), 0) == (0, False)


# -- caches that outlive the engine -----------------------------------------------------------------------------------


@pytest.fixture
def describe(specs, model, tmp_path):
    """The fingerprint of an engine with these options, over a copy of the model that a test may change."""
    import shutil

    from clockwork import make_config

    from kvbm.engines.vllm import fingerprint

    folder = tmp_path / "model"
    shutil.copytree(model, folder)

    def make(change=lambda config, folder: None, **options):
        config = make_config(str(folder), {"cpu_cache_gb": 1}, **options)
        change(config, folder)
        return fingerprint.describe(config, groups(specs.full))

    return make


def test_the_same_engine_has_the_same_fingerprint_every_time(describe):
    assert describe() == describe()


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("block_size", lambda config: setattr(config.cache_config, "block_size", 8)),
        ("dtype", lambda config: setattr(config.cache_config, "cache_dtype", "fp8")),
        ("config", lambda config: setattr(config.model_config.hf_config, "rope_theta", 7)),
        ("tensor_parallel", lambda config: setattr(config.parallel_config, "tensor_parallel_size", 2)),
        ("attention", lambda config: setattr(config.attention_config, "backend", "another")),
        ("replica", lambda config: setattr(config.parallel_config, "data_parallel_rank", 1)),
        ("keys", lambda config: setattr(config.cache_config, "prefix_caching_hash_algo", "xxhash")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_whatever_changes_the_kv_changes_the_fingerprint(key, change, describe, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # without it older releases hash at random
    before, after = describe(), describe(lambda config, folder: change(config))
    assert {name for name in before if before[name] != after[name]} == {key}


@pytest.fixture
def multimodal(monkeypatch):
    from vllm.config import ModelConfig

    monkeypatch.setattr(ModelConfig, "is_multimodal_model", property(lambda config: True))


@pytest.mark.parametrize(
    "name", ["preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"]
)
def test_how_a_model_prepares_images_changes_the_fingerprint(name, describe, multimodal):
    """vLLM's hash of an image covers neither its normalisation nor its scaling."""
    texts = [None, '{"image_mean": [0.5]}', '{"image_mean": [0.6]}']

    def write(text):
        return lambda config, folder: None if text is None else (folder / name).write_text(text)

    found = [describe(write(text)) for text in texts]
    assert len({str(each) for each in found}) == 3
    assert {**found[1], "processing": ""} == {**found[2], "processing": ""}
    assert describe(write(texts[2])) == found[2]


def test_a_model_without_images_has_no_processor_to_compare(describe):
    before = describe()
    assert describe(lambda config, folder: (folder / "preprocessor_config.json").write_text("{}")) == before


def test_code_that_comes_with_a_model_changes_the_fingerprint(describe):
    def change(trusted, text):
        def write(config, folder):
            config.model_config.trust_remote_code = trusted
            (folder / "modeling_of_ours.py").write_text(text)

        return write

    assert describe(change(False, "a = 1")) == describe(change(False, "a = 2"))
    assert describe(change(True, "a = 1")) != describe(change(True, "a = 2"))


def test_a_processor_that_cannot_be_found_ends_with_the_engine(describe, multimodal, caplog):
    caplog.set_level(logging.WARNING, logger="kvbm")
    assert describe(lambda config, folder: setattr(config.model_config, "model", "nobody/knows-it")) is None
    assert "Persistence is off" in caplog.text


def test_a_cpu_for_which_vllm_packs_keys_otherwise_finds_nothing(describe, monkeypatch):
    import torch

    before = describe()["attention"]
    tiles = torch.cpu._is_amx_tile_supported()
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: not tiles)
    assert describe()["attention"] != before


def test_the_longest_prompt_counts_where_the_rope_depends_on_it(describe):
    """vLLM takes the long factors of such a rope, for short prompts too, when longer ones than it was trained on may
    come: the KV of the same tokens is another."""

    def length(config, folder):
        config.model_config.max_model_len //= 2

    def long_rope(config, folder):
        config.model_config.hf_config.rope_parameters = {"rope_type": "longrope"}

    def both(config, folder):
        long_rope(config, folder)
        length(config, folder)

    assert describe() == describe(length)
    assert describe(long_rope) != describe(both)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: object.__setattr__(c.cache_config, "calculate_kv_scales", True), "--calculate-kv-scales"),
    ],
)
def test_what_the_next_start_may_have_otherwise_is_no_cache_for_it(describe, caplog, change, reason):
    assert describe(lambda config, folder: change(config)) is None
    assert reason in caplog.text


def test_hashes_that_the_next_process_would_not_repeat_do_not_name_what_outlives_this_one(keys, monkeypatch):
    from kvbm.engines.vllm import compat

    monkeypatch.setattr(compat, "release", lambda: (0, 28))
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert keys("sha256").reuses_engine_hashes
    assert not keys("sha256", persistent=True).reuses_engine_hashes
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert keys("sha256", persistent=True).reuses_engine_hashes
