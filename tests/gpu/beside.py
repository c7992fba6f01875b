"""What :mod:`test_beside_decode` does inside the engine's process: prompts that return while other requests decode."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

CYCLES = 150_000_000  # tens of milliseconds: several steps
OTHERS_TOKENS = 900  # more than there are steps


def bring_back(
    scenario: Any,
    prompts: dict[str, list[int]],
    others: list[list[int]],
    tokens: int,
    late: bool = False,
    hold: bool = True,
    **params: Any,
) -> dict[str, Any]:
    """Answers of so many ``tokens`` to ``prompts``, which return one after the other while ``others`` decode.

    ``late``: the GPU begins each load long after it should. ``hold``: steps wait for loads that were announced.
    """
    from kvbm.engines.vllm.worker import find_local
    from kvbm.transfer.base import When

    worker = find_local(scenario.engine.vllm_config.kv_transfer_config.engine_id, 0)._worker
    copier, announcements = worker._copier, worker.announcements
    seen: Counter[str] = Counter()

    def load(slots: Any, blocks: Any, after: Any, when: Any, tokens: int = 0, real: Any = copier.load) -> Any:
        seen["outside of steps"] += when is When.LATER
        if late:
            import torch

            with torch.cuda.stream(copier.load_stream):
                torch.cuda._sleep(CYCLES)
        return real(slots, blocks, after, when, tokens)

    def make(loads: Any, step_seconds: float, real: Any = announcements.make) -> set[str]:
        made: set[str] = real(loads, step_seconds)
        seen["announced"] += len(made)
        return made

    def hold_step(tickets: list[Any], real: Any = copier.hold_step) -> None:
        seen["held"] += not all(ticket.done() for ticket in tickets)
        if hold:
            real(tickets)

    scenario.reset()
    began = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(patch.object(copier, "load", load))
        stack.enter_context(patch.object(copier, "hold_step", hold_step))
        stack.enter_context(patch.object(announcements, "make", make))
        names = [f"other-{began}-{i}" for i in range(len(others))]
        scenario.add(names, others, OTHERS_TOKENS, **params)
        scenario.step(6)
        answers: dict[str, list[int]] = {}
        for name, prompt in prompts.items():
            scenario.add([f"{began}-{name}"], [prompt], tokens, **params)
            while f"{began}-{name}" not in answers:
                if time.monotonic() - began > 60:
                    raise TimeoutError(f"{name} has no answer")
                answers |= scenario.step()
        scenario.abort(names)
        scenario.finish()
        scenario.drain()
    return {"answers": {name: answers[f"{began}-{name}"] for name in prompts}, **seen}
