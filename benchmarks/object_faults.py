"""`object_engine.py faults`: what requests take while the object store fails, beside the same engine without a store.

One engine a fault, in a process of its own. It answers requests in pairs, one with the tier and one with the tier
switched off (the catalog finds, expects and takes nothing, as without a store): two engines that are equal differ by
more than the limit, and what another program does for half a second slows both requests of a pair. Before the fault
begins the engine has looked for a part of the prompts, so that it meets the fault both in loads of blocks that it knows
and in lookups. The requests that reach the store during the fault are counted.

The thread that computes has the last core to itself. The store, the proxy, the tier's process and all other threads of
the engine share the other cores. The clock of a request stands still while another program has the engine's core. A
request that another program has interrupted counts on neither side, because it finds its caches cold, unless it
waited for the tier.

The kind "off" has the tier switched off on both sides: what it shows is the noise of the machine. For each request the
benchmark also adds up the time in which the engine had nothing to compute, because the request waited for the tier.
What p99 owes to that is free of the noise between two sides: it compares one side with itself.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from typing import Any, NamedTuple

from object_requests import BLOCK_TOKENS, Engine, kvbm_settings, model_path, percentile, prompt, seaweed
from object_steps import rise

MAX_P99_PERCENT = 2.0
MAX_SECONDS = 5.0  # a request that takes longer hangs
FAULTS = (
    "off", "none", "wrong secret", "missing bucket", "500", "stall", "reset", "truncate", "flip", "skew",
    "one truncated object", "one flipped bit", "one object of another key", "killed and restarted",
)  # fmt: skip
_WARM_REQUESTS = 10
_KNOWN_SHARE = 0.2  # of the prompts, that the engine has looked for before the fault
_WAITS = 10  # the longest that are written down
_GROUP = 10  # pairs that the intervals take for one observation: what disturbs one disturbs its neighbours
_PROMPTS = 200  # different ones: a prompt comes again when neither vLLM nor host memory has it
_MIN_WAIT = 0.001  # seconds: a request that computes has none
_MAX_DISTURBED = 0.0002  # seconds in which another program had the engine's core
_ENGINE_CORE = {max(os.sched_getaffinity(0))}
_OTHER_CORES = os.sched_getaffinity(0) - _ENGINE_CORE or _ENGINE_CORE


class Proxy:
    """The tests' proxy with faults, in a process of its own: the engines are measured in this one."""

    def __init__(self, upstream: int) -> None:
        command = [sys.executable, __file__, str(upstream)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.endpoint = f"http://127.0.0.1:{self._said()}"

    def set_fault(self, fault: str) -> None:
        self._say(f"fault {fault}")

    def count(self, path: str = "") -> int:
        """Requests since the last call whose path has this in it."""
        return int(self._say(f"count {path}"))

    def _say(self, line: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._said()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _said(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def serve_proxy(upstream: str) -> None:
    from object_servers import FaultProxy

    proxy = FaultProxy(int(upstream))
    print(proxy.port, flush=True)
    for line in sys.stdin:
        what, _, value = line.strip().partition(" ")
        if what == "fault":
            proxy.set_fault(value)
            print("set", flush=True)
        else:
            requests, proxy.requests = proxy.requests, []
            print(sum(value in path for _, path in requests), flush=True)


class RemoteEngine:
    """An engine in a process that is forked from this one, which has imported vLLM."""

    def __init__(self, *arguments: Any) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, its = context.Pipe()
        self._process = context.Process(target=_serve, args=(its, arguments), daemon=True)
        self._process.start()
        its.close()
        self._pipe.recv()

    def __call__(self, name: str, *arguments: Any) -> Any:
        self._pipe.send((name, arguments))
        return self._pipe.recv()

    def close(self) -> None:
        self("close")
        self._process.join(60)
        self._process.kill()


def _serve(pipe: Any, arguments: tuple[Any, ...]) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a benchmark that crashes leaves no engine behind
    engine = Engine(*arguments)
    _leave_the_core_alone()

    def use_store(use: bool) -> None:
        engine.catalog._is_reset = not use

    calls = {
        "ask": lambda seed, tokens, answer: (
            *engine.ask(prompt(seed, tokens), answer),
            engine.waited,
            engine.disturbed,
        ),
        "drain": engine.drain,
        "use_store": use_store,
        "loaded": lambda: engine.counts.onboarded_blocks.get("object", 0),
        "objects": lambda: [item.name for item in engine.catalog._clients[0].list("kvbm-1/") if "/0/" in item.name],
        "collect": gc.collect,
        "close": engine.close,
    }
    gc.freeze()
    gc.disable()  # not in the middle of a request
    pipe.send("ready")
    name = ""
    while name != "close":
        name, given = pipe.recv()
        pipe.send(calls[name](*given))


def _leave_the_core_alone() -> None:
    """The last core is for this thread. The other threads, those that begin later too, stay on the other cores."""
    start = threading.Thread.start

    def start_elsewhere(thread: threading.Thread) -> None:
        start(thread)
        with contextlib.suppress(OSError):  # it has ended
            os.sched_setaffinity(thread.native_id or 0, _OTHER_CORES)

    threading.Thread.start = start_elsewhere  # type: ignore[method-assign]
    os.sched_setaffinity(0, _ENGINE_CORE)


class Trouble:
    """One fault, from its beginning to its end."""

    def __init__(self, name: str, weed: Any, proxy: Proxy, objects: list[str]) -> None:
        self.name, self._weed, self._proxy, self._objects = name, weed, proxy, objects
        self._damaged: dict[str, bytes] = {}
        self._restart: threading.Thread | None = None
        self.met = 0  # requests to the store that met the fault

    def settings(self) -> dict[str, Any]:
        found = kvbm_settings(self._weed.settings(), object_endpoint=self._proxy.endpoint)
        change = {"wrong secret": {"object_secret_key": "wrong"}, "missing bucket": {"object_bucket": "no-such-bucket"}}
        return {**found, **change.get(self.name, {})}

    def begin(self) -> None:
        self._proxy.count()
        if self.name.startswith("one "):
            name, another = self._objects[:2]
            data = self._damaged[name] = self._weed.stored_bytes(name)
            middle = len(data) // 2
            changed = {
                "one truncated object": data[: len(data) // 2],
                "one flipped bit": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
                "one object of another key": self._weed.stored_bytes(another),
            }
            self._weed.overwrite(name, changed[self.name])
        elif self.name == "killed and restarted":
            self._weed.kill()
        elif self.name in ("500", "stall", "reset", "truncate", "flip", "skew"):
            self._proxy.set_fault(self.name)

    def pass_half(self) -> None:
        """Half of the requests are over."""
        if self.name == "killed and restarted":
            self.met = self._proxy.count()
            self._restart = threading.Thread(target=self._weed.start)
            self._restart.start()

    def end(self) -> None:
        if self._restart is None:
            self.met = self._proxy.count(next(iter(self._damaged), ""))
        self._proxy.set_fault("")
        if self._restart is not None:
            self._restart.join()
            self._restart = None
        for name, data in self._damaged.items():
            self._weed.overwrite(name, data)
        self._damaged.clear()


def faults(options: argparse.Namespace) -> dict[str, Any]:
    import vllm  # noqa: F401 - once, for all engines. Not obstore: its threads would not outlive a fork

    model = options.model or model_path("tiny")
    tokens, count = options.tokens or 1024, options.requests
    length, blocks = tokens + 64, 4 * (tokens // BLOCK_TOKENS + 2)
    host = {"cpu_cache_override_num_blocks": 2 * tokens // BLOCK_TOKENS}  # a prompt is evicted before it comes again
    rows: list[dict[str, Any]] = []
    asked = options.faults or FAULTS
    if options.faults and options.json and options.json.exists():  # a run in parts
        rows = [row for row in json.loads(options.json.read_text())["rows"] if row["fault"] not in asked]
    result: dict[str, Any] = {}
    os.sched_setaffinity(0, _OTHER_CORES)
    with seaweed() as weed:
        writer = RemoteEngine(model, kvbm_settings(weed.settings()), length, blocks)
        for i in range(_PROMPTS):
            writer("ask", i, tokens, 1)
            writer("drain")
        objects = writer("objects")
        writer.close()
        for name in asked:
            proxy = Proxy(weed.port)
            trouble = Trouble(name, weed, proxy, objects)
            engine = RemoteEngine(model, {**trouble.settings(), **host}, length, blocks)
            row = _measure(engine, trouble, count, tokens, options.answer)
            engine.close()
            proxy.close()
            rows = sorted([*rows, row], key=lambda row: FAULTS.index(row["fault"]))
            result = {
                "good": all(row["passed"] for row in rows), "prompt_tokens": tokens, "requests": count,
                "load_average": os.getloadavg(), "rows": rows,
            }  # fmt: skip
            options.save(result)  # of a long run that is ended early, too
            at, low, high = row["p99_percent"]
            print(
                f"  {name:26} p99 {1e3 * row['p99_s'][0]:6.2f} ms, without {1e3 * row['p99_s'][1]:6.2f} ({at:+5.1f} %, "
                f"{low:+.1f} to {high:+.1f}), p50 {row['p50_percent'][0]:+5.1f} %, slowest "
                f"{1e3 * row['slowest_s'][0]:6.1f} and {1e3 * row['slowest_s'][1]:6.1f}; {row['waited']} waited: "
                f"{' '.join(f'{1e3 * seconds:.1f} (request {at})' for seconds, at in row['waits_s'][:5])} ms "
                f"({row['waiting_percent']:+.1f} % of p99); counted {row['counted']} of {count}; "
                f"{row['met']} requests met it, "
                f"blocks loaded {row['loaded_before']} before and {row['loaded_during']} during, {row['wrong']} wrong  "
                f"{'ok' if row['passed'] else 'MISSED'}", flush=True,
            )  # fmt: skip
    return result


class Request(NamedTuple):
    """What one request took, in seconds."""

    seconds: float
    waited: float
    disturbed: float

    @property
    def counts(self) -> bool:
        return self.disturbed <= _MAX_DISTURBED or self.waited >= _MIN_WAIT


def _measure(engine: RemoteEngine, trouble: Trouble, count: int, tokens: int, answer: int) -> dict[str, Any]:
    engine("use_store", False)
    for i in range(_WARM_REQUESTS):
        engine("ask", 10_000 + i, tokens, answer)
    engine("use_store", True)
    known = int(_KNOWN_SHARE * _PROMPTS)
    for i in range(known):
        engine("ask", i, tokens, answer)
    before = engine("loaded")
    engine("collect")
    answers: dict[int, list[int]] = {}
    wrong = 0
    pairs: list[dict[bool, Request]] = []
    trouble.begin()
    try:
        for number in range(count):
            if number == count // 2:
                trouble.pass_half()
            pairs.append({})
            for is_used in (True, False) if number % 2 else (False, True):
                engine("use_store", is_used and trouble.name != "off")
                which = (number if is_used else number + _PROMPTS // 2) % _PROMPTS
                _, seconds, found, waited, disturbed = engine("ask", which, tokens, answer)
                pairs[-1][is_used] = Request(seconds, waited, disturbed)
                wrong += answers.setdefault(which, found) != found
    finally:
        trouble.end()
    during = engine("loaded") - before

    def counted(used: bool, pairs: list[dict[bool, Request]]) -> list[float]:
        return [pair[used].seconds for pair in pairs if pair[used].counts]

    groups = [pairs[at : at + _GROUP] for at in range(0, count, _GROUP)]
    sides = counted(True, pairs), counted(False, pairs)
    with_tier = [pair[True] for pair in pairs]
    alone = [each.seconds - each.waited for each in with_tier if each.counts]
    waits = [(each.waited, number) for number, each in enumerate(with_tier) if each.waited >= _MIN_WAIT]
    both = [(counted(True, group), counted(False, group)) for group in groups]
    rises = {name: rise(both, lambda times, at=at: percentile(times, at)) for name, at in (("p50", 50), ("p99", 99))}
    slowest = [max(pair[used].seconds for pair in pairs) for used in (True, False)]
    is_met = trouble.met > 0 or trouble.name in ("off", "none")
    # An engine that has measured a slow load by chance computes instead, and does not meet the fault in loads.
    is_met &= before >= known * (tokens // BLOCK_TOKENS - 1) // 2 or trouble.name in ("wrong secret", "missing bucket")
    return {
        "fault": trouble.name, "p99_s": [percentile(side, 99) for side in sides], "p99_percent": rises["p99"],
        "p50_percent": rises["p50"], "slowest_s": slowest, "counted": [len(side) for side in sides],
        "met": trouble.met, "loaded_before": before, "loaded_during": during, "wrong": wrong,
        "waited": len(waits), "waits_s": sorted(waits, reverse=True)[:_WAITS],
        "waiting_percent": 100 * (percentile(sides[0], 99) / percentile(alone, 99) - 1),
        "passed": is_met and not wrong and slowest[0] < MAX_SECONDS and rises["p99"][0] <= MAX_P99_PERCENT,
    }  # fmt: skip


if __name__ == "__main__":  # the process of Proxy
    serve_proxy(sys.argv[1])
