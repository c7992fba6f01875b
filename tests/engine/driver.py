"""Runs a real vLLM on the CPU through a list of operations and prints what happened as one JSON line.

    python driver.py '{"engine": {...}, "kvbm": {...} or null, "steps": [...]}'

Every scenario gets a process of its own: engines do not share memory, threads or environment, and one that hangs can be
killed. Steps: ``generate`` (prompts as token ids, greedy), ``reset`` (vLLM's prefix cache, optionally ours too),
``abort`` (start requests and abort them while they load), ``metrics``.
"""

from __future__ import annotations

import json
import os
import sys
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

MARK = "RESULT "


def make_engine(engine: dict, kvbm: dict | None):
    from vllm import LLM

    arguments = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "block_size": 32,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "seed": 0,
        **engine,
    }
    if kvbm is not None:
        from vllm.config import KVTransferConfig

        policy = kvbm.pop("kv_load_failure_policy", "recompute")
        arguments["kv_transfer_config"] = KVTransferConfig(
            kv_connector="DynamoConnector",
            kv_connector_module_path="kvbm.vllm_integration.connector",
            kv_role="kv_both",
            kv_load_failure_policy=policy,
            kv_connector_extra_config=kvbm,
        )
    return LLM(**arguments)


def generate(llm, step: dict) -> dict:
    from vllm import SamplingParams

    prompts = []
    for tokens in step["prompts"]:
        prompt = {"prompt_token_ids": tokens}
        if step.get("cache_salt") is not None:
            prompt["cache_salt"] = step["cache_salt"]
        prompts.append(prompt)
    params = SamplingParams(temperature=0, max_tokens=step.get("max_tokens", 16), ignore_eos=True)
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "finish": [output.outputs[0].finish_reason for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
        "seconds": time.perf_counter() - began,
    }


def abort(llm, step: dict) -> dict:
    """Add requests, let the engine take a step or two so that their loads begin, then abort them."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    names = [f"doomed-{i}" for i in range(len(step["prompts"]))]
    for name, tokens in zip(names, step["prompts"], strict=True):
        engine.add_request(name, {"prompt_token_ids": tokens}, params)
    for _ in range(step.get("steps", 1)):
        engine.step()
    try:
        engine.abort_request(names)
    except TypeError:
        engine.abort_request(names, internal=False)
    for _ in range(50):
        if not engine.has_unfinished_requests():
            break
        engine.step()
    return {"left": engine.has_unfinished_requests()}


def metrics(llm) -> dict:
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        if hasattr(metric, "value") and metric.name.startswith(("kvbm_", "vllm:")):
            found[metric.name] = found.get(metric.name, 0) + metric.value
    return found


def scheduler_state(llm) -> dict:
    """What the leader holds, for tests that run in one process."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    half = scheduler.connector._half
    if half is None or half.leader is None:
        return {"bypassed": True}
    from kvbm.plans import Tier

    leader = half.leader
    pool = leader.manager.pools[Tier.HOST]
    return {
        "published": pool.published,
        "pinned": pool.pinned,
        "writing": pool.writing,
        "evictions": pool.evictions,
        "busy": leader.busy,
        "requests": len(half._requests),
        "faults": dict(scheduler.connector._faults.counts),
        "failed_load_blocks": leader.counts.failed_load_blocks,
        "failed_store_blocks": leader.counts.failed_store_blocks,
        "tainted_store_blocks": leader.counts.tainted_store_blocks,
        "onboarded": sum(leader.counts.onboarded_blocks.values()),
        "offloaded": leader.counts.offloaded_blocks,
        "engine_hashes": half._keys.reuses_engine_hashes,
    }


def main() -> None:
    scenario = json.loads(sys.argv[1])
    llm = make_engine(scenario["engine"], scenario.get("kvbm"))
    results = []
    for step in scenario["steps"]:
        kind = step["do"]
        if kind == "generate":
            results.append(generate(llm, step))
        elif kind == "reset":
            results.append(llm.reset_prefix_cache(**({"reset_connector": True} if step.get("connector") else {})))
        elif kind == "abort":
            results.append(abort(llm, step))
        elif kind == "metrics":
            results.append(metrics(llm))
        elif kind == "state":
            results.append(scheduler_state(llm))
        else:
            raise ValueError(f"unknown step {kind!r}")
    print(MARK + json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
