"""PdConnector without an engine: which of its two children is asked, and told, what. With one: tests/dynamo."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

OURS = {"kv_connector": "DynamoConnector", "kv_connector_module_path": "kvbm.vllm_integration.connector"}
NIXL = {"kv_connector": "NixlConnector"}
UNAWARE = {"kv_connector": "FlexKVConnectorV1"}  # of groups


class Child:
    def __init__(self, tokens, outside=True, hello=None):
        self.tokens, self.outside, self.hello = tokens, outside, hello
        self.asked = self.met = None

    def get_num_new_matched_tokens(self, request, computed):
        self.asked = computed
        return self.tokens, self.outside

    def get_handshake_metadata(self):
        return self.hello

    def set_xfer_handshake_metadata_pp_aware(self, metadata):
        self.met = metadata


def connector(*children):
    from kvbm.vllm_integration.connector import PdConnector

    made = PdConnector.__new__(PdConnector)
    made._connectors = list(children)
    made._requests_to_connector = {}
    return made


def request(**params):
    return SimpleNamespace(request_id="r", kv_transfer_params=params or None)


def test_a_prefill_worker_asks_its_cache():
    cache, transport = Child(64, outside=False), Child(0)
    pd = connector(cache, transport)
    assert pd.get_num_new_matched_tokens(request(do_remote_decode=True), 32) == (64, False)
    assert pd._requests_to_connector == {"r": 0}
    assert cache.asked == 32
    assert transport.asked is None


def test_what_a_prefill_worker_has_computed_is_taken_from_there():
    """Were the cache asked first, a short hit of its own would leave the rest to be computed a second time."""
    cache, transport = Child(64), Child(400)
    pd = connector(cache, transport)
    assert pd.get_num_new_matched_tokens(request(do_remote_prefill=True), 0) == (400, True)
    assert pd._requests_to_connector == {"r": 1}
    assert cache.asked is None


def test_the_cache_is_told_of_blocks_that_the_transport_is_going_to_write():
    """Its copies may still be reading them, and the transport heeds no stream."""
    from kvbm.vllm_integration.connector import DynamoConnector

    class Cache(DynamoConnector):
        def __init__(self):
            self.told = []

        def others_write(self, blocks):
            self.told.append(blocks)

        def update_state_after_alloc(self, request, blocks, tokens):
            self.told.append(tokens)

    class Transport(Child):
        def update_state_after_alloc(self, request, blocks, tokens):
            self.asked = tokens

    blocks = SimpleNamespace(get_block_ids=lambda: ([4, 5, 6],))
    cache, transport = Cache(), Transport(400)
    pd = connector(cache, transport)
    pd.get_num_new_matched_tokens(request(do_remote_prefill=True), 0)
    pd.update_state_after_alloc(request(), blocks, 400)
    assert (cache.told, transport.asked) == ([[4, 5, 6], 0], 400)
    pd._requests_to_connector = {"r": 0}  # the cache's own load
    cache.told = []
    pd.update_state_after_alloc(request(), blocks, 96)
    assert (cache.told, transport.asked) == ([96], 0)


def test_a_miss_leaves_nothing_behind():
    pd = connector(Child(0), Child(0))
    pd._requests_to_connector["r"] = 0  # from before a preemption
    assert pd.get_num_new_matched_tokens(request(), 0) == (0, False)
    assert pd._requests_to_connector == {}
    assert connector(Child(None), Child(5)).get_num_new_matched_tokens(request(), 0) == (None, False)


def test_both_children_meet_their_workers():
    cache, transport = Child(0, hello="ours"), Child(0, hello="theirs")
    part = connector(cache, transport).get_handshake_metadata()
    assert (part.cache, part.transport) == ("ours", "theirs")
    leader = connector(cache, transport)
    leader.set_xfer_handshake_metadata({0: part, 1: part})
    assert cache.met == {(0, 0): "ours", (0, 1): "ours"}
    assert transport.met == {(0, 0): "theirs", (0, 1): "theirs"}


def test_a_cache_that_stays_out_of_the_way_meets_nobody():
    cache, transport = Child(0), Child(0, hello="theirs")
    pd = connector(cache, transport)
    pd.set_xfer_handshake_metadata({0: pd.get_handshake_metadata()})
    assert cache.met is None
    assert transport.met == {(0, 0): "theirs"}


@pytest.mark.parametrize(
    ("children", "complaint"),
    [
        (None, "expected a list of two connectors, got None"),
        ([OURS], "expected two connectors"),
        ([OURS, NIXL, NIXL], "expected two connectors"),
        ([NIXL, OURS], "the first connector is 'NixlConnector', expected one of DynamoConnector"),
        ([OURS, OURS], "the second connector is 'DynamoConnector', expected one of NixlConnector"),
        ([{"kv_connector": "DynamoConnector"}, NIXL], "has no kv_connector_module_path"),
        (["DynamoConnector", "NixlConnector"], "expected a list of two connectors"),
    ],
)
def test_children_that_do_not_fit_are_refused_with_a_hint(children, complaint):
    from kvbm.engines.vllm.pd import check_children

    with pytest.raises(ValueError, match=complaint) as refused:
        check_children(children)
    assert "kvbm.vllm_integration.connector" in str(refused.value)


def test_the_children_of_the_guide_are_accepted():
    from kvbm.engines.vllm.pd import check_children

    check_children([OURS, NIXL])
    check_children([{"kv_connector": "LMCacheConnectorV1"}, NIXL])


def test_the_hybrid_cache_manager_is_refused_with_the_option_to_set():
    from vllm.config import KVTransferConfig

    from kvbm.vllm_integration.connector import PdConnector

    transfer = KVTransferConfig(
        kv_connector="PdConnector",
        kv_connector_module_path="kvbm.vllm_integration.connector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": [{**child, "kv_role": "kv_both"} for child in (UNAWARE, NIXL)]},
    )
    config = SimpleNamespace(
        kv_transfer_config=transfer, scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False)
    )
    with pytest.raises(ValueError, match="--disable-hybrid-kv-cache-manager, on the prefill side and on the decode"):
        PdConnector(config, None, None)


def test_figures_of_our_child_reach_the_page():
    """vLLM rebuilds what each child reports by its class's name, and knows only its own classes."""
    from kvbm.vllm_integration.connector import PdConnector

    stats = PdConnector.build_kv_connector_stats({"DynamoConnector": {"kvbm_matched_tokens": {"": 5}}})
    assert stats["DynamoConnector"].data == {"kvbm_matched_tokens": {"": 5}}
    assert PdConnector.build_kv_connector_stats() is not None
