"""Models whose layers keep a state beside attention, and what tests do to the blocks that KVBM holds of them."""

from __future__ import annotations

import ctypes
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

from random_models import GatedDelta, StateSpace, model_folder

__all__ = ["BLOCK", "GDN", "MAMBA", "STATES", "blank", "drop", "held", "model_folder", "tokens"]

BLOCK = 32
# vLLM's kernels for states on a CPU know bfloat16 only.
GDN = GatedDelta("gated-delta", 4, 128, 4, 4, 128, 256, 4096, "bfloat16", state_dim=64)
MAMBA = StateSpace("state-space", 4, 128, 4, 4, 256, 4096, "bfloat16")
# The groups whose layers keep a state; one more group has the attention.
STATES = {GDN.name: 3, MAMBA.name: 1}


def tokens(seed: int, count: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(100, 4096) for _ in range(count)]


def _keys(scenario, prompt: list[int], states: bool) -> list[bytes]:
    """Of a prompt's blocks in the groups that keep a state, or in the others."""
    from kvbm.core.keys import in_group
    from kvbm.engines.vllm.compat import STATE, windows

    adapter = scenario.adapter
    request = scenario._request("keys", prompt)
    kinds = windows(scenario.engine.vllm_config, adapter._kv_cache_config)
    wanted = [group for group, kind in enumerate(kinds) if (kind == STATE) is states]
    return [key for group in wanted for key in in_group(adapter._keys.of(request), group)]


def held(scenario, prompt: list[int], states: bool) -> int:
    """How many blocks of a prompt the host tier has: of states, or of KV."""
    pool = scenario.adapter.leader.manager.near
    return sum(key in pool for key in _keys(scenario, prompt, states))


def told_of(scenario, prompts: list[list[int]]) -> dict[int, list[int]]:
    """What events should tell of these prompts: the tokens of each block that the tier has for the layers that see all
    tokens, by the names that vLLM gives in events."""
    from kvbm.core.keys import in_group
    from kvbm.engines.vllm.compat import windows
    from kvbm.engines.vllm.feed import _external

    adapter, found = scenario.adapter, {}
    pool = adapter.leader.manager.near
    main = windows(scenario.engine.vllm_config, adapter._kv_cache_config).index(0)
    for prompt in prompts:
        keys = adapter._keys.of(scenario._request("told", prompt))
        for i, (key, name) in enumerate(zip(in_group(keys, main), _external(keys), strict=True)):
            if key in pool:
                found[name] = prompt[i * BLOCK : (i + 1) * BLOCK]
    return found


def blank(scenario, prompt: list[int], states: bool) -> int:
    """Fill a prompt's blocks in the host tier with zeros: the states, or the KV. Returns how many there were."""
    from kvbm.engines.vllm.worker import find_local

    slab = find_local(scenario.engine.vllm_config.kv_transfer_config.engine_id, 0)._rank._slab
    pool = scenario.adapter.leader.manager.near
    slots = [slot for key in _keys(scenario, prompt, states) if (slot := pool.find(key)) is not None]
    for slot in slots:
        ctypes.memset(slab.address + slot * slab.slot_bytes, 0, slab.slot_bytes)
    return len(slots)


def drop(scenario, prompt: list[int], states: bool) -> int:
    """Let the host tier lose a prompt's states, or its KV."""
    pool = scenario.adapter.leader.manager.near
    keys = [key for key in _keys(scenario, prompt, states) if key in pool]
    pool.drop(keys)
    return len(keys)
