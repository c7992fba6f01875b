"""What ``dynamo.trtllm`` asks before it publishes block events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbm import config as settings
from kvbm.events import launch

__all__ = ["get_consolidator_endpoints", "should_enable_consolidator"]

MODULES = ("kvbm.", "dynamo.llm.trtllm_integration.")  # of our connector: today's and that of older guides


def should_enable_consolidator(arg_map: Mapping[str, Any]) -> bool:
    """Whether TensorRT-LLM's events go through our consolidator: it has to be told on which port they come."""
    config = settings.load()
    if config.kv_events_enable_consolidator == "off" or config.trtllm_zmq_port is None:
        return False
    connector = _get(arg_map.get("kv_connector_config"), "connector_module") or ""
    reuse = _get(arg_map.get("kv_cache_config"), "enable_block_reuse")
    return connector.startswith(MODULES) and reuse is not False


def get_consolidator_endpoints() -> tuple[str, str, str]:
    """(where TensorRT-LLM's events come from, where the consolidator publishes, where to subscribe to it)"""
    config = settings.load()
    if config.trtllm_zmq_port is None:
        raise ValueError(
            "DYN_KVBM_TRTLLM_ZMQ_PORT is not set: it is the port of TensorRT-LLM's block events, for example 20081"
        )
    output = launch.output_endpoint(config)
    return f"tcp://127.0.0.1:{config.trtllm_zmq_port}", output, output


def _get(thing: Any, name: str) -> Any:
    return thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)
