"""Our tiers' blocks in vLLM's own stream of KV cache events, beside those of its GPU cache.

vLLM numbers, publishes and replays them; with data parallelism every rank has its own stream. A slow or dead subscriber
is vLLM's publisher's business, which sends from a thread of its own over a socket that drops rather than waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from vllm import envs
from vllm.distributed import kv_events

from kvbm.config import Config
from kvbm.core.catalog import Catalog
from kvbm.core.keys import Key
from kvbm.engines.vllm import compat
from kvbm.engines.vllm.groups import Groups
from kvbm.events import launch
from kvbm.events.ledger import Ledger, Name, Run, Stored
from kvbm.plans import TierName
from kvbm.tiers.registry import TIERS


def is_wanted(vllm_config: Any) -> bool:
    """Whether vLLM publishes events at all."""
    config = vllm_config.kv_events_config
    published = config is not None and config.enable_kv_cache_events and config.publisher != "null"
    return bool(published and vllm_config.cache_config.enable_prefix_caching)


def connector_config(vllm_config: Any) -> dict[str, Any] | None:
    """The kv_connector_extra_config of our connector, alone or as a child of another; None where it is not used."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return None
    extra = transfer.kv_connector_extra_config or {}
    if transfer.kv_connector == "DynamoConnector":
        return dict(extra)
    for child in extra.get("connectors", ()):
        if isinstance(child, dict) and child.get("kv_connector") == "DynamoConnector":
            return dict(child.get("kv_connector_extra_config") or {})
    return None


def consolidator_endpoints(config: Config, vllm_config: Any) -> tuple[str, str]:
    """(where this rank's vLLM publishes, where its consolidator does)"""
    rank = vllm_config.parallel_config.data_parallel_index
    source = kv_events.ZmqEventPublisher.offset_endpoint_port(vllm_config.kv_events_config.endpoint, rank)
    return source.replace("*", "127.0.0.1"), launch.output_endpoint(config, rank)


class EventFeed:
    """Called from vLLM's scheduler thread. ``groups``: tells of blocks of the group that they announce."""

    def __init__(
        self, pools: Mapping[TierName, Catalog], block_size: int, kv_cache_config: Any, groups: Groups
    ) -> None:
        assert groups.announced is not None
        self._block_size = block_size
        self._groups = groups
        self._group = compat.event_group(kv_cache_config, groups.announced)
        self.ledger = Ledger(pools, block_size)
        self._engine_events: Any = None  # the list that vLLM collects its own events in until it next takes them

    def follow(self, request: Any, keys: Sequence[Key], first: int, end: int) -> None:
        """Some tier may now have, or be about to have, blocks ``first`` to ``end`` of a request."""
        ledger, size = self.ledger, self._block_size
        told = self._groups.announced_keys(keys[first:end])
        for at, until in ledger.undescribed(told, 0, len(told)):
            run_keys, start, stop = tuple(told[at:until]), first + at, first + until
            # vLLM's own hashes, even where KVBM has other keys: subscribers follow a prefix across tiers by them.
            names = tuple(request.block_hashes[start:stop])
            parent = request.block_hashes[start - 1] if start else None
            tokens = list(request.all_token_ids[start * size : stop * size])
            lora = getattr(request, "lora_request", None)
            about = (lora.adapter_id, lora.name) if lora else (None, None)
            each = compat.event_extra_keys(request, start, stop, size)
            ledger.describe(Run(run_keys, run_keys if names == run_keys else names, parent, tokens, about, each))

    def take(self, block_pool: Any) -> list[Any]:
        if self._engine_was_reset(block_pool):
            self.ledger.subscribers_forgot()
        return [self._translate(event) for event in self.ledger.take()] if self.ledger.owed else []

    def _translate(self, event: Any) -> Any:
        names = _external(event.names)
        if not isinstance(event, Stored):
            medium, group = TIERS[event.tier].medium, self._groups.announced
            return kv_events.BlockRemoved(block_hashes=names, medium=medium, group_idx=group)
        lora_id, lora_name = event.about
        return kv_events.BlockStored(
            block_hashes=names,
            parent_block_hash=None if event.parent is None else _external([event.parent])[0],
            token_ids=event.tokens,
            block_size=self._block_size,
            lora_id=lora_id,
            medium=TIERS[event.tier].medium,
            lora_name=lora_name,
            extra_keys=None if event.each is None else list(event.each),
            **self._group,
        )

    def _engine_was_reset(self, block_pool: Any) -> bool:
        """vLLM says "all blocks cleared" when its GPU cache is reset, and subscribers forget our blocks with it."""
        taken, self._engine_events = self._engine_events, getattr(block_pool, "kv_event_queue", None)
        return bool(taken) and kv_events.AllBlocksCleared in map(type, taken)

    def close(self) -> None:
        """Stop recording events: vLLM takes no more."""
        self.ledger.stop()


def _external(names: Sequence[Name]) -> list[Any]:
    """As vLLM writes block hashes into its events: whole, or the last 64 bits as a number."""
    if not envs.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES:
        return list(names)
    joined = b"".join(names)
    if len(joined) == 32 * len(names):
        return np.frombuffer(joined, ">u8")[3::4].tolist()  # type: ignore[no-any-return]
    return [int.from_bytes(name[-8:], "big") for name in names]
