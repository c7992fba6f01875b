"""What vLLM's scheduler half shows of itself: who it is, and what became of each request, in KVBM's own words."""

from __future__ import annotations

from importlib import metadata
from typing import Any, NamedTuple

import kvbm
from kvbm.config import Config
from kvbm.core.cost import CostModel, Decision
from kvbm.core.manager import Match
from kvbm.observe.observer import settings_given
from kvbm.observe.requests import ON_DEVICE, SKIPPED, TOO_SHORT, Admission, looked_up, passed_over
from kvbm.observe.snapshot import Identity
from kvbm.plans import LoadPlan

__all__ = ["ON_DEVICE", "SKIPPED", "TOO_SHORT", "Lookup", "admission", "identity"]


class Lookup(NamedTuple):
    """What was looked up for a request, and what was decided."""

    computed_tokens: int
    outcome: str = ""  # when nothing was looked up
    limit: int = 0  # blocks that were asked for end here
    found: Match | None = None
    decision: Decision | None = None


def admission(request: Any, lookup: Lookup, plan: LoadPlan | None, block_size: int, cost: CostModel) -> Admission:
    """vLLM lets a request in, with this plan to load blocks for it."""
    found, decision = lookup.found, lookup.decision
    name, tokens, computed = request.request_id, request.num_tokens, lookup.computed_tokens
    if found is None or decision is None:
        return passed_over(name, tokens, computed, block_size, lookup.outcome)
    loaded = len(plan.blocks) if plan is not None else 0
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
