"""Weights that change in the memory of a running engine. vLLM does not tell connectors, so the workers report them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kvbm.engines.vllm import compat

logger = logging.getLogger("kvbm")


class WeightChanges:
    """``reset``: drops every block. ``switch_off``: is called with the error if that fails."""

    def __init__(self, reset: Callable[[], object], switch_off: Callable[[Exception], None]) -> None:
        self._reset = reset
        self._switch_off = switch_off
        self._heard: dict[int, int] = {}  # by rank
        self._stale: Any = None  # generation of vLLM's prefix cache at the last change: it holds KV of old weights

    def hear(self, rank: int, changes: int, block_pool: Any) -> None:
        """A rank has seen so many changes. Drop every block that was computed before the last of them."""
        if self._heard.get(rank, 0) >= changes:
            return
        if not self._heard:
            logger.warning(
                "The weights have changed in memory: KVBM forgets every block, and keeps nothing for the next engine"
            )
        try:
            self._reset()
        except Exception as error:
            self._switch_off(error)
            return
        self._stale = compat.prefix_cache_generation(block_pool)
        # Only now: a worker follows plans again as soon as it reads that the leader knows of the change.
        self._heard[rank] = changes

    def heard(self, ranks: int) -> list[int]:
        """For :attr:`kvbm.plans.StepPlan.changes_heard`."""
        return [self._heard.get(rank, 0) for rank in range(ranks)] if self._heard else []

    def has_stale_blocks(self, block_pool: Any) -> bool:
        """Whether vLLM's own prefix cache may hold blocks of old weights: it has not been reset since they changed, as
        far as can be seen."""
        if not self._heard:
            return False
        return self._stale is None or compat.prefix_cache_generation(block_pool) in (None, self._stale)
