"""What a step of vLLM's computes, for :mod:`kvbm.runtime.steps`."""

from __future__ import annotations

from typing import Any

from kvbm.runtime.steps import Work


def work_of(output: Any, decode_tokens: int, waits: bool) -> Work:
    """What vLLM has just scheduled. A request with more tokens than a decoding one has is computing its prompt."""
    scheduled = output.num_scheduled_tokens
    if output.total_num_scheduled_tokens == len(scheduled):
        return Work(0, 0, bool(scheduled), waits)
    computed = computed_of(output)
    tokens = weighed = 0
    for name, count in scheduled.items():
        if count > decode_tokens:
            tokens += count
            weighed += count * computed.get(name, 0)
    return Work(tokens, weighed // tokens if tokens else 0, not tokens, waits)


def computed_of(output: Any) -> dict[str, int]:
    """How many tokens each request of a step had before it."""
    computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return computed
