"""``PdConnector``: KVBM's cache beside vLLM's transport between prefill and decode workers.

Two children. The first is the cache: a prompt whose beginning it holds is brought back instead of computed. The second
is the transport (NIXL): it hands the blocks of a prefill worker to a decode worker. Both work on the same blocks: the
transport reads them where they are, the cache copies them out, and neither frees blocks that the other still needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector, MultiKVConnectorMetadata

from kvbm.engines.vllm.connector import DynamoConnector

CACHES = ("DynamoConnector", "LMCacheConnectorV1", "FlexKVConnectorV1")
TRANSPORTS = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")
_CACHE, _TRANSPORT = 0, 1

_EXAMPLE = (
    '"kv_connector_extra_config": {"connectors": ['
    '{"kv_connector": "DynamoConnector", "kv_connector_module_path": "kvbm.vllm_integration.connector", '
    '"kv_role": "kv_both"}, {"kv_connector": "NixlConnector", "kv_role": "kv_both"}]}'
)

PdConnectorMetadata = MultiKVConnectorMetadata


@dataclass
class PdHandshake(KVConnectorHandshakeMetadata):
    """The descriptions that the workers of both children give of themselves at start."""

    cache: KVConnectorHandshakeMetadata | None
    transport: KVConnectorHandshakeMetadata | None


class PdConnector(MultiConnector):
    """Configure it with ``kv_connector_module_path="kvbm.vllm_integration.connector"`` and its two children."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        check_children((vllm_config.kv_transfer_config.kv_connector_extra_config or {}).get("connectors"))
        _check_groups(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)

    # -- scheduler ----------------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """The cache first. But a prompt that a prefill worker has computed comes from that worker as a whole."""
        params = request.kv_transfer_params or {}
        order = (_TRANSPORT, _CACHE) if params.get("do_remote_prefill") else (_CACHE, _TRANSPORT)
        for index in order:
            tokens, outside = self._connectors[index].get_num_new_matched_tokens(request, num_computed_tokens)
            if tokens is None:
                return None, False
            if tokens:
                self._requests_to_connector[request.request_id] = index
                return tokens, outside
        self._requests_to_connector.pop(request.request_id, None)
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The transport writes to these blocks at any time, and stores of the cache may still read them."""
        cache = self._connectors[_CACHE]
        chosen = self._requests_to_connector.get(request.request_id)
        if num_external_tokens and chosen == _TRANSPORT and isinstance(cache, DynamoConnector):
            cache.others_write([block for table in blocks.get_block_ids() for block in table])
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        for index, name in ((_CACHE, "cache"), (_TRANSPORT, "transport")):
            parts = {rank: getattr(part, name) for rank, part in metadata.items()}
            if any(part is not None for part in parts.values()):
                self._connectors[index].set_xfer_handshake_metadata_pp_aware(parts)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): part for rank, part in metadata.items()})

    # -- worker -------------------------------------------------------------------------------------------------------

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Of both children: vLLM's own wrapper returns only the first."""
        return PdHandshake(*[child.get_handshake_metadata() for child in self._connectors])

    # -- both ---------------------------------------------------------------------------------------------------------

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """vLLM looks children up in its own list of connectors, which ours is not in."""
        ours = DynamoConnector.__name__
        if data and isinstance(data.get(ours), dict):
            data = {**data, ours: DynamoConnector.build_kv_connector_stats(data[ours])}
        return super().build_kv_connector_stats(data)


def check_children(children: Any) -> None:
    """Raise ValueError, and say how it should look, unless there is a cache and a transport."""
    if not isinstance(children, list) or not all(isinstance(child, dict) for child in children):
        raise ValueError(f"PdConnector: expected a list of two connectors, got {children!r}. Use {_EXAMPLE}")
    names = [child.get("kv_connector") for child in children]
    if len(names) != 2:
        raise ValueError(f"PdConnector: expected two connectors, a cache and a transport, got {names}. Use {_EXAMPLE}")
    for name, accepted, place in ((names[0], CACHES, "first"), (names[1], TRANSPORTS, "second")):
        if name not in accepted:
            raise ValueError(
                f"PdConnector: the {place} connector is {name!r}, expected one of {', '.join(accepted)}. Use {_EXAMPLE}"
            )
    if names[0] == DynamoConnector.__name__ and not children[0].get("kv_connector_module_path"):
        raise ValueError(
            "PdConnector: its DynamoConnector has no kv_connector_module_path, so vLLM will not find it; add "
            '"kv_connector_module_path": "kvbm.vllm_integration.connector"'
        )


def _check_groups(vllm_config: Any) -> None:
    """vLLM's wrapper refuses its hybrid KV cache manager unless all children know it; and both sides must agree."""
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        return
    if not MultiConnector.all_children_support_hma(vllm_config.kv_transfer_config):
        raise ValueError(
            "PdConnector: one of its connectors does not know vLLM's hybrid KV cache manager; add "
            "--disable-hybrid-kv-cache-manager, on the prefill side and on the decode side"
        )
