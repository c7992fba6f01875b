"""Two workers behind Dynamo's router that read each other's host memory: the router's hint brings a prefix over."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from stack import ANSWER, Stack, prompt, wait_until
from test_router import BLOCK, FILLERS, router_is_up_to_date

# What a request that a worker is busy with counts for, in blocks: more than any prefix here.
BUSY = "--router-decode-active-request-weight 100"


@pytest.fixture
def stack(model, tmp_path, without_servers):
    # Four busy processes share the machine: an answer may take longer than a request would wait for elsewhere.
    env = {"FRONTEND_ARGS": BUSY, "KVBM_PEER_LOOKUP_SECS": "5", "KVBM_PEER_TIMEOUT_SECS": "20"}
    made = Stack("agg_kvbm_peers.sh", 2, model, tmp_path, {**without_servers, **env})
    try:
        made.ready(2)
        yield made
    finally:
        made.close()


def test_the_routers_hint_brings_a_prefix_to_the_worker_with_less_to_do(stack):
    holder = stack.instances()[0]
    answer, blocks = keep(stack, 1, holder)
    source = max((0, 1), key=lambda worker: stored(stack)[worker])
    target = 1 - source
    before = figures(stack)
    with load(stack, holder, 50):
        again, usage = stack.chat(prompt(1), ANSWER)
        after = counted(stack, before, target)
    assert again == answer
    assert grown(before, after, target, "kvbm_hints_total") == 1
    assert grown(before, after, target, "kvbm_source_blocks_total") == blocks
    assert usage["prompt_tokens_details"]["cached_tokens"] == blocks * BLOCK
    # Both sides have counted the same blocks and bytes.
    assert grown(before, after, source, "kvbm_served_blocks_total") == blocks
    served = grown(before, after, source, "kvbm_served_bytes_total")
    assert served == grown(before, after, target, "kvbm_source_bytes_total") > 0


def test_a_source_that_stalls_or_dies_costs_the_hit_and_nothing_else(stack):
    first, second = stack.instances()
    stalled, _ = keep(stack, 1, first)
    source = max((0, 1), key=lambda worker: stored(stack)[worker])
    answer, blocks = keep(stack, 2, first)
    before = figures(stack)
    server = stack.peer_server(source)
    os.kill(server, signal.SIGSTOP)
    try:
        again, _ = stack.chat(prompt(1), ANSWER, nvext={"backend_instance_id": second})
    finally:
        os.kill(server, signal.SIGCONT)
    assert again == stalled
    after = counted(stack, before, 1 - source)
    assert grown(before, after, 1 - source, "kvbm_source_blocks_total") == 0
    stack.kill_worker(source)
    # The dead worker's server may still serve the blocks: either way the answer is right.
    again, _ = stack.chat(prompt(2), ANSWER, nvext={"backend_instance_id": second})
    assert again == answer
    read = stack.figures(1 - source).get("kvbm_source_blocks_total", 0.0)
    assert read in (0, blocks), read
    os.kill(server, signal.SIGTERM)


def keep(stack: Stack, seed: int, holder: int) -> tuple[str, int]:
    """(answer, blocks) of a prompt that one worker has in host memory and no longer on its device."""
    before = sum(stored(stack))
    answer, usage = stack.chat(prompt(seed), ANSWER, nvext={"backend_instance_id": holder})
    blocks = (usage["prompt_tokens"] - 1) // BLOCK
    wait_until("its blocks are in host memory", lambda: sum(stored(stack)) >= before + blocks)
    for filler in range(FILLERS):
        stack.chat(prompt(100 + 10 * seed + filler), 1, nvext={"backend_instance_id": holder})
    router_is_up_to_date(stack)
    return answer, blocks


@contextmanager
def load(stack: Stack, holder: int, seed: int) -> Iterator[None]:
    """One worker has a request to work on at any time."""
    over, first = threading.Event(), threading.Event()

    def ask(number: int) -> None:
        turn = 0
        while not over.is_set():
            turn += 1
            first.set()
            stack.chat(prompt(1000 * seed + 100 * number + turn), 200, nvext={"backend_instance_id": holder})

    threads = [threading.Thread(target=ask, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    try:
        assert first.wait(60)
        over.wait(1.0)  # the router has sent them on
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def counted(stack: Stack, before: list[dict[str, float]], worker: int) -> list[dict[str, float]]:
    """The figures once this worker has counted a request: the metrics are up to a second old."""
    name = "kvbm_requests_total"
    wait_until("the worker with less to do gets it", lambda: grown(before, figures(stack), worker, name) == 1)
    return figures(stack)


def figures(stack: Stack) -> list[dict[str, float]]:
    return [stack.figures(worker) for worker in (0, 1)]


def stored(stack: Stack) -> list[float]:
    return [each["kvbm_offload_blocks_d2h"] for each in figures(stack)]


def grown(before: list[dict[str, float]], after: list[dict[str, float]], worker: int, name: str) -> float:
    return after[worker].get(name, 0.0) - before[worker].get(name, 0.0)
