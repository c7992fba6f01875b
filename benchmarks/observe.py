#!/usr/bin/env python3
"""What being looked at costs an engine: scraping four times a second, the web page, and recording.

    python benchmarks/observe.py --json benchmarks/results/observe.json

The thread that makes snapshots and the record share the interpreter with the engine's scheduler (the process that
renders and answers does not, and is not measured here), so the worst case is an engine that never lets go of it. Here
that is a loop of real bookkeeping (lookups, stores, loads, requests) with nothing else in it; an engine that spends its
time in kernels loses less. A client in a process of its own scrapes, on and off in turn. What counts is CPU time, which
other programs on the machine change little: that of the server's thread, all of which the loop may have to wait for,
and what a request costs the loop's own thread more than without, in the median over pairs of stretches.

Ends with status 1 when scraping costs more than 0.5 % or recording more than 1 %.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import platform
import re
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from kvbm.core.cost import CostModel
from kvbm.core.manager import BlockManager
from kvbm.core.pool import Pool
from kvbm.observe.record import Record, Sink
from kvbm.observe.requests import LOADED, NOT_FOUND, Admission, RequestLog
from kvbm.observe.server import Server
from kvbm.observe.snapshot import Identity
from kvbm.observe.source import LeaderSource
from kvbm.plans import LoadResult, Report, StoreResult
from kvbm.runtime.leader import Leader
from kvbm.tiers.registry import NEAR, priors

BLOCKS = 512  # of a request: 8k tokens
RANKS = 2
SCRAPES_A_SECOND = 4  # the engine makes no more snapshots than that
# An H200 computes 8k tokens of Qwen3-8B in a quarter of a second, and loads them in 25 ms (benchmarks/gpu).
BUSIEST_REQUESTS_A_SECOND = 40
SCRAPE_LIMIT, RECORD_LIMIT = 0.5, 1.0  # percent


class Bookkeeping:
    """A leader with a request in every call of :meth:`request`."""

    def __init__(self) -> None:
        self.log = RequestLog()
        self.cost = CostModel(priors())
        sizes = [600_000] * RANKS
        self.leader = Leader(BlockManager({NEAR.name: Pool(100_000)}), RANKS, 1 << 20, sizes, self.cost, self.log)
        identity = Identity(
            kvbm="0", engine="none", engine_version="0", model="benchmark", ranks=RANKS, block_tokens=16,
            block_bytes=sum(sizes), engine_blocks=10_000,
        )  # fmt: skip
        self.source = LeaderSource(identity, lambda: self.leader, self.log, self.cost, {})
        self._number = 0
        self._prompts = [[os.urandom(32) for _ in range(BLOCKS)] for _ in range(300)]

    def request(self) -> None:
        """Look up, load or store, finish: all that the leader does for a request of 8k tokens."""
        self._number += 1
        name = f"request-{self._number}"
        keys = self._prompts[self._number * 7919 % len(self._prompts)]
        match = self.leader.manager.lookup(keys)
        blocks = list(range(BLOCKS))
        if match.blocks:
            load = self.leader.onboard(match, name, blocks[: match.blocks], True)
            self._admit(name, match.blocks, load.id)
            for rank in range(RANKS):
                self.leader.apply([Report(rank, loads=[LoadResult(load.id, [], 0.01)])])
        else:
            self._admit(name, 0, None)
            store = self.leader.offload(keys, blocks)
            if store is not None:
                for rank in range(RANKS):
                    self.leader.apply([Report(rank, stores=[StoreResult(store.id, True, 0.01)])])
        self.log.finished(name, 100, keys)

    def _admit(self, name: str, found: int, plan: int | None) -> None:
        self.log.admitted(
            Admission(name, 16 * BLOCKS + 1, 0, BLOCKS, None, {NEAR.name: found} if found else {}, found, 16,
                      LOADED if found else NOT_FOUND, "", True, 0.2, 0.1, 0.3), plan,
        )  # fmt: skip


def client(port: int, path: str, on: Event, stop: Event) -> None:
    """Scrapes while it is told to."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    while not stop.is_set():
        if on.wait(0.05):
            began = time.monotonic()
            connection.request("GET", path, headers={"Accept-Encoding": "gzip", "User-Agent": "Prometheus/2.42.0"})
            connection.getresponse().read()
            time.sleep(max(0.0, 1 / SCRAPES_A_SECOND - (time.monotonic() - began)))


def thread_seconds(names: tuple[str, ...]) -> float:
    """CPU time of this process's threads with such names."""
    wanted = {thread.native_id for thread in threading.enumerate() if thread.name.startswith(names)}
    return sum(int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) for thread in wanted) / 1e9


