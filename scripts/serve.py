#!/usr/bin/env python3
"""Run `vllm serve` on the CPU, with or without KVBM, and always stop it again.

    python scripts/serve.py                     # what `make serve` does: stays up until Ctrl-C

The demonstration (demo.py) starts its servers through the class below.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import FrameType
from typing import IO

import models

from kvbm import config as settings
from kvbm.engines.vllm.sockets import give_directory, remove_directory
from kvbm.engines.vllm.transfer_config import EXAMPLE
from kvbm.processes import is_resource_tracker, running, stat

BLOCK_SIZE = 32  # the CPU attention kernel takes multiples of 32 only
MAX_MODEL_LEN = 2048
# The engine must hold one request of full length (64 blocks, and one for its own use). The cache has little more than
# that, so a few conversations do not fit, as thousands do not fit on a GPU.
ENGINE_BLOCKS = MAX_MODEL_LEN // BLOCK_SIZE + 8
START_TIMEOUT_S = 600
STOPPING = "stopping: vLLM takes some seconds"
TRACKER_SECONDS = 5.0  # for Python's resource trackers
INFO_LINE = re.compile(r"(?:\(.*?\) )?INFO [\d-]+ [\d:.]+ \[.*?\] (.+)")
# The servers are on the loopback interface: a proxy of the user's environment must not see these requests.
HTTP = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerError(Exception):
    """The server did not start, died or refused a request; the message ends with the last lines of its log."""


class Server:
    """One `vllm serve` with its own process group. Use as a context manager: leaving it stops every process."""

    def __init__(
        self, model: str, log: Path, *, kvbm: bool, port: int = 0, cpu_cache_gb: float = 2, metrics_port: int = 0
    ):
        self.model = model
        self.name = Path(model).name if Path(model).is_dir() else model
        self.kvbm = kvbm
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self.cpu_cache_gb = cpu_cache_gb
        self.metrics_port = metrics_port  # 0: no page of its own
        self._process: subprocess.Popen[bytes] | None = None
        self._healthy = False
        self._environment: dict[str, str] = {}  # of the running server

    def command(self) -> list[str]:
        command = [str(Path(sys.executable).parent / "vllm"), "serve", self.model]
        command += ["--served-model-name", self.name, "--host", "127.0.0.1", "--port", str(self.port)]
        # float32: where the CPU cannot multiply bfloat16 (AVX2), that is five to ten times slower.
        command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", str(MAX_MODEL_LEN)]
        command += ["--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", str(ENGINE_BLOCKS)]
        # Without a timeout the API server kills its engine instead of letting it finish.
        command += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log", "--shutdown-timeout", "10"]
        if self.kvbm:
            command += ["--kv-transfer-config", EXAMPLE]
        return command

    def environment(self) -> dict[str, str]:
        variables = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": compute_cpus(),
            "VLLM_NO_USAGE_STATS": "1",
        }
        if Path(self.model).is_dir():
            variables["HF_HUB_OFFLINE"] = "1"
        if self.kvbm:
            variables["DYN_KVBM_CPU_CACHE_GB"] = f"{self.cpu_cache_gb:g}"
        if self.kvbm and self.metrics_port:
            variables |= {"DYN_KVBM_METRICS": "1", "DYN_KVBM_METRICS_PORT": str(self.metrics_port)}
        return {**os.environ, **variables}

    def require_port(self) -> None:
        """Another server on this port would look like this one."""
        if not is_free(self.port):
            raise ServerError(f"port {self.port} is in use: choose another, for example PORT={self.port + 1}")

    def __enter__(self) -> Server:
        self.require_port()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        atexit.register(self.stop)
        self._environment = self.environment()
        give_directory(self._environment)
        with self.log.open("wb") as log:
            log.write(f"$ {shlex.join(self.command())}\n".encode())
            log.flush()
            # A separate process group: one signal reaches the engine and its workers. Ctrl-C reaches this script first.
            self._process = subprocess.Popen(
                self.command(), env=self._environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            self._wait_until_healthy()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                print(f"\n{STOPPING}", flush=True)
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        process = self._process
        if process is None:
            return
        # The API server shuts its engine down. While it starts, KVBM ends it, and without KVBM it ignores the signal.
        process.terminate()
        try:
            process.wait(timeout=20 if self._healthy else 10 if self.kvbm else 2)
        except subprocess.TimeoutExpired:
            pass
        finally:  # also when a second Ctrl-C cuts the wait short
            end_group(process.pid)
            process.wait()
        self._process = None
        remove_directory(self._environment)
        atexit.unregister(self.stop)

    def wait(self) -> int:
        """Block until the server ends by itself."""
        assert self._process is not None
        return self._process.wait()

    def _wait_until_healthy(self) -> None:
        assert self._process is not None
        started = time.monotonic()
        progress = Progress()
        while (elapsed := time.monotonic() - started) < START_TIMEOUT_S:
            if self._process.poll() is not None:
                raise self.failure(f"vllm serve ended with status {self._process.returncode} before it was ready")
            try:
                with HTTP.open(f"{self.url}/health", timeout=2):
                    self._healthy = True
                    progress.end(f"server is up after {elapsed:.0f} s")
                    return
            except OSError:
                progress.show(elapsed, self._last_log_line())
                time.sleep(0.5)
        raise self.failure(f"vllm serve was not ready within {START_TIMEOUT_S} s")

    def _last_log_line(self) -> str:
        # "(EngineCore pid=1) INFO 01-31 12:00:00 [file.py:1] text". Warnings are for the log: most are of no concern.
        lines = [found for line in self.log_tail(20) if (found := INFO_LINE.match(line)) and len(found[1]) < 90]
        return lines[-1][1] if lines else "starting"

    def log_tail(self, lines: int) -> list[str]:
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - 64_000))
            return log.read().decode(errors="replace").splitlines()[-lines:]

    def failure(self, what: str) -> ServerError:
        tail = "\n".join(f"    {line}" for line in self.log_tail(40))
        return ServerError(f"{what}. Last lines of {self.log}:\n{tail}")

    def post(self, path: str, body: dict[str, object]) -> IO[bytes]:
        """Send a request and return its open response, so that the caller can read a stream."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        try:
            response: IO[bytes] = HTTP.open(request, timeout=300)
            return response
        except urllib.error.HTTPError as error:
            raise self.failure(f"{path} was answered with {error.code}: {error.read().decode()}") from None
        except OSError as error:
            raise self.failure(f"{path} was not answered: {error}") from None

    def counter(self, name: str) -> float:
        """A Prometheus counter, summed over its labels; 0 when the server has none of that name."""
        with HTTP.open(f"{self.url}/metrics", timeout=30) as response:
            text = response.read().decode()
        # The Prometheus client library appends "_total" to the name of a counter.
        sample = re.compile(rf"^{re.escape(name)}(?:_total)?(?:{{[^}}]*}})? (\S+)", re.MULTILINE)
        return sum(float(value) for value in sample.findall(text))


