"""`object_engine.py faults`: what requests take while the object store fails, beside an engine without a store.

Each request goes to three engines in turns: with the store, without it, and once more without, whose difference from
the second is the noise of the machine. Each has a process of its own, because vLLM has one worker connector in a
process; two of them wait while the third works. Each engine's own speed is taken out of its figures. A round is all
requests, with the beginning of the fault in it; the figures are medians over rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

from object_requests import BLOCK_TOKENS, Engine, kvbm_settings, model_path, percentile, prompt, seaweed

MAX_P99_PERCENT = 2.0
MAX_SECONDS = 5.0  # a request that takes longer hangs
FAULTS = (
    "none", "wrong secret", "missing bucket", "500", "stall", "reset", "truncate", "flip", "skew",
    "one truncated object", "one flipped bit", "one object of another key", "killed and restarted",
)  # fmt: skip
_RECOVERY_SECONDS = 20.0
_WARM_REQUESTS, _SPEED_REQUESTS = 5, 15


class Proxy:
    """The tests' proxy with faults, in a process of its own: the engines are measured in this one."""

    def __init__(self, upstream: int) -> None:
        command = [sys.executable, __file__, str(upstream)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.endpoint = f"http://127.0.0.1:{self._said()}"

    def set_fault(self, fault: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{fault}\n")
        self._process.stdin.flush()
        self._said()

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
        proxy.set_fault(line.strip())
        print("set", flush=True)


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

    def use_store(use: bool) -> None:
        engine.catalog._is_reset = not use

    calls = {
        "ask": lambda seed, tokens, answer: engine.ask(prompt(seed, tokens), answer),
        "drain": engine.drain,
        "use_store": use_store,
        "is_suspended": lambda: engine.catalog._is_suspended,
        "loaded": lambda: sum(engine.counts.onboarded_blocks.values()),
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


class Trouble:
    """One fault, from its beginning to its end."""

    def __init__(self, name: str, weed: Any, proxy: Proxy, objects: list[str]) -> None:
        self.name, self._weed, self._proxy, self._objects = name, weed, proxy, objects
        self._damaged: dict[str, bytes] = {}
        self._restart: threading.Thread | None = None

    def settings(self) -> dict[str, Any]:
        found = kvbm_settings(self._weed.settings(), object_endpoint=self._proxy.endpoint)
        change = {"wrong secret": {"object_secret_key": "wrong"}, "missing bucket": {"object_bucket": "no-such-bucket"}}
        return {**found, **change.get(self.name, {})}

    def begin(self) -> None:
        if self.name.startswith("one "):
            name, another = self._objects[:2]
            data = self._damaged[name] = self._weed.stored_bytes(name)
            changed = {
                "one truncated object": data[: len(data) // 2],
                "one flipped bit": data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
                "one object of another key": self._weed.stored_bytes(another),
            }
            self._weed.overwrite(name, changed[self.name])
        elif self.name in ("500", "stall", "reset", "truncate", "flip", "skew"):
            self._proxy.set_fault(self.name)

    def at(self, part: float) -> None:
        """So much of the requests is over."""
        if self.name == "killed and restarted":
            if part == 0.1:
                self._weed.kill()
            elif part == 0.5:
                self._restart = threading.Thread(target=self._weed.start)
                self._restart.start()

    def end(self) -> None:
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
    rows, good = [], True
    result: dict[str, Any] = {}
    with seaweed() as weed:
        writer = RemoteEngine(model, kvbm_settings(weed.settings()), length, blocks)
        for i in range(count):
            writer("ask", i, tokens, 1)
            writer("drain")
        objects = writer("objects")
        writer.close()
        others = {side: RemoteEngine(model, host, length, blocks) for side in ("none", "control")}
        for name in options.faults or FAULTS:
            proxy = Proxy(weed.port)
            trouble = Trouble(name, weed, proxy, objects)
            engines = {"store": RemoteEngine(model, {**trouble.settings(), **host}, length, blocks), **others}
            rounds = [_round(engines, trouble, count, tokens, options.answer, n) for n in range(options.rounds)]
            loaded = engines["store"]("loaded")
            engines["store"].close()
            proxy.close()
            row = _summary(name, rounds, loaded)
            rows.append(row)
            good &= row["passed"]
            result = {
                "good": good, "prompt_tokens": tokens, "requests": count, "rounds": options.rounds,
                "load_average": os.getloadavg(), "rows": rows,
            }  # fmt: skip
            options.save(result)  # of a long run that is ended early, too
            p99 = row["p99_s"]
            print(
                f"  {name:26} p99 {1e3 * p99['store']:6.1f} ms, without a store {1e3 * p99['none']:6.1f} "
                f"({row['p99_percent']:+5.1f} %), control {row['control_percent']:+5.1f} %; slowest "
                f"{1e3 * row['slowest_s']['store']:6.1f}; {loaded} blocks loaded, {row['wrong']} wrong  "
                f"{'ok' if row['passed'] else 'MISSED'}", flush=True,
            )  # fmt: skip
        for engine in others.values():
            engine.close()
    return result


def _round(
    engines: dict[str, RemoteEngine], trouble: Trouble, count: int, tokens: int, answer: int, number: int
) -> tuple[dict[str, list[float]], int]:
    """(seconds of each request by side, how many answers were wrong)"""
    store = engines["store"]
    deadline = time.monotonic() + (_RECOVERY_SECONDS if number else 0.0)
    while store("is_suspended") and time.monotonic() < deadline:  # after the fault of the last round
        time.sleep(0.05)
    for engine in engines.values():
        engine("collect")
    times: dict[str, list[float]] = {side: [] for side in engines}
    wrong = 0
    speeds = _speeds(engines, number, tokens, answer)
    trouble.begin()
    try:
        for i in range(count):
            trouble.at(round(i / count, 2))
            answers = []
            for side in _in_turns(engines, i):
                _, seconds, found = engines[side]("ask", i, tokens, answer)
                times[side].append(seconds / speeds[side])
                answers.append(found)
            wrong += any(found != answers[0] for found in answers)
    finally:
        trouble.end()
    return times, wrong


def _in_turns(engines: dict[str, RemoteEngine], number: int) -> list[str]:
    return sorted(engines, key=lambda side: (number + list(engines).index(side)) % len(engines))


def _speeds(engines: dict[str, RemoteEngine], number: int, tokens: int, answer: int) -> dict[str, float]:
    """Equal engines differ by up to 15 %, each run anew. So: how long each takes for the same prompts beside the one
    without a store, while none uses a store."""
    engines["store"]("use_store", False)
    times: dict[str, list[float]] = {side: [] for side in engines}
    for i in range(_WARM_REQUESTS + _SPEED_REQUESTS):
        for side in _in_turns(engines, i):
            _, seconds, _ = engines[side]("ask", 10_000 + 1000 * number + i, tokens, answer)
            if i >= _WARM_REQUESTS:
                times[side].append(seconds)
    engines["store"]("use_store", True)
    return {side: statistics.median(each) / statistics.median(times["none"]) for side, each in times.items()}


def _summary(name: str, rounds: list[tuple[dict[str, list[float]], int]], loaded: int) -> dict[str, Any]:
    def over_rounds(measure: Any) -> dict[str, float]:
        return {side: statistics.median(measure(times[side]) for times, _ in rounds) for side in rounds[0][0]}

    def rise(side: str) -> float:
        """Of p99, within each round."""
        p99s = ((percentile(times[side], 99), percentile(times["none"], 99)) for times, _ in rounds)
        return 100 * (statistics.median(mine / none for mine, none in p99s) - 1)

    wrong = sum(wrong for _, wrong in rounds)
    slowest = {side: max(max(times[side]) for times, _ in rounds) for side in rounds[0][0]}
    # The control has no store: what it differs by is the machine.
    passed = not wrong and slowest["store"] < MAX_SECONDS
    passed &= rise("store") <= MAX_P99_PERCENT + max(0.0, rise("control"))
    return {
        "fault": name, "p50_s": over_rounds(statistics.median), "p99_s": over_rounds(lambda each: percentile(each, 99)),
        "slowest_s": slowest, "p99_percent": rise("store"), "control_percent": rise("control"),
        "loaded_blocks": loaded, "wrong": wrong, "passed": passed,
    }  # fmt: skip


if __name__ == "__main__":  # the process of Proxy
    serve_proxy(sys.argv[1])
