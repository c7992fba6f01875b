"""Imported into an engine's process before the engine starts: adds the toy tier, and serves as its handle for tests."""

from __future__ import annotations

import toy_tier
import toy_tier.catalog
from kvbm.core.pool import Pool
from kvbm.tiers import registry

registry.register(toy_tier.TIER)

REGISTERED = True


def configure(scenario, **values) -> None:
    """What the server does from now on."""
    for name, value in values.items():
        setattr(toy_tier.SERVER, name, value)


def set_patience(scenario, seconds: float) -> None:
    """How long a lookup waits for the server's answer."""
    toy_tier.catalog.LOOKUP_SECONDS = seconds


def forget(scenario) -> None:
    """Nothing is near the engine any more, and the leader no longer knows what the server has."""
    catalogs = scenario.adapter.leader.manager.catalogs
    for catalog in catalogs.values():
        Pool.clear(catalog)
    assert scenario.reset()


def forget_near(scenario) -> None:
    """Nothing is near the engine any more."""
    Pool.clear(scenario.adapter.leader.manager.near)
    assert scenario.reset()


def state(scenario) -> dict:
    server, counts, name = toy_tier.SERVER, scenario.adapter.leader.counts, toy_tier.TIER.name
    return {
        "stored": len(server.blocks),
        "pending": server.pending_lookups,
        "loaded": counts.onboarded_blocks.get(name, 0),
        "moved": counts.moved_blocks.get(name, 0),
        "failed_loads": counts.failed_load_blocks,
        "failed_moves": counts.failed_move_blocks.get(name, 0),
    }


def hints(scenario) -> dict:
    """The hints that have reached the tier since the last call, and what became of all of them."""
    told, toy_tier.SERVER.hints = toy_tier.SERVER.hints, []
    return {"told": told, "counts": dict(scenario.adapter.leader.counts.hints)}


def add_hinted(scenario, request, tokens, envelope=None, params=None, max_tokens=8) -> None:
    """Hand a request with a hint to the engine, as a router or a client would. Where the envelope's payload has the
    number of a list of hashes, as ``{"block_hashes": 5}``, those of the first so many blocks take its place."""
    from vllm import SamplingParams
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    made = None
    if envelope is not None:
        for action in envelope["actions"]:
            payload = action["payload"]
            if isinstance(payload, dict) and isinstance(payload.get("block_hashes"), int):
                payload["block_hashes"] = block_hashes(scenario, tokens)[: payload["block_hashes"]]
        made = KvHintsEnvelope(**{**envelope, "actions": [KvHintAction(**action) for action in envelope["actions"]]})
    extra = None if params is None else {"kv_transfer_params": params}
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
    scenario.engine.add_request(request, {"prompt_token_ids": tokens}, sampling, kv_hints=made)


def block_hashes(scenario, tokens) -> list[int]:
    """As vLLM's events have them: the last eight bytes of each block's hash."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import hash_block_tokens

    size, parent, found = scenario.engine.vllm_config.cache_config.block_size, None, []
    for at in range(0, len(tokens) // size * size, size):
        parent = hash_block_tokens(sha256, parent, tokens[at : at + size], None)
        found.append(int.from_bytes(parent[-8:], "big"))
    return found