def end_group(group: int) -> None:
    """Kill what is left of a process group. Python's resource trackers come last: they remove the shared memory of the
    others, and then end."""
    deadline = time.monotonic() + TRACKER_SECONDS
    while others := [pid for pid in processes_of(group) if not is_resource_tracker(pid)]:
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    while processes_of(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def processes_of(group: int) -> list[int]:
    """The running processes of a group."""
    return [pid for pid in running() if (fields := stat(pid)) and int(fields[2]) == group and fields[0] not in "ZX"]


class Progress:
    """One line that is rewritten on a terminal; in a log file, a line every ten seconds."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._next_line = 0.0

    def show(self, elapsed: float, text: str) -> None:
        line = f"  {elapsed:3.0f} s  {text}"
        if self._terminal:
            print(f"\r\x1b[K{line[:110]}", end="", flush=True)
        elif elapsed >= self._next_line:
            print(line[:110], flush=True)
            self._next_line = elapsed + 10

    def end(self, text: str) -> None:
        print(f"\r\x1b[K  {text}" if self._terminal else f"  {text}", flush=True)


def compute_cpus() -> str:
    """The CPUs that compute, in vLLM's format: one of each core, with one CPU of the machine left to the scheduler.

    vLLM's own choice would make the comparison unfair: with a connector it reserves one core more than without, or none
    on two cores. A free CPU matters more than one more computing thread: the threads wait for each other, and with the
    scheduler on the same CPU answers took up to twice as long (2 cores, 600-token prompts).
    """
    allowed = sorted(os.sched_getaffinity(0))
    cores: dict[str, int] = {}
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(siblings.read_text() if siblings.exists() else str(cpu), cpu)
    cpus = list(cores.values())
    return ",".join(map(str, cpus[:-1] if 1 < len(cpus) == len(allowed) else cpus))


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def leave_on_signals() -> None:
    """Turn SIGTERM and SIGHUP into SystemExit, so that every `with Server` stops its server."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)


SAMPLE = (
    "The lighthouse keeper of Skerry Point found a brass key in the belly of a fish, and on it the words: third stair, "
    "seventh stone. Nobody has opened the north tower for ninety years. You are the apprentice, curious, quick with "
    "knots and afraid of the dark. Tell how you talk the keeper into climbing the tower tonight, what you take along, "
    "and what waits behind the seventh stone."
)


def sample_request(model: str) -> dict[str, object]:
    messages = [{"role": "user", "content": SAMPLE}]
    return {"model": model, "messages": messages, "stream": False, "max_tokens": 30, "temperature": 0}


def curl(server: Server) -> str:
    body = shlex.quote(json.dumps(sample_request(server.name)))
    return f"curl {server.url}/v1/chat/completions -H 'Content-Type: application/json' -d {body}"


def cache_settings(cpu_cache_gb: str) -> tuple[float, int]:
    """(GB of host memory, port of the status page or 0). The user's DYN_KVBM_* variables count; an argument wins."""
    given = {"DYN_KVBM_CPU_CACHE_GB": cpu_cache_gb} if cpu_cache_gb else {}
    config = settings.load(environ={"DYN_KVBM_CPU_CACHE_GB": "2", "DYN_KVBM_METRICS": "1", **os.environ, **given})
    if not config.metrics:
        return config.cpu_cache_gb, 0
    is_chosen = config.sources["metrics_port"] != settings.DEFAULT
    port = config.metrics_port if is_chosen or is_free(config.metrics_port) else free_port()
    return config.cpu_cache_gb, port


def log_of(port: int) -> Path:
    """Two servers must not write into one file."""
    return Path(f"demo-results/serve-{port}.log")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a folder or a Hugging Face name (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--cpu-cache-gb", default="", help="default: DYN_KVBM_CPU_CACHE_GB, or 2")
    parser.add_argument("--log", type=Path, help="default: demo-results/serve-PORT.log, one for each server")
    args = parser.parse_args()
    args.log = args.log or log_of(args.port)
    leave_on_signals()
    try:
        size, metrics_port = cache_settings(args.cpu_cache_gb)
    except settings.ConfigError as error:
        parser.error(str(error))
    server = Server(
        args.model or str(models.smollm2()),
        args.log,
        kvbm=True,
        port=args.port,
        cpu_cache_gb=size,
        metrics_port=metrics_port,
    )
    try:
        server.require_port()
        print(f"Starting vLLM with KVBM on {server.url}, log in {args.log}", flush=True)
        with server:
            page = f"\n\nWatch it: http://127.0.0.1:{server.metrics_port}" if server.metrics_port else ""
            print(f"\nAsk it (one short prompt shows no hit yet):\n\n{curl(server)}{page}")
            print("Ctrl-C stops the server.", flush=True)
            try:
                status = server.wait()
            except KeyboardInterrupt:
                print(f"\n{STOPPING}", flush=True)
                raise
            raise server.failure(f"vllm serve ended with status {status}")
    except ServerError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped")
        return 0


if __name__ == "__main__":
    sys.exit(main())