def stretch(work: Callable[[], None], seconds: float) -> float:
    """CPU time that the work takes this thread."""
    done = 0
    end = time.perf_counter() + seconds
    began = time.thread_time()
    while time.perf_counter() < end:
        work()
        done += 1
    return (time.thread_time() - began) / done


def measure_scraping(path: str, pairs: int, seconds: float) -> dict[str, Any]:
    books = Bookkeeping()
    for _ in range(600):
        books.request()
    server = Server(books.source, "127.0.0.1", 0)
    server.start()
    context = multiprocessing.get_context("spawn")
    on, stop = context.Event(), context.Event()
    scraper = context.Process(target=client, args=(server.port, path, on, stop), daemon=True)
    scraper.start()
    try:
        on.set()
        stretch(books.request, 1.0)  # the client has started when this is over
        losses = []
        busy = used = 0.0
        for pair in range(pairs):
            costs = {}
            for scraping in (True, False) if pair % 2 else (False, True):
                (on.set if scraping else on.clear)()
                time.sleep(0.15)
                before = thread_seconds(("Thread-", "kvbm"))
                costs[scraping] = stretch(books.request, seconds)
                if scraping:
                    used += thread_seconds(("Thread-", "kvbm")) - before
                    busy += seconds
            losses.append(100 * (costs[True] / costs[False] - 1))
    finally:
        stop.set()
        scraper.join(10)
        server.close()
    return {
        "what": f"{SCRAPES_A_SECOND} times {path} a second",
        "loss_percent": statistics.median(losses),
        "spread_percent": [round(value, 3) for value in statistics.quantiles(losses, n=4)],
        "cpu_percent": 100 * used / busy,
        "pairs": pairs,
    }


def measure_recording(pairs: int, requests: int) -> dict[str, Any]:
    """Time of the engine's thread for a request, with a record and without, and the CPU time of the writer."""
    books = Bookkeeping()
    for _ in range(600):
        books.request()
    with tempfile.TemporaryDirectory() as folder:
        record = Record(Path(folder), 1 << 33, books.leader.clock, block_size=16)
        differences = []
        writer = 0.0
        for pair in range(pairs):
            took = {}
            for recording in (True, False) if pair % 2 else (False, True):
                books.log.record = record if recording else Sink()
                before = thread_seconds(("kvbm-record",))
                began = time.thread_time()
                for _ in range(requests):
                    books.request()
                took[recording] = (time.thread_time() - began) / requests
                while record._queue.qsize():
                    time.sleep(0.01)
                if recording:
                    writer += thread_seconds(("kvbm-record",)) - before
            differences.append(took[True] - took[False])
        record.close()
        assert not record.dropped, record.dropped
        size = record.path.stat().st_size / (pairs * requests)
    engine_us = statistics.median(differences) * 1e6
    writer_us = writer / (pairs * requests) * 1e6
    return {
        "what": f"recording requests of {BLOCKS} blocks",
        "engine_us": engine_us,
        "writer_us": writer_us,
        "bytes": size,
        "percent": (engine_us + writer_us) * BUSIEST_REQUESTS_A_SECOND / 1e4,
    }


def circumstances() -> dict[str, Any]:
    processors = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "taken": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "processor": processors[0] if processors else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],  # in the last minute, this benchmark's own included
        "python": platform.python_version(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30, metavar="N", help="stretches with and without, each (30)")
    parser.add_argument("--seconds", type=float, default=1.0, metavar="S", help="length of a stretch (1)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    results = [
        measure_scraping(path, options.pairs, options.seconds) for path in ("/metrics", "/api/state?requests=40")
    ]
    for row in results:
        low, _, high = row["spread_percent"]
        print(
            f"{row['what']:45} {row['cpu_percent']:.3f} % of the CPU time of a core; the loop itself takes "
            f"{row['loss_percent']:+.2f} % more (half of all pairs {low} to {high})"
        )
    recording = measure_recording(options.pairs, 100)
    print(
        f"{recording['what']:45} {recording['engine_us']:.0f} µs of the engine's thread and "
        f"{recording['writer_us']:.0f} µs of the writer's a request, {recording['bytes']:.0f} bytes: "
        f"{recording['percent']:.3f} % at {BUSIEST_REQUESTS_A_SECOND} requests a second"
    )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**circumstances(), "rows": [*results, recording]}, indent=2) + "\n")
    scraping = results[0]["cpu_percent"]
    return 1 if scraping > SCRAPE_LIMIT or recording["percent"] > RECORD_LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
