"""Settings of KVBM and of SGLang's server that change how the backend serves."""

from __future__ import annotations

import logging

from kvbm.config import DEFAULT, SETTINGS, Config

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


def awaits_prefetch() -> bool:
    """Whether SGLang delays a request for its pages. With the policy best_effort it starts the request with the pages
    that have come by then, so a slow load costs no time."""
    try:
        from sglang.srt.runtime_context import get_server_args

        return getattr(get_server_args(), "hicache_storage_prefetch_policy", "timeout") != "best_effort"
    except Exception:
        return True  # expect the costlier case
