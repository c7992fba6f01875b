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


def loads_under_way(scenario) -> bool:
    return bool(scenario.adapter.leader.loads)


def pause_beside_loads(scenario, prompt: list[int], times: int) -> list[list[int]]:
    """In an engine of another process: pause it and empty its caches while it loads a prompt, and let it go on. Returns
    the answers."""
    answers = []
    for i in range(times):
        scenario.empty()
        scenario.add([f"paused-{i}"], [prompt], 16)
        time.sleep(0.05)  # a load that is slow on purpose takes 0.1 s
        scenario.engine.engine_core.call_utility("pause_scheduler", "keep", True)
        scenario.engine.engine_core.call_utility("resume_scheduler")
        answers += scenario.finish().values()
    return answers


def sleep_beside_loads(scenario, prompt: list[int], ways: list[list]) -> dict:
    """In an engine of another process: let it sleep while it loads a prompt, in each of these ways: [level, mode].
    Returns the errors, what the requests were answered that went on, and what the prompt was answered after each."""
    errors, kept, after = [], [], []
    for level, mode in ways:
        scenario.empty()
        scenario.add([f"asleep-{level}-{mode}"], [prompt], 16)
        time.sleep(0.05)  # a load that is slow on purpose takes 0.1 s
        try:
            scenario.llm.sleep(level, mode)
        except Exception as error:
            errors.append(f"level {level}, {mode}: {error}")
        scenario.llm.wake_up()
        answers = scenario.finish().values()
        if mode != "abort":
            kept += answers
        after.append(scenario.generate([prompt])["tokens"][0][0])
    return {"errors": errors, "kept": kept, "after": after}
