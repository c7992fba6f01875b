"""KVBM's part of vLLM's `--kv-transfer-config`. Imports no vLLM, so that the command line can use it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

MODULE, CLASS = "kvbm.vllm_integration.connector", "DynamoConnector"
MODULES = (MODULE, "dynamo.llm.vllm_integration.connector")  # the second is that of older guides
# Without the policy, vLLM ends a request with an error if its blocks cannot be loaded.
TRANSFER = {
    "kv_connector": CLASS, "kv_connector_module_path": MODULE, "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}  # fmt: skip
EXAMPLE = json.dumps(TRANSFER)
OPTION = "--kv-transfer-config"
_CONTAINERS = ("PdConnector", "MultiConnector")


def children_of(transfer: dict[str, Any]) -> list[Any]:
    extra = transfer.get("kv_connector_extra_config")
    children = extra.get("connectors") if isinstance(extra, dict) else None
    return children if isinstance(children, list) else []


def our_part(transfer: object) -> dict[str, Any]:
    """KVBM's part: all of it, or the child of a PdConnector or a MultiConnector that names KVBM, else its first
    child, or nothing."""
    if not isinstance(transfer, dict):
        return {}
    if transfer.get("kv_connector") not in _CONTAINERS:
        return transfer
    parts = [part for child in children_of(transfer) if (part := our_part(child))]
    return next((part for part in parts if part.get("kv_connector") == CLASS), parts[0] if parts else {})


def extra_config(text: str) -> dict[str, Any]:
    """KVBM's kv_connector_extra_config in the JSON of the option; empty if there is none or the JSON is wrong."""
    with contextlib.suppress(ValueError):
        extra = our_part(json.loads(text)).get("kv_connector_extra_config")
        return extra if isinstance(extra, dict) else {}
    return {}


def on_command_line(argv: Sequence[str]) -> str | None:
    """The JSON of the option; None if the command line has no such option, or has it in another form."""
    for at, word in enumerate(argv):
        name, sign, _ = word.replace("_", "-", 3).partition("=")
        if name == OPTION:
            return word.partition("=")[2] if sign else next(iter(argv[at + 1 : at + 2]), None)
    return None
