"""`vllm serve` with KVBM, as a user runs it: settings in the environment, an HTTP client, Prometheus, Ctrl-C."""

from __future__ import annotations

import json
import signal

import pytest
from engines import prompt

from servers import start_server

pytestmark = pytest.mark.engine

PROMPT = prompt(1, 400)  # 12 full blocks


@pytest.fixture
def server(start_process, model):
    environment = {
        "DYN_KVBM_CPU_CACHE_GB": "0.1",
        "KVBM_INJECT_FAULTS": "slow-store",  # a second late: the engine is idle by then
    }
    return start_server(start_process, model, environment)


def test_a_server_keeps_brings_back_counts_and_stops(server):
    log = server.process.log
    assert "KVBM is ready: 1525 host blocks of 32 tokens" in log.read_text()
    first, tokens = server.stream(PROMPT)
    assert tokens == 16
    # Nobody asks for anything, and the stores finish all the same.
    server.wait_for_metric("kvbm_offload_blocks_d2h", 12, seconds=20)
    assert server.metrics()["kvbm_onboard_blocks_h2d"] == 0

    server.post("/reset_prefix_cache")
    assert server.stream(PROMPT) == (first, tokens)
    server.wait_for_metric("kvbm_onboard_blocks_h2d", 12, seconds=20)
    metrics = server.metrics()
    assert metrics["kvbm_matched_tokens"] == 384
    assert metrics["kvbm_transfer_failed_blocks"] == 0
    assert "kvbm_failures{" not in server.get("/metrics")

    server.post("/reset_prefix_cache?reset_external=true")
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}
    assert json.loads(server.post("/v1/chat/completions", chat))["usage"]["completion_tokens"] == 4

    server.process.popen.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    # vLLM itself may complain while it stops, when one of its processes is slower than another. We must not.
    assert "/kvbm/engines/" not in log.read_text()
    assert "KVBM stays out of the way" not in log.read_text()
