"""What ``dynamo.vllm`` asks before it subscribes to block events."""

from __future__ import annotations

from typing import Any

from kvbm import config as settings
from kvbm.engines.vllm.feed import connector_config, consolidator_endpoints, is_wanted

__all__ = ["get_consolidator_endpoints", "get_consolidator_mode", "is_truthy", "should_enable_consolidator"]


def is_truthy(text: str) -> bool:
    """Any word but these is off, as upstream reads them; settings of ours refuse what they do not know."""
    return text.strip().lower() in ("1", "true", "on", "yes")


def get_consolidator_mode() -> str:
    return settings.load().kv_events_consolidator_mode


def should_enable_consolidator(vllm_config: Any) -> bool:
    return get_consolidator_endpoints(vllm_config) is not None


def get_consolidator_endpoints(vllm_config: Any) -> tuple[str, str, str] | None:
    """(where vLLM publishes, where the consolidator does, where to subscribe to it), or None to subscribe to vLLM.

    vLLM's own stream has the events of all tiers with their media, of every data-parallel rank on its own port. So
    KVBM starts the consolidator only on request, and only with one rank: Dynamo subscribes all ranks to one port.
    """
    ours = connector_config(vllm_config)
    if ours is None or not is_wanted(vllm_config) or vllm_config.parallel_config.data_parallel_size > 1:
        return None
    config = settings.load(extra=ours)
    if config.kv_events_enable_consolidator != "on":
        return None
    source, output = consolidator_endpoints(config, vllm_config)
    return source, output, output
