"""Checks of the JSON of vLLM's --kv-transfer-config."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from kvbm.config import SETTINGS
from kvbm.config.kinds import closest
from kvbm.doctor.base import Examination
from kvbm.engines.vllm.transfer_config import CLASS, EXAMPLE, MODULE, MODULES, children_of, our_part
from kvbm.observe.findings import bad, good, note
from kvbm.observe.snapshot import Finding

# The fields of vLLM's KVTransferConfig. vLLM refuses any other, with an error that names none of them.
FIELDS = frozenset({
    "enable_permute_local_kv", "engine_id", "kv_buffer_device", "kv_buffer_size", "kv_connector",
    "kv_connector_extra_config", "kv_connector_module_path", "kv_ip", "kv_load_failure_policy", "kv_parallel_size",
    "kv_port", "kv_rank", "kv_role",
})  # fmt: skip
_NUMBERS = ("kv_buffer_size", "kv_parallel_size", "kv_port", "kv_rank")
POLICIES = ("recompute", "fail")
_OURS = {name for row in SETTINGS for name in (row.key, row.env)}
_EXTRA = "kv_connector_extra_config"


class Connector:
    name = "connector"

    def run(self, case: Examination) -> Iterator[Finding]:
        if case.transfer is None:
            return
        try:
            config: Any = json.loads(case.transfer)
        except ValueError as error:
            quotes = " It has typographic quotes." if re.search("[“”‘’„]", case.transfer) else ""
            yield bad(
                "transfer-json", f"--kv-transfer-config is not JSON: {error}.{quotes}", f"For example '{EXAMPLE}'"
            )
            return
        if not isinstance(config, dict):
            yield bad("transfer-json", "--kv-transfer-config is not a JSON object.", f"For example '{EXAMPLE}'")
            return
        found = [*_names(config), *_fields(config), *_policy(config)]
        yield from found
        if not found:
            yield good("connector", "--kv-transfer-config names KVBM correctly.")


def _names(config: dict[str, Any]) -> Iterator[Finding]:
    ours = our_part(config)
    if config.get("kv_connector") == "MultiConnector" and ours.get("kv_connector") == CLASS:
        yield bad(
            "multi-connector",
            "KVBM is a child of MultiConnector, which does not tell it which blocks another connector fills: KVBM "
            "could store a block while it changes.",
            f'Set "kv_connector": "PdConnector" and "kv_connector_module_path": "{MODULE}", with KVBM first and the '
            'NixlConnector second in "connectors".',
        )
        return
    named = [(ours, "kv_connector", (CLASS,)), (ours, "kv_connector_module_path", MODULES)]
    if ours is not config:  # a PdConnector, which is KVBM's too
        named.append((config, "kv_connector_module_path", MODULES))
    for part, key, accepted in named:
        if part.get(key) not in accepted:
            where = "" if part is config else " of PdConnector's first connector"
            yield bad("connector-name", f'"{key}"{where} is {part.get(key)!r}.', f'Set "{key}": "{accepted[0]}".')
    children = children_of(config)
    if ours is not config and ours and (len(children) != 2 or children[0] is not ours):
        kinds = ", ".join(str(child.get("kv_connector")) if isinstance(child, dict) else "?" for child in children)
        yield bad(
            "connector-order",
            f"PdConnector has the connectors {kinds}; it takes two, KVBM's cache first and the transport second.",
            f'Set "connectors": [{{"kv_connector": "{CLASS}", ...}}, {{"kv_connector": "NixlConnector", ...}}].',
        )
    if config.get("kv_role") != "kv_both":
        yield bad("connector-role", f'"kv_role" is {config.get("kv_role")!r}.', 'Set "kv_role": "kv_both".')


def _fields(config: dict[str, Any]) -> Iterator[Finding]:
    """Names that vLLM does not know, and settings in a place where KVBM does not read them."""
    extra = config.get(_EXTRA)
    if extra is not None and not isinstance(extra, dict):
        yield bad(
            "transfer-field", f'"{_EXTRA}" is {extra!r}.', f'It takes an object: "{_EXTRA}": {{"cpu_cache_gb": 20}}'
        )
    ours = our_part(config)
    for part in (config,) if ours is config else (config, ours):
        for name in part:
            if name in _NUMBERS and not isinstance(part[name], (int, float)):
                text = f'"{name}" is {part[name]!r}, and vLLM takes a number.'
                yield bad("transfer-field", text, "Correct or remove it.")
            if name in FIELDS:
                continue
            if name in _OURS:
                cure = f'Move it: "{_EXTRA}": {{"{name}": {json.dumps(part[name])}}}'
                yield bad("setting-outside-extra", f'"{name}" is a setting of KVBM outside "{_EXTRA}".', cure)
            else:
                near = closest(name, FIELDS)
                cure = f'Did you mean "{near}"?' if near else f"It takes {', '.join(sorted(FIELDS))}."
                if isinstance(part[name], dict) and "kv_connector" in part[name]:
                    cure = f'Leave out "{name}" and give the object in it.'
                yield bad("transfer-field", f'vLLM does not know "{name}" and refuses to start.', cure)
    own = ours.get(_EXTRA)
    for name in sorted(FIELDS & own.keys() if isinstance(own, dict) else ()):
        yield bad(
            "transfer-field",
            f'"{name}" stands in "{_EXTRA}", where vLLM does not read it.',
            f'Move it out, beside "{_EXTRA}".',
        )
    if ours is not config and isinstance(extra, dict):
        for name in sorted(_OURS & extra.keys()):
            yield bad(
                "setting-outside-extra",
                f'"{name}" stands in the "{_EXTRA}" of PdConnector, where KVBM does not read it.',
                f'Move it into the "{_EXTRA}" of its first connector.',
            )


def _policy(config: dict[str, Any]) -> Iterator[Finding]:
    key = "kv_load_failure_policy"
    policy = config.get(key)
    cure = f'Set "{key}": "recompute": the engine then recomputes the missing blocks.'
    if policy is not None and policy not in POLICIES:
        yield bad("failure-policy", f'"{key}" is {policy!r}, and vLLM accepts {" or ".join(POLICIES)} only.', cure)
    elif policy != "recompute":
        shown = repr(policy) if policy else "not set, which means fail"
        yield note("failure-policy", f'"{key}" is {shown}: a failed load ends its request with an error.', cure)
