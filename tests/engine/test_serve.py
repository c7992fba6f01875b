"""`vllm serve` with KVBM, as a user runs it: settings in the environment, an HTTP client, Prometheus, Ctrl-C."""

from __future__ import annotations

import json
import re
import signal
import socket
import sys
import time
import urllib.error
import urllib.request

import pytest
from engines import PROJECT, prompt

pytestmark = pytest.mark.engine

PROMPT = prompt(1, 400)  # 12 full blocks
CONNECTOR = {
    "kv_connector": "DynamoConnector",
    "kv_connector_module_path": "kvbm.vllm_integration.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
# A proxy of the user's environment must not see requests to this machine.
HTTP = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Server:
    def __init__(self, process, port: int) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> str:
        return HTTP.open(self.url + path, timeout=30).read().decode()

    def post(self, path: str, body: dict | None = None) -> str:
        request = urllib.request.Request(self.url + path, json.dumps(body or {}).encode(), method="POST")
        request.add_header("Content-Type", "application/json")
        return HTTP.open(request, timeout=60).read().decode()

    def wait_until_healthy(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.process.popen.poll() is None, self.process.log.read_text()[-5000:]
            try:
                self.get("/health")
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        pytest.fail(f"not healthy after {seconds} s:\n{self.process.log.read_text()[-5000:]}")

    def stream(self) -> tuple[str, int]:
        """The answer, and in how many pieces it came."""
        body = {
            "model": "tiny",
            "prompt": PROMPT,
            "max_tokens": 16,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        pieces = []
        for line in self.post("/v1/completions", body).splitlines():
            if line.startswith("data: {"):
                pieces.append(json.loads(line[6:])["choices"][0]["text"])
        return "".join(pieces), len(pieces)

    def metrics(self) -> dict[str, float]:
        return {
            name: float(value)
            for name, value in re.findall(r"^(kvbm_\w+?)(?:_total)?(?:{.*})? ([\d.e+]+)$", self.get("/metrics"), re.M)
        }

    def wait_for_metric(self, name: str, value: float, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.metrics().get(name) != value:
            assert time.monotonic() < deadline, self.metrics()
            time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def server(start_process, model):
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, "--served-model-name", "tiny"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "1024", "--block-size", "32", "--num-gpu-blocks-override", "256"]
    command += ["--shutdown-timeout", "20", "--kv-transfer-config", json.dumps(CONNECTOR)]
    environment = {
        "PYTHONPATH": str(PROJECT / "src"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "DYN_KVBM_CPU_CACHE_GB": "0.1",
        "KVBM_INJECT_FAULTS": "slow-store",  # a second late: the engine is idle by then
    }
    server = Server(start_process(command, environment), port)
    server.wait_until_healthy(240)
    return server


def test_a_server_keeps_brings_back_counts_and_stops(server):
    log = server.process.log
    assert "KVBM is ready: 1525 host blocks of 32 tokens" in log.read_text()
    first, pieces = server.stream()
    assert pieces == 16
    # Nobody asks for anything, and the stores finish all the same.
    server.wait_for_metric("kvbm_offload_blocks_d2h", 12, seconds=20)
    assert server.metrics()["kvbm_onboard_blocks_h2d"] == 0

    server.post("/reset_prefix_cache")
    assert server.stream() == (first, pieces)
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
