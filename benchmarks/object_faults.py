"""`object_engine.py faults`: what requests take while the object store fails, beside the same engine without a store.

One engine a fault, in a process of its own; ``--at-once`` starts several together, and they wait for their turn. An
engine answers requests in pairs, one with the tier and one with the tier switched off (the catalog finds, expects and
takes nothing, as without a store): two engines that are equal differ by more than the limit, and what another program
does for half a second slows both requests of a pair. Before the fault begins the engine has loaded a part of the
prompts, the first of them whatever that costs. So it knows the speed of the store, and meets the fault both in loads of
blocks that it knows and in lookups. The requests that reach the store during the fault are counted, and the requests of
the engine that loaded from it.

Every answer must be that of the engine which wrote the blocks. On a GPU, which computes with 16 bits, the same prompt
gives other logits where it comes in batches of another shape, so only prompts whose answers are clear are used there.

The thread that computes has the last core to itself. The store, the proxy, the tier's process and all other threads of
the engine share the other cores. The clock of a request stands still while another program has the engine's core. A
request that another program has interrupted counts on neither side, because it finds its caches cold, unless it
waited for the tier.

The kind "off" has the tier switched off on both sides: what it shows is the noise of the machine. For each request the
benchmark also adds up the time in which the engine had nothing to compute, because the request waited for the tier.
Where fewer than one request in a hundred waited, p99 is that of requests which never met the store, and what p99 owes
to the waiting (one side compared with itself) is free of the noise between two sides. A p99 of a thousand requests
rests on ten of them, so the faults of a kind are also taken together: those which put the store out of use, and those
of single objects.
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
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from object_requests import (
    BLOCK_TOKENS,
    Engine,
    gpu_model,
    gpu_settings,
    kvbm_settings,
    model_path,
    percentile,
    prompt,
    seaweed,
)
from object_steps import rise

MAX_P99_PERCENT = 2.0
MAX_SECONDS = 5.0  # a request that takes longer hangs
FAULTS = (
    "off", "none", "wrong secret", "missing bucket", "500", "stall", "reset", "truncate", "flip", "skew",
    "one truncated object", "one flipped bit", "one object of another key", "killed and restarted",
)  # fmt: skip
_TOGETHER = {
    "out of use": ("wrong secret", "missing bucket", "500", "stall", "reset", "truncate", "flip", "skew"),
    "single objects": ("one truncated object", "one flipped bit", "one object of another key"),
}
_START_SECONDS = 180.0  # that an engine may take; those on a GPU import vLLM together
_WARM_REQUESTS = 10
_KNOWN_SHARE = 0.2  # of the prompts, that the engine has looked for before the fault
_WAITS = 10  # the longest that are written down
_GROUP = 10  # pairs that the intervals take for one observation: what disturbs one disturbs its neighbours
# Different ones: a prompt comes again when neither vLLM nor host memory has it.
_PROMPTS = 200
_GPU_PROMPTS = 60
# On a GPU, between the logarithms of the two likeliest tokens of an answer. Two shapes of the same batch differ by less
# than half of this; the benchmark says how much.
_CLEAR = 0.2
_RESTART_SHARE = 0.25  # of the requests of a fault, before a store that was killed starts again
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
    """An engine in a process of its own. ``is_forked``: from this one, which has imported vLLM and not used a GPU."""

    def __init__(self, *arguments: Any, is_forked: bool = True, **more: Any) -> None:
        context: Any = multiprocessing.get_context("fork" if is_forked else "spawn")
        self._pipe, its = context.Pipe()
        cores = _ENGINE_CORE, _OTHER_CORES  # a process that is spawned sees the others only
        self._process = context.Process(target=_serve, args=(its, cores, arguments, more), daemon=True)
        self._process.start()
        its.close()

    def wait(self) -> RemoteEngine:
        """Until it has started. Raises EOFError if it ends instead, or takes too long."""
        if not self._pipe.poll(_START_SECONDS):
            self._process.kill()
        self._pipe.recv()
        return self

    def __call__(self, name: str, *arguments: Any) -> Any:
        self._pipe.send((name, arguments))
        return self._pipe.recv()

    def close(self) -> None:
        self("close")
        self._process.join(60)
        self._process.kill()


def _serve(pipe: Any, cores: tuple[set[int], set[int]], arguments: tuple[Any, ...], more: dict[str, Any]) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a benchmark that crashes leaves no engine behind
    engine = Engine(*arguments, **more)
    _leave_the_core_alone(*cores)

    def use_store(use: bool) -> None:
        # What a request without the tier has stored does not go there, and what one with it writes delays no other.
        engine.drain()
        engine.catalog._is_reset = not use

    def load(when: str) -> None:
        engine.scheduler.connector._adapter.session.cost._load = when

    def loaded() -> int:
        return engine.counts.onboarded_blocks.get("object", 0)

    def ask(seed: int, tokens: int, answer: int) -> tuple[Request, list[int]]:
        before = loaded()
        found = engine.ask(prompt(seed, tokens), answer)
        return Request(found.seconds, engine.waited, engine.disturbed, loaded() - before), found.tokens

    calls = {
        "ask": ask,
        "ask_for_margin": lambda seed, tokens, answer: engine.ask(prompt(seed, tokens), answer, has_margin=True),
        "drain": engine.drain,
        "use_store": use_store,
        "load": load,
        "prices": lambda: engine.scheduler.connector._adapter.session.cost.prices,
        "loaded": loaded,
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


def _leave_the_core_alone(core: set[int], others: set[int]) -> None:
    """The core is for this thread. The other threads, those that begin later too, stay on the other cores."""
    start = threading.Thread.start

    def start_elsewhere(thread: threading.Thread) -> None:
        start(thread)
        with contextlib.suppress(OSError):  # it has ended
            os.sched_setaffinity(thread.native_id or 0, others)

    threading.Thread.start = start_elsewhere  # type: ignore[method-assign]
    os.sched_setaffinity(0, core)


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

    def go_on(self, share: float) -> None:
        """This share of the requests is over."""
        if self.name == "killed and restarted" and self._restart is None and share >= _RESTART_SHARE:
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
    is_forked = options.at_once == 1 and not options.gpu  # importing vLLM uses a GPU: no fork can use it after that
    if is_forked:
        import vllm  # noqa: F401 - once, for all engines. Not obstore: its threads would not outlive a fork

    began = time.monotonic()
    tokens = options.tokens or (4096 if options.gpu else 1024)
    length, blocks = tokens + 64, 4 * (tokens // BLOCK_TOKENS + 2)
    # A prompt is evicted before it comes again.
    host: dict[str, Any] = {"cpu_cache_override_num_blocks": 2 * tokens // BLOCK_TOKENS}
    plain: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    pairs: dict[str, list[dict[bool, Request]]] = {}
    asked = options.faults or FAULTS
    if options.faults and options.json and options.json.exists():  # a run in parts
        rows = [row for row in json.loads(options.json.read_text())["rows"] if row["fault"] not in asked]
    result: dict[str, Any] = {}
    os.sched_setaffinity(0, _OTHER_CORES)
    with contextlib.ExitStack() as stack:
        model, more = options.model or (None if options.gpu else model_path("tiny")), {}
        if options.gpu:
            more = gpu_settings()
            host["pack"] = plain["pack"] = "off"  # no trial while other engines start
            model = model or gpu_model(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvbm-bench-"))))
        weed = stack.enter_context(seaweed())

        def start(kvbm: dict[str, Any]) -> RemoteEngine:
            return RemoteEngine(model, kvbm, length, blocks, is_forked=is_forked, **more)

        writer = start(kvbm_settings(weed.settings(), **plain)).wait()
        prompts = _write_prompts(writer, tokens, options)
        # The largest hold the blocks of a prompt, the first of them to the last.
        objects = sorted(writer("objects"), key=lambda name: -int(name.rpartition("-")[2]))
        writer.close()
        print(f"  {len(prompts)} prompts in {len(objects)} objects after {time.monotonic() - began:.0f} s", flush=True)
        for at in range(0, len(asked), options.at_once):
            ready = []
            for name in asked[at : at + options.at_once]:
                proxy = Proxy(weed.port)
                trouble = Trouble(name, weed, proxy, objects)
                ready.append((trouble, proxy, start({**trouble.settings(), **host})))
            for n, (trouble, proxy, engine) in enumerate(ready):
                try:
                    engine.wait()
                except EOFError:  # two that start together may choose the same port
                    print(f"  the engine of {trouble.name!r} has not started, and starts again", flush=True)
                    ready[n] = trouble, proxy, start({**trouble.settings(), **host}).wait()
            print(f"  {len(ready)} engines after {time.monotonic() - began:.0f} s", flush=True)
            for trouble, proxy, engine in ready:
                row, pairs[trouble.name] = _measure(engine, trouble, prompts, tokens, options)
                engine.close()
                proxy.close()
                rows = sorted([*rows, row], key=lambda row: FAULTS.index(row["fault"]))
                result = {
                    "good": all(row["passed"] for row in rows), "gpu": options.gpu, "prompt_tokens": tokens,
                    "answer_tokens": options.answer, "prompts": len(prompts),
                    "different_answers": len({tuple(answer) for answer in prompts.values()}),
                    "load_average": os.getloadavg(), "rows": rows, "together": _together(pairs),
                }  # fmt: skip
                options.save(result)  # of a long run that is ended early, too
                _print(row)
    for name, each in result.get("together", {}).items():
        print(
            f"  {name}: p99 {_percent(each['p99_percent'])}, p50 {_percent(each['p50_percent'])} of {each['requests']}"
        )
    return result


def _write_prompts(writer: RemoteEngine, tokens: int, options: argparse.Namespace) -> dict[int, list[int]]:
    """Seeds of prompts whose blocks are in the store, with their answers."""
    prompts: dict[int, list[int]] = {}
    count, clear = (_GPU_PROMPTS, _CLEAR) if options.gpu else (_PROMPTS, 0.0)
    seed, widest = 0, 0.0
    while len(prompts) < count:
        writer("use_store", False)
        found = writer("ask_for_margin", seed, tokens, options.answer)
        if found.margin >= clear:
            # Its last block alone is computed now, as after a load.
            again = writer("ask_for_margin", seed, tokens, options.answer)
            is_same = again.tokens == found.tokens
            widest = max(widest, abs(again.margin - found.margin) if is_same else again.margin + found.margin)
            if is_same:
                prompts[seed] = found.tokens
        seed += 1
    print(f"  {count} of {seed} prompts have clear answers; another batch changes a margin by {widest:.3f}", flush=True)
    writer("use_store", True)
    for seed in prompts:
        writer("ask", seed, tokens, options.answer)
        writer("drain")
    return prompts


def _percent(found: tuple[float, float, float]) -> str:
    return f"{found[0]:+.1f} % ({found[1]:+.1f} to {found[2]:+.1f})"


def _print(row: dict[str, Any]) -> None:
    print(
        f"  {row['fault']:26} p99 {1e3 * row['p99_s'][0]:6.2f} ms, without {1e3 * row['p99_s'][1]:6.2f}, "
        f"{_percent(row['p99_percent'])}, p50 {row['p50_percent'][0]:+5.1f} %, slowest "
        f"{1e3 * row['slowest_s'][0]:6.1f} and {1e3 * row['slowest_s'][1]:6.1f}; {row['waited']} waited: "
        f"{' '.join(f'{1e3 * seconds:.1f} (request {at})' for seconds, at in row['waits_s'][:5])} ms "
        f"({row['waiting_percent']:+.1f} % of p99); counted {row['counted']} of {row['requests']}; "
        f"{row['met']} requests met it, {row['loads']} loads, "
        f"blocks loaded {row['loaded_before']} before and {row['loaded_during']} during, {row['wrong']} wrong  "
        f"{'ok' if row['passed'] else 'MISSED'}", flush=True,
    )  # fmt: skip


class Request(NamedTuple):
    """What one request took, in seconds."""

    seconds: float
    waited: float
    disturbed: float
    loaded: int  # blocks from the store

    @property
    def counts(self) -> bool:
        return self.disturbed <= _MAX_DISTURBED or self.waited >= _MIN_WAIT


Pairs = list[dict[bool, Request]]  # with the tier (True) and without


def _sides(pairs: Pairs) -> list[tuple[list[float], list[float]]]:
    """Seconds with the tier and without, of the requests that count, in groups."""
    # Less than half of a side: the machine is too busy to leave any out.
    count_all = min(sum(pair[used].counts for pair in pairs) for used in (True, False)) < len(pairs) / 2

    def seconds(group: Pairs, used: bool) -> list[float]:
        return [pair[used].seconds for pair in group if pair[used].counts or count_all]

    groups = [pairs[at : at + _GROUP] for at in range(0, len(pairs), _GROUP)]
    both = [(seconds(group, True), seconds(group, False)) for group in groups]
    return [(used, unused) for used, unused in both if used and unused]


def _compare(pairs: Pairs) -> dict[str, Any]:
    both = _sides(pairs)
    rises = {name: rise(both, lambda times, at=at: percentile(times, at)) for name, at in (("p50", 50), ("p99", 99))}
    return {"p99_percent": rises["p99"], "p50_percent": rises["p50"]}


def _owed_to_waiting(pairs: Pairs) -> float:
    """By how much p99 of the requests with the tier would be lower if none had waited."""
    each = [pair[True] for pair in pairs]
    alone = [request.seconds - request.waited for request in each]
    return 100 * (percentile([request.seconds for request in each], 99) / percentile(alone, 99) - 1)


def _together(measured: dict[str, Pairs]) -> dict[str, Any]:
    kinds = {kind: [pair for name in names for pair in measured.get(name, ())] for kind, names in _TOGETHER.items()}
    return {
        kind: {
            "requests": len(pairs), **_compare(pairs), "waiting_percent": _owed_to_waiting(pairs),
            "waited": sum(pair[True].waited >= _MIN_WAIT for pair in pairs),
        }
        for kind, pairs in kinds.items() if pairs
    }  # fmt: skip


def _measure(
    engine: RemoteEngine, trouble: Trouble, prompts: dict[int, list[int]], tokens: int, options: argparse.Namespace
) -> tuple[dict[str, Any], Pairs]:
    seeds = list(prompts)
    wrong = 0

    def ask(seed: int) -> Request:
        nonlocal wrong
        request, found = engine("ask", seed, tokens, options.answer)
        wrong += found != prompts.get(seed, found)
        return request

    engine("use_store", False)
    for i in range(_WARM_REQUESTS):
        ask(1_000_000 + i)
    engine("use_store", True)
    known = int(_KNOWN_SHARE * len(seeds))
    for number, seed in enumerate(seeds[:known]):
        engine("load", "always" if number < known // 2 else "auto")
        ask(seed)
    before = engine("loaded")
    engine("collect")
    pairs: Pairs = []
    trouble.begin()
    began = time.monotonic()
    share = 0.0
    try:
        while share < 1.0:
            number = len(pairs)
            pairs.append({})
            for is_used in (True, False) if number % 2 else (False, True):
                engine("use_store", is_used and trouble.name != "off")
                pairs[-1][is_used] = ask(seeds[(number if is_used else number + len(seeds) // 2) % len(seeds)])
            share = max(len(pairs) / options.requests, (time.monotonic() - began) / options.fault_seconds)
            trouble.go_on(share)
    finally:
        trouble.end()
    during = engine("loaded") - before

    sides = [[each for group in _sides(pairs) for each in group[side]] for side in (0, 1)]
    with_tier = [pair[True] for pair in pairs]
    loads = [number for number, each in enumerate(with_tier) if each.loaded]
    waits = [(each.waited, number) for number, each in enumerate(with_tier) if each.waited >= _MIN_WAIT]
    compared = _compare(pairs)
    slowest = [max(pair[used].seconds for pair in pairs) for used in (True, False)]
    is_met = trouble.met > 0 or trouble.name in ("off", "none")
    # An engine that has measured a slow load by chance computes instead, and does not meet the fault in loads.
    if trouble.name not in ("wrong secret", "missing bucket"):
        is_met &= before >= known * (tokens // BLOCK_TOKENS - 1) * 3 // 4
    if trouble.name in ("none", "killed and restarted") or trouble.name.startswith("one "):
        is_met &= bool(loads)  # of the good objects, and once the store is back
    if options.raw:
        with options.raw.open("a") as file:
            file.write(
                json.dumps({"fault": trouble.name, "with": with_tier, "without": [p[False] for p in pairs]}) + "\n"
            )
    row = {
        "fault": trouble.name, "requests": len(pairs),
        "p99_s": [percentile(side, 99) for side in sides], **compared,
        "slowest_s": slowest, "counted": [len(side) for side in sides],
        "met": trouble.met, "loaded_before": before, "loaded_during": during, "wrong": wrong,
        "waited": len(waits), "waits_s": sorted(waits, reverse=True)[:_WAITS],
        "loads": len(loads), "first_load": loads[0] if loads else None,
        "waiting_percent": _owed_to_waiting(pairs),
        "passed": is_met and not wrong and slowest[0] < MAX_SECONDS and compared["p99_percent"][0] <= MAX_P99_PERCENT,
    }  # fmt: skip
    return row, pairs


if __name__ == "__main__":  # the process of Proxy
    serve_proxy(sys.argv[1])
