"""vLLM's services: block events go out in vLLM's own stream."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

from kvbm.config import Config
from kvbm.core.keys import Key
from kvbm.engines import services
from kvbm.engines.session import Session
from kvbm.engines.vllm import compat, feed
from kvbm.engines.vllm.groups import Groups
from kvbm.events import launch

logger = logging.getLogger("kvbm")


class Services(services.Services):
    """Called from vLLM's scheduler thread."""

    def start(
        self,
        config: Config,
        vllm_config: Any,
        kv_cache_config: Any,
        session: Session,
        groups: Groups,
        hashes: str,
        engine_blocks: Callable[[], tuple[int, int]],
    ) -> None:
        """The leader has begun. ``engine_blocks``: (all, free) of vLLM's own cache."""
        assert session.leader is not None
        parallel, model, size = (
            vllm_config.parallel_config,
            vllm_config.model_config,
            vllm_config.cache_config.block_size,
        )
        if feed.is_wanted(vllm_config) and groups.announced is None:
            logger.warning(
                "KV events do not tell what KVBM holds: a prefix of this model may lack a state or a window although "
                "all other blocks are there"
            )
        elif feed.is_wanted(vllm_config) and compat.hashed_tokens(vllm_config, kv_cache_config) == size:
            catalogs = session.leader.manager.catalogs
            self._feed = feed.EventFeed(catalogs, size, kv_cache_config, groups)
            if config.kv_events_enable_consolidator == "on":
                source, _ = feed.consolidator_endpoints(config, vllm_config)
                rank, count = parallel.data_parallel_index, self._faults.count
                self._consolidator = launch.start(config, [source], rank, count=count)
        name = str(getattr(model, "served_model_name", None) or model.model)
        engine = vllm_config.kv_transfer_config.engine_id
        replica = getattr(parallel, "data_parallel_rank_local", None) or 0
        version, blocks = metadata.version("vllm"), kv_cache_config.num_blocks
        device = "CPU" if compat.is_on_cpu() else "GPU"
        session.show("vllm", version, name, blocks, hashes, f"engine {engine}", replica, device)
        self._start_control(config, session, engine, name, replica, engine_blocks)

    def describe(self, request: Any, keys: Sequence[Key], first: int, end: int) -> None:
        """Describe blocks for events, once they are on their way: blocks that no tier is about to have need none."""
        if self._feed is not None:
            self._with_feed("describing blocks", self._feed.follow, request, keys, first, end)

    def take_events(self, block_pool: Any) -> list[Any]:
        """The changes of the tiers' blocks, for vLLM to publish."""
        if self._feed is None:
            return []
        return self._with_feed("telling of blocks", self._feed.take, block_pool) or []

    def withdraw_events(self) -> None:
        """No block can be found any more."""
        if self._feed is not None:
            self._feed.ledger.withdraw()

    @property
    def owes_events(self) -> bool:
        return self._feed is not None and self._feed.ledger.owed
