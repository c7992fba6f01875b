"""Settings of KVBM and of SGLang's server that change how the backend serves."""

from __future__ import annotations

import logging
from math import inf
from typing import Any, NamedTuple

from kvbm.config import DEFAULT, SETTINGS, Config
from kvbm.engines.model_files import hidden_size_of

logger = logging.getLogger("kvbm")

# Settings that only other engines read. SGLang copies between the GPU and host memory itself. Its backend has no worker
# in another process and sends no block events.
UNUSED = frozenset(
    (
        "host_persist", "host_persist_dir", "disable_numa", "onboard", "offload_decode", "staging_mb", "stores", "pack",
        "fast_prompts", "host_offload_prefix_min_priority", "max_concurrent_transfers", "max_transfer_batch_size",
        "leader_zmq_host", "leader_zmq_pub_port", "leader_zmq_ack_port", "leader_worker_init_timeout_secs",
        "kv_events_enable_consolidator", "kv_events_consolidator_mode", "trtllm_zmq_port", "nccl_mla_mode",
        "nccl_max_ctas",
    )
)  # fmt: skip


def is_given(config: Config, key: str) -> bool:
    """Whether a setting was set, and is not the default of itself."""
    return config.sources[key] != DEFAULT


def warn_of_unused(config: Config) -> None:
    """One warning that names every setting that is set and has no effect under SGLang."""
    given = [row.env for row in SETTINGS if row.key in UNUSED and is_given(config, row.key)]
    if given:
        logger.warning("Settings without effect under SGLang: %s. Remove them.", ", ".join(given))


class Prefetch(NamedTuple):
    """How long SGLang delays a request for pages that it has asked for."""

    # False with the policy best_effort: SGLang starts a request with the pages that have come by then, so a slow load
    # costs no time.
    is_awaited: bool = True
    base_seconds: float = inf  # the limit, and
    token_seconds: float = 0.0  # what is added to it for each token

    def limit_seconds(self, tokens: int) -> float:
        return self.base_seconds + tokens * self.token_seconds


NO_LIMIT = Prefetch()


def read_prefetch() -> Prefetch:
    """From the server's arguments. Where they cannot be read: requests wait, without a limit."""
    try:
        arguments = _arguments()
        policy = getattr(arguments, "hicache_storage_prefetch_policy", "timeout")
        if policy != "timeout":
            return Prefetch(policy != "best_effort")
        from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

        given = arguments.hicache_storage_backend_extra_config
        _, _, base, thousand, _ = HybridCacheController.parse_storage_backend_extra_config(given)
        return Prefetch(True, base, thousand / 1024)
    except Exception:
        logger.debug("SGLang's prefetch policy could not be read", exc_info=True)
        return NO_LIMIT


def read_hidden_size() -> int | None:
    """Of the model, from its config.json; None: unknown."""
    try:
        arguments = _arguments()
        return hidden_size_of(arguments.model_path, getattr(arguments, "revision", None))
    except Exception:
        logger.debug("the hidden size of the model could not be read", exc_info=True)
        return None


def _arguments() -> Any:
    from sglang.srt.runtime_context import get_server_args

    return get_server_args()
