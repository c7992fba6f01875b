"""What vLLM's scheduler half shows of itself: who it is, and what became of each request, in KVBM's own words."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib import metadata
from typing import Any, NamedTuple

import kvbm
from kvbm.config import Config
from kvbm.core.catalog import Catalog
from kvbm.core.cost import CostModel, Decision
from kvbm.core.manager import Match
from kvbm.observe.observer import settings_given
from kvbm.observe.requests import ON_DEVICE, SKIPPED, TOO_SHORT, Admission, looked_up, passed_over
from kvbm.observe.snapshot import Identity
from kvbm.plans import TierName

__all__ = ["ON_DEVICE", "SKIPPED", "TOO_SHORT", "Lookup", "admission", "identity", "say_ready"]

logger = logging.getLogger("kvbm")


class Lookup(NamedTuple):
    """What was looked up for a request, and what was decided."""

    computed_tokens: int
    outcome: str = ""  # when nothing was looked up
    limit: int = 0  # blocks that were asked for end here
    found: Match | None = None
    decision: Decision | None = None


def admission(request: Any, lookup: Lookup, loaded: int, block_size: int, cost: CostModel) -> Admission:
    """vLLM lets a request in, of which so many blocks are to be loaded."""
    found, decision = lookup.found, lookup.decision
    name, tokens, computed = request.request_id, request.num_tokens, lookup.computed_tokens
    if found is None or decision is None:
        return passed_over(name, tokens, computed, block_size, lookup.outcome)
    return looked_up(name, tokens, computed, lookup.limit, found, loaded, block_size)._replace(
        why=decision.reason if found.runs else "",
        in_step=decision.in_step,
        compute_seconds=cost.prefill_seconds(computed, loaded * block_size),
        expected_seconds=decision.seconds,
        recompute_seconds=decision.recompute_seconds,
    )


def identity(vllm_config: Any, config: Config, ranks: int, block_bytes: int, engine_blocks: int) -> Identity:
    model = vllm_config.model_config
    return Identity(
        kvbm=kvbm.__version__,
        engine="vllm",
        engine_version=metadata.version("vllm"),
        model=str(getattr(model, "served_model_name", None) or model.model),
        ranks=ranks,
        block_tokens=vllm_config.cache_config.block_size,
        block_bytes=block_bytes,
        engine_blocks=engine_blocks,
        settings=settings_given(config),
    )


def say_ready(
    about: Identity, catalogs: Mapping[TierName, Catalog], has_host_tier: bool, shared: bool, hashes: str
) -> None:
    """``shared``: ranks with the same KV keep it once. ``hashes``: whose, in words."""
    sizes = {name: catalog.size for name, catalog in catalogs.items()}
    host = next(iter(sizes.values()))
    logger.info(
        "KVBM is ready: %s of %d tokens (%.2f GB over %d rank%s%s), keys from %s",
        " and ".join(f"{size} {name} blocks" for name, size in sizes.items()), about.block_tokens,
        sum(sizes.values()) * about.block_bytes / 1e9,
        about.ranks, "" if about.ranks == 1 else "s", ", which keep their common KV once" if shared else "", hashes,
    )  # fmt: skip
    if not has_host_tier:
        logger.warning(
            "There is no host tier, and blocks go to disk through %d host blocks. This is experimental: what the "
            "disk cannot take at once is not kept. KVBM_DISK_BOUNCE_MB gives it more room.",
            host,
        )
    elif host < about.engine_blocks:
        engine_gb = about.engine_blocks * about.block_bytes / 1e9
        logger.warning(
            "The host tier (%.2f GB, %d blocks) is smaller than vLLM's own cache (%.2f GB, %d blocks): everything "
            "is offloaded as it is computed, so it will rarely hold what vLLM has dropped. "
            "Set DYN_KVBM_CPU_CACHE_GB to at least %.2f.",
            host * about.block_bytes / 1e9, host, engine_gb, about.engine_blocks, engine_gb,
        )  # fmt: skip
