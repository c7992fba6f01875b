"""Two workers behind Dynamo's router that read each other's host memory: the router's hint brings a prefix over."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
from stack import ANSWER, Stack, processes_here, prompt, wait_until
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
    there = {"nvext": {"backend_instance_id": holder}}
    busy = threading.Thread(target=stack.chat, args=(prompt(50), 400), kwargs=there)
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
    assert came == loadable
    assert usage["prompt_tokens_details"]["cached_tokens"] == loadable * BLOCK
    # Both sides have counted the same blocks and bytes.
    assert grown(before, after, source, "kvbm_served_blocks_total") == came
    served, taken = (
        grown(before, after, worker, f"kvbm_{name}_bytes_total")
        for worker, name in ((source, "served"), (target, "source"))
    )
    assert served == taken > 0

    # A source that does not answer, and one that has ended, cost the hit and no more.
    for seed, sign in ((2, signal.SIGSTOP), (3, signal.SIGKILL)):
        answer, _ = stack.chat(prompt(seed), ANSWER, nvext={"backend_instance_id": holder})
        for filler in range(FILLERS):
            stack.chat(prompt(100 + 10 * seed + filler), 1, nvext={"backend_instance_id": holder})
        router_is_up_to_date(stack)
        before = figures(stack)
        server = server_of(stack, source)
        os.kill(server, sign)
        busy = threading.Thread(target=stack.chat, args=(prompt(50 + seed), 400), kwargs=there)
        busy.start()
        try:
            wait_until("the holder is busy", lambda: requests(stack, source) > before[source]["kvbm_requests_total"])  # noqa: B023
            again, usage = stack.chat(prompt(seed), ANSWER)
        finally:
            busy.join()
            if sign == signal.SIGSTOP:
                os.kill(server, signal.SIGCONT)
        assert again == answer
        after = figures(stack)
        assert grown(before, after, target, "kvbm_requests_total") == 1
        assert grown(before, after, target, "kvbm_hints_total") == 1
        assert grown(before, after, target, "kvbm_source_blocks_total") == 0
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def server_of(stack: Stack, worker: int) -> int:
    """The process that serves a worker's blocks."""
    mark = f"DYN_KVBM_METRICS_PORT={stack.metrics_ports[worker]}".encode()
    (found,) = [
        pid
        for pid, _, environment in processes_here()
        if mark in environment and b"kvbm.tiers.peers.server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return found


def figures(stack: Stack) -> list[dict[str, float]]:
    return [stack.figures(worker) for worker in (0, 1)]


def stored(stack: Stack) -> list[float]:
    return [each["kvbm_offload_blocks_d2h"] for each in figures(stack)]


def requests(stack: Stack, worker: int) -> float:
    return stack.figures(worker)["kvbm_requests_total"]


def grown(before: list[dict[str, float]], after: list[dict[str, float]], worker: int, name: str) -> float:
    return after[worker].get(name, 0.0) - before[worker].get(name, 0.0)
