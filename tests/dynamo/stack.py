"""Dynamo on this machine, as the launch scripts start it: etcd and NATS if wanted, a frontend, workers on the CPU."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from processes import Process
from servers import free_ports

PROJECT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
HOW = "`make test-dynamo` installs it"  # what is missing
ANSWER = 12  # tokens of an answer that is compared
START_SECONDS = 420  # several engines at once on a small, busy machine


def prompt(seed: int, words: int = 120) -> str:
    """About 330 tokens that no other seed shares."""
    source = random.Random(seed)
    return " ".join("".join(source.choices("abcdefghij", k=4)) for _ in range(words))


def fetch(url: str, body: dict[str, Any] | None = None, timeout: float = 120) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=timeout) as response:
        return response.read().decode()


def wait_until(what: str, is_so: Callable[[], Any], seconds: float = 30, process: Process | None = None) -> Any:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if found := is_so():
                return found
        except (OSError, ValueError, AssertionError):
            pass
        gone = process is not None and process.popen.poll() is not None
        if gone or time.monotonic() > deadline:
            raise AssertionError(f"{what}: not after {seconds} s{'' if process is None else tail(process)}")
        time.sleep(0.5)


def server(name: str) -> str:
    """The program, or the test ends here."""
    if not (BIN / name).exists():
        pytest.skip(f"{name} is not installed beside this Python; {HOW}")
    return str(BIN / name)


def tail(process: Process) -> str:
    """The last lines that a script and its processes have printed."""
    return "".join(f"\n{line[:300]}" for line in process.log.read_text(errors="replace").splitlines()[-100:])


class Servers:
    """etcd and NATS, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        client, peer, nats, monitor = free_ports(4)
        self.etcd = f"http://127.0.0.1:{client}"
        self._etcd_command = [
            server("etcd"), "--data-dir", str(folder / "etcd"), "--listen-client-urls", self.etcd,
            "--advertise-client-urls", self.etcd, "--listen-peer-urls", f"http://127.0.0.1:{peer}",
            "--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}",
            "--initial-cluster", f"default=http://127.0.0.1:{peer}", "--log-level", "error",
        ]  # fmt: skip
        self._folder = folder
        self.processes: dict[str, Process] = {}
        self.start_etcd()
        self.processes["nats"] = Process(
            [server("nats-server"), "-a", "127.0.0.1", "-p", str(nats), "-m", str(monitor), "-js", "-sd",
             str(folder / "nats")], folder / "nats.log",
        )  # fmt: skip
        self.env = {
            "ETCD_ENDPOINTS": self.etcd, "NATS_SERVER": f"nats://127.0.0.1:{nats}", "DYN_DISCOVERY_BACKEND": "etcd",
            "DYN_EVENT_PLANE": "nats",
        }  # fmt: skip
        wait_until("NATS answers", lambda: fetch(f"http://127.0.0.1:{monitor}/healthz"))

    def start_etcd(self) -> None:
        self.processes["etcd"] = Process(self._etcd_command, self._folder / "etcd.log")
        wait_until("etcd answers", lambda: "true" in fetch(f"{self.etcd}/health"), process=self.processes["etcd"])

    def close(self) -> None:
        for process in self.processes.values():
            process.end()


def no_servers(folder: Path) -> dict[str, str]:
    """What Dynamo needs to do without."""
    (folder / "discovery").mkdir()
    return {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(folder / "discovery"), "DYN_EVENT_PLANE": "zmq"}


