"""Reads a step of vLLM's scheduler: the tokens that it computes, and the blocks of its requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvbm.engines.vllm import compat
from kvbm.engines.vllm.groups import Tables
from kvbm.engines.vllm.request import RequestState
from kvbm.runtime.steps import Work


def work_of(output: Any, decode_tokens: int, waits: bool) -> Work:
    """The scheduled work. A request with more tokens than a decoding one has is computing its prompt."""
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


def starting_requests(output: Any) -> set[str]:
    """Requests that get their block tables with this step: new ones, and those that come back from preemption."""
    resumed = compat.resumed_requests(output.scheduled_cached_reqs)
    return {new.req_id for new in output.scheduled_new_reqs}.union(resumed)


def follow_tables(
    output: Any,
    requests: Mapping[str, RequestState],
    block_size: int,
    admit: Callable[[RequestState, Tables, int], None],
) -> list[int]:
    """Bring the block tables of requests up to date. ``admit``: is called for each request that gets new tables, with
    them and its computed tokens. Returns the blocks that this step may be the first to write to."""
    written: list[int] = []
    for request_id in getattr(output, "preempted_req_ids", None) or ():
        if (state := requests.get(request_id)) is not None:
            state.tables = None
    for new in output.scheduled_new_reqs:
        for table in new.block_ids:
            written += table[new.num_computed_tokens // block_size :]
        if (state := requests.get(new.req_id)) is not None:
            admit(state, new.block_ids, new.num_computed_tokens)
            if state.found is None:
                state.found = new.num_computed_tokens // block_size
    cached = output.scheduled_cached_reqs
    resumed = compat.resumed_requests(cached)
    for i, request_id in enumerate(cached.req_ids):
        if cached.new_block_ids[i] is None:
            continue
        tables, computed = cached.new_block_ids[i], cached.num_computed_tokens[i]
        state = requests.get(request_id)
        if request_id in resumed:
            for table in tables:
                written += table[computed // block_size :]
            if state is not None:
                admit(state, tables, computed)
            continue
        for group, fresh in enumerate(tables):
            written += fresh
            if state is not None and state.tables is not None:
                state.tables[group].extend(fresh)
    return written
