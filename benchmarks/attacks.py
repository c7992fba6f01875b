#!/usr/bin/env python3
"""Decode steps of a real vLLM while others on the machine use its metrics port and its control socket to excess.

    python benchmarks/attacks.py --json benchmarks/results/attacks.json
    PYTHONPATH=/path/to/other/src python benchmarks/attacks.py --json before.json     # the same of another version

The engine decodes with a tiny model in this process, on a CPU or a GPU, with one core and one thread of the host;
attackers, a scraper and the process that answers on the metrics port share another core, so the benchmark measures
only what crosses over. Each round takes every attack once, in another order. A stretch of steps without an attack
runs before and after each stretch under attack. The benchmark compares the 99th percentile of all steps under an
attack with that of all steps of its neighbours, so a drift of the machine meets both sides alike. The interval beside
it is the middle 90 % of 200 draws of rounds (bootstrap). Time during which another program has the engine's core does
not count (schedstat); time spent waiting for the interpreter does. A scraper asks for /metrics all along.

--cpu needs no vLLM and no quiet machine: it gives the CPU time that each attack takes of the engine's process.

Ends with status 1 when an attack raises the p99 by more than 5 %, or when a scrape fails. Needs vLLM; as root the
attackers are another user than the engine, but for the clients of the control socket.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from cores import keep_to

ATTACKS: dict[str, tuple[str, int]] = {  # name -> (what an attacker does, how many processes do it)
    "none": ("", 0),
    "one client of /metrics": ("metrics", 1),
    "8 clients of /metrics": ("metrics", 8),
    "8 clients of /api/state": ("state", 8),
    "64 slow connections": ("slow", 1),
    "8 clients of the control socket": ("control", 8),
    "8 strangers at the control socket": ("strangers", 8),
}
LIMIT_PERCENT = 5.0
STRANGER = 65534  # nobody
REQUESTS, PROMPT_TOKENS = 4, 64


# -- attackers: processes of their own, without vLLM -----------------------------------------------------------------


def attack(kind: str, port: int, control: str) -> None:
    print("ready", flush=True)
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            attempt(kind, port, control)
        time.sleep(0.0005)  # a refused attacker that only spins is no load on the engine


def end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def attempt(kind: str, port: int, control: str) -> None:
    """Until the other end has had enough."""
    if kind == "slow":
        held = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(64)]
        for each in held:
            each.sendall(b"GET /metrics HTTP/1.1\r\nHost:")
        held[0].recv(1)
    elif kind in ("control", "strangers"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as leader:
            leader.connect(f"\0{control}")
            if kind == "control":
                leader.sendall(b'{"do": "status"}\n')
            leader.recv(65536)
    else:
        path = "/metrics" if kind == "metrics" else "/api/state?requests=256"
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        while True:
            connection.request("GET", path)
            connection.getresponse().read()


def scrape(port: int) -> None:
    """Until it is told to end; then says when each scrape began, how long it took, and whether it failed."""
    scrapes = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(print(json.dumps(scrapes))))
    print("ready", flush=True)
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    while True:
        began = time.monotonic()
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/metrics")
            body = connection.getresponse().read()
            connection.close()
            assert b"kvbm_info{" in body
            scrapes.append((began, time.monotonic() - began, ""))
        except (OSError, http.client.HTTPException, AssertionError) as error:
            scrapes.append((began, time.monotonic() - began, repr(error)))
        time.sleep(max(0.0, 0.5 - (time.monotonic() - began)))


class Helpers:
    """Attackers or scrapers on a core of their own, until they are ended."""

    def __init__(self, arguments: list[str], count: int, core: set[int], user: int | None = None) -> None:
        command = [sys.executable, "-S", __file__, *arguments]
        command += ["--user", str(user)] if user is not None else []
        self._all = [
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            for _ in range(count)
        ]
        for each in self._all:
            os.sched_setaffinity(each.pid, core)
            assert each.stdout is not None
            assert each.stdout.readline() == "ready\n"

    def end(self) -> list[str]:
        for each in self._all:
            each.terminate()
        return [each.communicate(timeout=30)[0] for each in self._all]


# -- the engine -------------------------------------------------------------------------------------------------------


class Engine:
    """Decodes for ever, a step at a time."""

    def __init__(self, model: str, dtype: str, port: int) -> None:
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig

        extra = {"cpu_cache_override_num_blocks": 256, "metrics": True, "metrics_port": port}
        llm = LLM(
            model=model, dtype=dtype, enforce_eager=True, max_model_len=1024, block_size=32,
            num_gpu_blocks_override=512, disable_log_stats=True, seed=0,
            kv_transfer_config=KVTransferConfig(
                kv_connector="DynamoConnector", kv_connector_module_path="kvbm.vllm_integration.connector",
                kv_role="kv_both", kv_load_failure_policy="recompute", kv_connector_extra_config=extra,
            ),
        )  # fmt: skip
        self._engine = llm.llm_engine
        self._params = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
        self._random = random.Random(0)
        self._number = 0
        self._schedule = open(f"/proc/self/task/{threading.get_native_id()}/schedstat")  # noqa: SIM115

    def steps(self, count: int) -> list[float]:
        """Milliseconds of so many steps that decode and do nothing else."""
        times: list[float] = []
        while len(times) < count:
            if not self._engine.has_unfinished_requests():
                self._add()
            waited, began = self._queued(), time.perf_counter()
            self._engine.step()
            times.append(1e3 * (time.perf_counter() - began) - (self._queued() - waited) / 1e6)
        return times

    def _queued(self) -> int:
        """Nanoseconds that this thread could have run, while another program had the core."""
        self._schedule.seek(0)
        return int(self._schedule.read().split()[1])

    def _add(self) -> None:
        for _ in range(REQUESTS):
            self._number += 1
            tokens = [self._random.randrange(100, 400) for _ in range(PROMPT_TOKENS)]
            self._engine.add_request(f"request-{self._number}", {"prompt_token_ids": tokens}, self._params)
        for _ in range(8):  # prompts
            self._engine.step()


def child_of_metrics() -> int | None:
    """The process that answers on the metrics port, in versions that have one."""
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text().split():
            with contextlib.suppress(OSError):
                if b"kvbm.observe.web" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
    return None


def control_address() -> str:
    lines = Path("/proc/net/unix").read_text().splitlines()
    names = (line.rpartition(" ")[2] for line in lines)
    mine = f"@kvbm-control/{os.getuid()}/{os.getpid()}/"
    return next((name[1:] for name in names if name.startswith(mine)), "")


def percentile(times: list[float], percent: int) -> float:
    return sorted(times)[len(times) * percent // 100]


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    cores = sorted(os.sched_getaffinity(0))
    here, there = {cores[0]}, {cores[-1]}
    engine = Engine(options.model, options.dtype, options.port)
    keep_to(here, os.getpid())
    time.sleep(1)
    if (child := child_of_metrics()) is not None:
        os.sched_setaffinity(child, there)
        os.setpriority(os.PRIO_PROCESS, child, 19)  # as it is beside an engine that is not raised
    control = control_address()
    engine.steps(200)
    pairs: dict[str, list[Pair]] = {name: [] for name in ATTACKS if name != "none"}
    moments: list[tuple[str, float, float]] = []  # of which attack, from when to when
    scraper = Helpers(["--scrape", "--port", str(options.port)], 1, there)

    def stretch(name: str) -> list[float]:
        kind, count = ATTACKS[name]
        user = STRANGER if os.getuid() == 0 and kind != "control" else None
        attackers = Helpers(["--attack", kind, "--port", str(options.port), "--control", control], count, there, user)
        began = time.monotonic()
        engine.steps(20)
        times = engine.steps(options.steps)
        moments.append((name, began, time.monotonic()))
        attackers.end()
        return times

    deadline = time.monotonic() + options.seconds
    quiet = [stretch("none")]
    for number in range(options.rounds):
        for name in random.Random(number).sample(list(pairs), len(pairs)):
            attacked = stretch(name)
            quiet.append(stretch("none"))
            pairs[name].append(Pair(attacked, quiet[-2] + quiet[-1]))
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
        if time.monotonic() > deadline:
            break
    scrapes: dict[str, list[tuple[float, str]]] = {name: [] for name in ATTACKS}
    for at, seconds, error in json.loads(scraper.end()[0]):
        for name, began, ended in moments:
            if began <= at <= ended:
                scrapes[name].append((seconds, error))
    rows = [row("none", [Pair(times, times) for times in quiet], scrapes["none"])]
    return rows + [row(name, rounds, scrapes[name]) for name, rounds in pairs.items()]


class Pair(NamedTuple):
    """Milliseconds of steps: of a stretch under attack, and of the stretches before and after it."""

    attacked: list[float]
    quiet: list[float]


def rise(rounds: Sequence[Pair]) -> float:
    """Percent by which the 99th percentile of a step rises under attack."""
    attacked = percentile([time for pair in rounds for time in pair.attacked], 99)
    return 100 * (attacked / percentile([time for pair in rounds for time in pair.quiet], 99) - 1)


def row(name: str, rounds: Sequence[Pair], scrapes: list[tuple[float, str]]) -> dict[str, Any]:
    every = [time for pair in rounds for time in pair.attacked]
    quiet = [time for pair in rounds for time in pair.quiet]
    draw = random.Random(0)
    rises = [] if name == "none" else [rise(draw.choices(rounds, k=len(rounds))) for _ in range(200)]
    return {
        "attack": name, "steps": len(every), "median_ms": round(statistics.median(every), 3),
        "p99_ms": round(percentile(every, 99), 3), "neighbours_p99_ms": round(percentile(quiet, 99), 3),
        "longest_ms": round(max(every), 1), "p99_percent": round(rise(rounds), 1),
        "p99_percent_interval": [round(percentile(rises, percent), 1) for percent in (5, 95)] if rises else [],
        "scrapes": len(scrapes), "scrapes_failed": sum(bool(error) for _, error in scrapes),
        "slowest_scrape_s": round(max((seconds for seconds, _ in scrapes), default=0.0), 3),
    }  # fmt: skip


def keep(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    if options.json:
        about = {
            "taken": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "processor": f"{os.cpu_count()} cores", "python": ".".join(map(str, sys.version_info[:3])),
        }  # fmt: skip
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**about, "rows": rows}, indent=2) + "\n")


def measure_cpu(seconds: float = 2.0) -> list[dict[str, Any]]:
    """Milliseconds a second that the threads of the engine's process take, beside one that does nothing."""
    from kvbm.control.socket import Controller, ControlServer
    from kvbm.observe.server import Server
    from observe import Bookkeeping

    books = Bookkeeping()
    for _ in range(60):
        books.request()
    server = Server(books.source, "127.0.0.1", 0)
    server.start()
    control = ControlServer(Controller(threading.RLock(), lambda: books.leader, {}, lambda: True), "attacked")
    time.sleep(1)
    rows = []
    for name, (kind, count) in ATTACKS.items():
        user = STRANGER if os.getuid() == 0 and kind != "control" else None
        arguments = ["--attack", kind, "--port", str(server.port), "--control", control.address]
        attackers = Helpers(arguments, count, os.sched_getaffinity(0), user)
        time.sleep(0.3)
        used, began = time.process_time() - time.thread_time(), time.monotonic()
        time.sleep(seconds)
        used = time.process_time() - time.thread_time() - used
        rows.append({"attack": name, "cpu_ms_a_second": round(1e3 * used / (time.monotonic() - began), 1)})
        attackers.end()
        print(f"{name:36} {rows[-1]['cpu_ms_a_second']:7.1f} ms of CPU time a second")
    server.close()
    control.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a tiny model (scripts/models.py tiny)")
    parser.add_argument("--dtype", default="float32", help="of the model (float32; a GPU wants bfloat16)")
    parser.add_argument("--rounds", type=int, default=40, metavar="N", help="(40)")
    parser.add_argument("--steps", type=int, default=250, metavar="N", help="of a stretch (250)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no further round after so many")
    parser.add_argument("--port", type=int, default=16880)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--cpu", action="store_true", help="CPU time of the engine's process, without vLLM")
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    parser.add_argument("--scrape", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--control", default="", help=argparse.SUPPRESS)
    parser.add_argument("--user", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack or options.scrape:
        os.nice(-os.nice(0))  # as any program
        "".encode("idna")  # imported while it can be read
    if options.user is not None:
        os.setuid(options.user)
    if options.attack:
        attack(options.attack, options.port, options.control)
    if options.scrape:
        scrape(options.port)
    if options.cpu:
        keep(measure_cpu(), options)
        return 0
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }  # fmt: skip
    if options.model is None:
        script = Path(__file__).parents[1] / "scripts" / "models.py"
        options.model = subprocess.check_output([sys.executable, script, "tiny"], text=True).strip()
    with contextlib.suppress(PermissionError):
        os.nice(-15)  # other programs on the machine disturb less
    rows = measure(options)
    for row in rows:
        print(
            f"{row['attack']:36} step {row['median_ms']:7.2f} ms, p99 {row['p99_ms']:7.2f} ms "
            f"({row['p99_percent']:+.1f} %, {row['p99_percent_interval']}), longest {row['longest_ms']:.0f} ms; "
            f"{row['scrapes']} scrapes, "
            f"{row['scrapes_failed']} failed, "
            f"slowest {row['slowest_scrape_s']:.2f} s"
        )
    keep(rows, options)
    bad = any(row["p99_percent"] > LIMIT_PERCENT or row["scrapes_failed"] for row in rows)
    sys.stdout.flush()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
