"""Two workers behind Dynamo's router that read each other's host memory: the router's hint brings a prefix over."""

from __future__ import annotations

import threading

import pytest
from stack import ANSWER, Stack, prompt, wait_until
from test_router import BLOCK, FILLERS, router_is_up_to_date

# What a request that a worker is busy with counts for, in blocks: more than any prefix here.
BUSY = "--router-decode-active-request-weight 100"


@pytest.fixture
def stack(model, tmp_path, without_servers):
    made = Stack("agg_kvbm_peers.sh", 2, model, tmp_path, {**without_servers, "FRONTEND_ARGS": BUSY})
    try:
        made.ready(2)
        yield made
    finally:
        made.close()


def test_the_routers_hint_brings_a_prefix_to_the_worker_with_less_to_do(stack):
    instances = stack.instances()
    holder = instances[0]
    answer, usage = stack.chat(prompt(1), ANSWER, nvext={"backend_instance_id": holder})
    loadable = (usage["prompt_tokens"] - 1) // BLOCK
    wait_until("its blocks are in host memory", lambda: max(stored(stack)) >= loadable)
    source = max((0, 1), key=lambda worker: stored(stack)[worker])
    target = 1 - source
    # The router must know it from host memory alone.
    for filler in range(FILLERS):
        stack.chat(prompt(100 + filler), 1, nvext={"backend_instance_id": holder})
    router_is_up_to_date(stack)

    before = figures(stack)
    busy = threading.Thread(
        target=stack.chat, args=(prompt(50), 400), kwargs={"nvext": {"backend_instance_id": holder}}
    )
    busy.start()
    try:
        wait_until("the holder is busy", lambda: requests(stack, source) > before[source]["kvbm_requests_total"])
        again, usage = stack.chat(prompt(1), ANSWER)
    finally:
        busy.join()
    assert again == answer
    after = figures(stack)
    came = grown(before, after, target, "kvbm_source_blocks_total")
    assert grown(before, after, target, "kvbm_requests_total") == 1
    assert grown(before, after, target, "kvbm_hints_total") == 1
    assert came == grown(before, after, target, "kvbm_onboard_blocks_p2d") == loadable
    assert usage["prompt_tokens_details"]["cached_tokens"] == loadable * BLOCK
    # Both sides counted the same blocks and bytes.
    assert grown(before, after, source, "kvbm_served_blocks_total") == came
    served, taken = (
        grown(before, after, worker, f"kvbm_{name}_bytes_total")
        for worker, name in ((source, "served"), (target, "source"))
    )
    assert served == taken > 0


def figures(stack: Stack) -> list[dict[str, float]]:
    return [stack.figures(worker) for worker in (0, 1)]


def stored(stack: Stack) -> list[float]:
    return [each["kvbm_offload_blocks_d2h"] for each in figures(stack)]


def requests(stack: Stack, worker: int) -> float:
    return stack.figures(worker)["kvbm_requests_total"]


def grown(before: list[dict[str, float]], after: list[dict[str, float]], worker: int, name: str) -> float:
    return after[worker].get(name, 0.0) - before[worker].get(name, 0.0)
