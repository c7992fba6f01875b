"""`vllm serve` on the CPU as a test sees it."""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
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

    def stream(self, prompt: list[int], max_tokens: int = 16) -> tuple[str, int]:
        """The answer, and how many tokens it has. A busy server puts several tokens into one piece of the stream."""
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        lines = self.post("/v1/completions", body).splitlines()
        *pieces, last = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        return "".join(piece["choices"][0]["text"] for piece in pieces), last["usage"]["completion_tokens"]

    def metrics(self) -> dict[str, float]:
        return {
            name: float(value)
            for name, value in re.findall(r"^(kvbm_\w+?)(?:_total)?(?:{.*})? ([\d.e+]+)$", self.get("/metrics"), re.M)
        }

    def wait_for_metric(self, name: str, value: float, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while self.metrics().get(name) != value:
            assert time.monotonic() < deadline, self.metrics()
            time.sleep(0.2)


def free_port() -> int:
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Neighbouring ones, below 32768: from there on any connection may take one before the test's server does."""
    while True:
        first = random.SystemRandom().randrange(20_000, 31_000)
        ports = range(first, first + count)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in ports:
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return list(ports)


def start_server(
    start_process,
    model: str,
    env: dict[str, str],
    connector: dict | None = CONNECTOR,
    options: list[str] | None = None,
    program: str = "vllm.entrypoints.cli.main",
    shutdown_seconds: int | None = 20,
) -> Server:
    """A server with the tiny model, under the name "tiny"; ``connector`` None is vLLM alone. ``program``: the module
    whose command `serve` starts it. ``shutdown_seconds`` None leaves the option out."""
    port = free_port()
    command = [sys.executable, "-m", program, "serve", model, "--served-model-name", "tiny"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "1024", "--block-size", "32", *(options or [])]
    if shutdown_seconds is not None:
        command += ["--shutdown-timeout", str(shutdown_seconds)]
    if not options or "--num-gpu-blocks-override" not in options:
        command += ["--num-gpu-blocks-override", "256"]
    if connector is not None:
        command += ["--kv-transfer-config", json.dumps(connector)]
    environment = {
        "PYTHONPATH": str(PROJECT / "src"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        **env,
    }
    server = Server(start_process(command, environment), port)
    server.wait_until_healthy(240)
    return server