class Stack:
    """One launch script and what it has started."""

    def __init__(self, script: str, workers: int, model: str, folder: Path, env: dict[str, str]) -> None:
        ports = free_ports(1 + 5 * workers)
        # Sockets live here, whose names may not be long; and what Dynamo and vLLM leave behind goes with it.
        self._temporary = Path(tempfile.mkdtemp(prefix="d"))
        self.env = env
        self.url = f"http://127.0.0.1:{ports[0]}"
        self.metrics_ports = ports[1 : 1 + workers]
        given = {
            "KVBM_DEVICE": "cpu",
            "PYTHON": sys.executable,
            "PYTHONPATH": f"{PROJECT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "TMPDIR": str(self._temporary),
            "MODEL": model,
            "SERVED_MODEL_NAME": "m",
            "DYN_HTTP_PORT": str(ports[0]),
            "METRICS_PORT": str(ports[1]),
            "SIDE_PORT": str(ports[1 + workers]),
            "PUB_PORT": str(ports[1 + 2 * workers]),
            "DYN_KVBM_CPU_CACHE_GB": "0.2",
            "DYN_KVBM_METRICS": "1",
            "KVBM_LOAD": "always",
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "ENGINE_ARGS": "--max-model-len 1024 --num-gpu-blocks-override 48",
            **env,
        }
        command = [str(PROJECT / "examples" / "vllm" / "launch" / script)]
        self.process = Process(command, folder / f"{script}.log", given)

    def ready(self, workers: int) -> None:
        """All workers serve the model, and answer."""
        wait_until("the model is served", lambda: self.models(), START_SECONDS, self.process)
        wait_until("all workers are there", lambda: len(self.instances()) >= workers, START_SECONDS, self.process)
        wait_until("it answers", lambda: self.chat("Hello", max_tokens=1), 120, self.process)

    def models(self) -> list[str]:
        return [model["id"] for model in json.loads(fetch(f"{self.url}/v1/models"))["data"]]

    def instances(self) -> list[int]:
        """Workers that the frontend knows."""
        health = json.loads(fetch(f"{self.url}/health"))
        found = {i["instance_id"] for i in health.get("instances", ()) if i.get("endpoint") == "generate"}
        return sorted(found)

    def chat(self, prompt: str, max_tokens: int = 8, **more: Any) -> tuple[str, dict[str, Any]]:
        body = {
            "model": "m", "messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens,
            "temperature": 0, "ignore_eos": True, **more,
        }  # fmt: skip
        try:
            answer = json.loads(fetch(f"{self.url}/v1/chat/completions", body))
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{error}: {error.read().decode(errors='replace')}{tail(self.process)}") from None
        return answer["choices"][0]["message"]["content"], answer["usage"]

    def figures(self, worker: int) -> dict[str, float]:
        """KVBM's metrics of one worker, in the order of the script, not older than this call: the metrics port makes a
        snapshot a second, and answers in between from the last one."""
        url, asked = f"http://127.0.0.1:{self.metrics_ports[worker]}", time.time()
        while json.loads(fetch(f"{url}/api/state"))["at"] < asked:
            time.sleep(0.1)
        return _figures(fetch(f"{url}/metrics"))

    def frontend_figures(self) -> dict[str, float]:
        """The router's metrics. Events that it has applied also by what became of them."""
        text = fetch(f"{self.url}/metrics")
        found = _figures(text)
        applied = r'kv_cache_events_applied{.*?event_type="(\w+)".*?status="(\w+)".*?} (\S+)'
        for kind, status, value in re.findall(applied, text):
            name = f"events {kind} {'ok' if status == 'ok' else 'refused'}"
            found[name] = found.get(name, 0.0) + float(value)
        return found

    def peer_server(self, worker: int) -> int:
        """The process beside a worker that serves its host memory. It has a session of its own."""
        mark = f"DYN_KVBM_METRICS_PORT={self.metrics_ports[worker]}".encode()
        (pid,) = {pid for pid, session, environment in _processes() if mark in environment and _is_peer_server(pid)}
        return pid

    def kill_worker(self, worker: int) -> None:
        """At once and with all its processes: the session of the one that has the worker's port in its environment."""
        mark = f"DYN_KVBM_METRICS_PORT={self.metrics_ports[worker]}".encode()
        processes = [each for each in _processes() if not _is_peer_server(each[0])]
        (session,) = {session for _, session, environment in processes if mark in environment}
        pids = [pid for pid, other, _ in processes if other == session]
        mapped = {inode for pid in pids for inode in _shared_memory(pid)}
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for segment in Path("/dev/shm").iterdir():  # vLLM's own, which nobody is left to remove
            if segment.stat().st_ino in mapped:
                segment.unlink()

    def close(self) -> None:
        """As a user would: the script ends what it has started."""
        self.process.popen.terminate()
        try:
            self.process.popen.wait(60)
        finally:
            self.process.end()
            shutil.rmtree(self._temporary, ignore_errors=True)


def _processes() -> Iterator[tuple[int, int, list[bytes]]]:
    """(number, session, environment) of all that may be looked into. A process that has renamed itself has no longer
    the environment it was started with."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            session = int((entry / "stat").read_text().rpartition(")")[2].split()[3])
            yield int(entry.name), session, (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue


def _is_peer_server(pid: int) -> bool:
    try:
        return b"kvbm.tiers.peers.server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _shared_memory(pid: int) -> Iterator[int]:
    """Numbers of the files in /dev/shm that a process has mapped. A semaphore was mapped before it had its name."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        _, _, _, _, inode, *name = line.split()
        if name and name[0].startswith("/dev/shm/"):
            yield int(inode)


def _figures(text: str) -> dict[str, float]:
    """Name (labels left out, values summed) -> value."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if match := re.match(r"([A-Za-z_:][\w:]*)(\{.*\})? ([-+.\deEinfNa]+)$", line):
            found[match[1]] = found.get(match[1], 0.0) + float(match[3])
    return found
