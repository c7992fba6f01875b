"""Calls of a training loop to a running vLLM, for tests."""

from __future__ import annotations

import time


def sleep(scenario, level: int) -> bool:
    """With stores that are held back (``hold_stores``). Returns whether all have been copied when the engine sleeps."""
    from kvbm.engines.vllm.worker import find_local

    worker = find_local(scenario.engine.vllm_config.kv_transfer_config.engine_id, 0)._worker
    held = list(worker._stores.tickets.values())
    begun = [ticket._inner is not None for ticket in held]
    scenario.llm.sleep(level=level)
    return bool(held) and not any(begun) and all(ticket._inner is not None and ticket._inner.done() for ticket in held)


def wake(scenario) -> None:
    scenario.llm.wake_up()


def reset_running(scenario) -> str:
    """vLLM's reset of everything, with requests under way; returns what it answers."""
    try:
        return str(scenario.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True))
    except RuntimeError as error:
        return str(error)


def loads_under_way(scenario) -> bool:
    return scenario.adapter.leader.loads_under_way


def sleep_beside_loads(scenario, prompt: list[int], times: int) -> list[str]:
    """In an engine of another process: let it sleep while it loads a prompt. Returns the errors."""
    errors = []
    for i in range(times):
        scenario.empty()
        scenario.add([f"asleep-{i}"], [prompt], 8)
        time.sleep(0.05)  # a load that is slow on purpose takes 0.1 s
        try:
            scenario.llm.sleep(level=1)
        except Exception as error:
            errors.append(str(error))
        scenario.llm.wake_up()
        scenario.finish()
        scenario.generate([prompt])
    return errors
