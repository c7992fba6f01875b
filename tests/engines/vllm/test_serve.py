"""`kvbm serve`, as a user runs it: one flag, an HTTP client, Prometheus, Ctrl-C; and a wrong setting."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

import pytest
from engines import prompt

from kvbm.cli import model_kv
from kvbm.cli.main import main
from kvbm.engines.vllm.sockets import VARIABLE
from kvbm.engines.vllm.transfer_config import EXAMPLE
from servers import PROJECT, free_port, start_server

pytestmark = pytest.mark.engine

PROMPT = prompt(1, 400)  # 12 full blocks


@pytest.fixture
def server(start_process, model):
    environment = {"KVBM_INJECT_FAULTS": "slow-store"}  # a second late: the engine is idle by then
    options = ["--cpu-gb", "0.1", "--no-metrics", "--force"]
    return start_server(start_process, model, environment, None, options, program="kvbm.cli.main")


def test_a_server_keeps_brings_back_counts_and_stops(server, model):
    log = server.process.log
    blocks = int(0.1e9 / (32 * model_kv.read_model(model).token_bytes()))  # what `kvbm size` says
    assert f"KVBM is ready: {blocks} host blocks of 32 tokens" in log.read_text()
    first, tokens = server.stream(PROMPT)
    assert tokens == 16
    # Nobody asks for anything, and the stores finish all the same.
    server.wait_for_metric("kvbm_offload_blocks_d2h", 12)
    assert server.metrics()["kvbm_onboard_blocks_h2d"] == 0

    server.post("/reset_prefix_cache")
    assert server.stream(PROMPT) == (first, tokens)
    server.wait_for_metric("kvbm_onboard_blocks_h2d", 12)
    metrics = server.metrics()
    assert metrics["kvbm_matched_tokens"] == 384
    assert metrics["kvbm_transfer_failed_blocks"] == 0
    assert "kvbm_failures{" not in server.get("/metrics")

    server.post("/reset_prefix_cache?reset_external=true")
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}
    assert json.loads(server.post("/v1/chat/completions", chat))["usage"]["completion_tokens"] == 4

    variables = Path(f"/proc/{server.process.popen.pid}/environ").read_text().split("\0")
    sockets = next(Path(each.partition("=")[2]) for each in variables if each.startswith(VARIABLE))
    assert list(sockets.iterdir())
    server.process.popen.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    assert not sockets.exists()
    # vLLM itself may complain while it stops, when one of its processes is slower than another. We must not.
    assert "/kvbm/engines/" not in log.read_text()
    assert "KVBM stays out of the way" not in log.read_text()


@pytest.mark.long
def test_blocks_on_their_way_to_the_disk_at_sigterm_get_there(start_process, model, tmp_path, capsys):
    """`kvbm serve` gives vLLM the time for it: without, vLLM kills its engine before the late stores have begun."""
    environment = {"KVBM_INJECT_FAULTS": "slow-store", "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER": "1"}
    options = ["--cpu-gb", "0.1", "--disk-gb", "0.2", "--disk-dir", str(tmp_path), "--no-metrics", "--force"]
    server = start_server(
        start_process, model, environment, None, options, program="kvbm.cli.main", shutdown_seconds=None
    )
    server.stream(PROMPT)
    server.process.popen.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    assert main(["cache", "ls", "--json", str(tmp_path)]) == 0
    assert [cache["blocks"] for cache in json.loads(capsys.readouterr().out)] == [12]


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({"DYN_KVBM_CPU_CACHE_GB": "20GB"}, "DYN_KVBM_CPU_CACHE_GB='20GB' (environment): expected a number"),
        pytest.param({}, "At least one cache tier must be configured", marks=pytest.mark.long),
    ],
    ids=["value", "no tier"],
)
def test_a_wrong_setting_ends_the_start_before_weights_load(start_process, model, environment, problem):
    """The message stands alone at the end."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, "--kv-transfer-config", EXAMPLE]
    environment |= {"PYTHONPATH": str(PROJECT / "src"), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    process = start_process([*command, "--max-model-len", "512"], environment)
    assert process.wait(120) == 1
    log = process.log.read_text()
    assert log.splitlines()[-2].startswith(f"KVBM cannot start: {problem}")
    assert "Traceback" not in log
    assert "EngineCore" not in log  # no process of the engine has started


@pytest.mark.long
def test_sigterm_ends_a_server_that_still_starts(start_process, model):
    """While vLLM waits for its engine, it loses the signal."""
    environment = {"PYTHONPATH": str(PROJECT / "src"), "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "kvbm.cli.main", "serve", model, "--cpu-gb", "0.5", "--no-metrics", "--force"]
    command += ["--port", str(free_port()), "--max-model-len", "512", "--enforce-eager"]
    process = start_process(command, environment)
    deadline = time.monotonic() + 180
    while "(EngineCore pid=" not in process.log.read_text():
        assert process.popen.poll() is None, process.log.read_text()[-5000:]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.popen.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert "Application startup complete" not in process.log.read_text()
