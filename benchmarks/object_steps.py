"""`object_engine.py steps`: decode steps of an engine with and without the object store tier busy.

Without a GPU the engine gets one core, and the tier and its server another. With one (``--gpu``) the machine must have
cores to spare: only the server, which stands for another machine, is kept to some of them, and steps count whole.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cores import keep_to
from object_requests import HERE, Engine, model_path, percentile, prompt

MAX_STEP_PERCENT = 1.0


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

    def __init__(self, endpoint: str, blocks: int, cores: set[int]) -> None:
        command = [sys.executable, __file__, endpoint, str(blocks)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._say("")
        keep_to(cores, self._process.pid)
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


class Spinner:
    """A process that only counts: no memory, no calls. A core that is slower beside it has none of its own."""

    moved = 0

    def __init__(self, core: set[int]) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        os.sched_setaffinity(self._process.pid, core)
        self.stop()

    def start(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def load(endpoint: str, blocks: str) -> None:
    import objects

    settings = nginx_settings(endpoint)
    memory = objects.Memory(int(blocks))
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


def open_engine(options: argparse.Namespace) -> Engine:
    host = {"cpu_cache_override_num_blocks": 256}
    if not options.gpu:
        return Engine(options.model or model_path("tiny"), host, 1024, 512)
    sys.path.append(str(HERE / "gpu"))
    from vllm_kinds import DECODE_GRAPHS, QWEN3_8B, config_folder

    graphs = {**DECODE_GRAPHS, "cudagraph_capture_sizes": [options.decoding]}
    more = {"compilation_config": graphs} if options.graphs else {"enforce_eager": True}
    length = 1024 + options.rounds * 3 * (2 * options.steps + 16)
    with tempfile.TemporaryDirectory(prefix="kvbm-bench-") as folder:
        # vLLM's own weights: nothing depends on the tokens, and to write 16 GB takes longer than the measurement.
        return Engine(
            options.model or str(config_folder(QWEN3_8B, Path(folder))), host, length,
            options.decoding * (length // 16 + 2), load_format="auto" if options.model else "dummy",
            dtype="bfloat16", skip_tokenizer_init=True, gpu_memory_utilization=0.5, **more,
        )  # fmt: skip


def steps(options: argparse.Namespace) -> dict[str, Any]:
    """Each load between two idle stretches, which its steps are compared with, in every round."""
    import objects
    from object_target import find_nginx, server

    began = time.monotonic()
    engine = open_engine(options)
    print(f"  engine started in {time.monotonic() - began:.0f} s", flush=True)
    cores = sorted(os.sched_getaffinity(0))
    its_cores = set(cores[-(len(cores) // 4 or 1) :])
    here, there = (set(cores), set(cores)) if options.gpu else ({cores[0]}, its_cores)
    before = set(os.listdir("/proc/self/task"))
    keep_to(here, os.getpid())
    with server(find_nginx()) as target, contextlib.ExitStack() as stack:
        keep_to(its_cores, *target.processes)
        memory, settings = objects.Memory(options.blocks), nginx_settings(target.endpoint)

        def pair(in_threads: bool = False) -> list[Any]:
            found = [objects.Tier(settings, memory, in_threads) for _ in range(2)]
            for tier in found:
                stack.callback(tier.close)
                tier.write()
                tier.read()
            return found

        reader, writer = pair()
        other = OtherLoad(target.endpoint, options.blocks, there)
        stack.callback(other.close)
        rate = options.rate or (1.0 if options.gpu else 0.1)
        slowly = Load(reader.read, writer.write, every=options.blocks * objects.BLOCK / (rate * 1e9))
        loads: dict[str, Any] = {
            "tier": Load(reader.read, writer.write), f"tier, {rate:g} GB/s each way": slowly, "bare loop": other
        }  # fmt: skip
        if not options.gpu:
            old_reader, old_writer = pair(in_threads=True)
            loads["tier in threads"] = Load(old_reader.read, old_writer.write)
            loads["spinning"] = spinner = Spinner(there)
            stack.callback(spinner.close)
        for task in set(os.listdir("/proc/self/task")) - before:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(int(task), there)
        keep_to(there, reader.pid, writer.pid)

        queued = (lambda: 0.0) if options.gpu else engine.queued

        def stretch(count: int) -> list[float]:
            times: list[float] = []
            while len(times) < count:
                if not engine.engine.has_unfinished_requests():
                    _add(engine, options.decoding)
                waited, began = queued(), time.perf_counter()
                engine.engine.step()
                times.append(time.perf_counter() - began - (queued() - waited))
            return times

        stretch(200)
        idle: list[float] = []
        pairs: dict[str, list[Pair]] = {name: [] for name in loads}
        seconds = dict.fromkeys(loads, 0.0)
        rounds, ends = 0, time.monotonic() + options.seconds
        for number in range(options.rounds):
            if time.monotonic() > ends:
                break
            rounds += 1
            quiet = stretch(options.steps // 2)
            for name in random.Random(number).sample(list(loads), len(loads)):
                loads[name].start()
                began = time.monotonic()
                stretch(5)
                busy = stretch(options.steps)
                loads[name].stop()
                seconds[name] += time.monotonic() - began
                stretch(5)
                after = stretch(options.steps // 2)
                usual = statistics.median(quiet + after)
                pairs[name].append(([each / usual for each in busy], [each / usual for each in quiet + after]))
                idle += after
                quiet = after
    engine.close()
    print(
        f"  {'idle':20} median {1e3 * statistics.median(idle):.3f} ms a step, p99 {1e3 * percentile(idle, 99):.3f}, "
        f"{len(idle)} steps; {rounds} rounds, {target.name}"
    )
    rows = {}
    for name, found in pairs.items():
        speed = loads[name].moved * options.blocks * objects.BLOCK / seconds[name]
        rises = {measure: rise(found, f) for measure, f in MEASURES.items()}
        rows[name] = {"bytes_per_second": speed, "percent": rises, "steps": sum(len(busy) for busy, _ in found)}
        text = ", ".join(
            f"{measure} {at:+.2f} % ({low:+.2f} to {high:+.2f})" for measure, (at, low, high) in rises.items()
        )
        print(f"  {name:20} {speed / 1e9:5.2f} GB/s both ways: {text}")
    good = rows["tier"]["percent"]["median"][0] <= MAX_STEP_PERCENT
    print(f"  {'ok' if good else 'MISSED'} (median <= +{MAX_STEP_PERCENT:.0f} % while the tier reads and writes)")
    about = {"gpu": options.gpu, "graphs": options.graphs, "decoding": options.decoding, "rounds": rounds,
             "server": target.name}  # fmt: skip
    return {
        "good": good, **about, "idle_median_ms": 1e3 * statistics.median(idle),
        "idle_p99_ms": 1e3 * percentile(idle, 99), "load_average": os.getloadavg(), "rows": rows,
    }  # fmt: skip


Pair = tuple[list[float], list[float]]  # steps with and without a load, in medians of those without
MEASURES: dict[str, Callable[[list[float]], float]] = {
    "median": statistics.median, "mean": statistics.fmean, "p99": lambda times: percentile(times, 99)
}  # fmt: skip


def rise(pairs: list[Pair], measure: Callable[[list[float]], float], draws: int = 400) -> tuple[float, float, float]:
    """Per cent, and the ends of the interval that holds 95 % of what other rounds like these give (bootstrap)."""

    def of(chosen: list[Pair]) -> float:
        busy, quiet = ([each for pair in chosen for each in pair[side]] for side in (0, 1))
        return 100 * (measure(busy) / measure(quiet) - 1)

    source = random.Random(0)
    drawn = sorted(of(source.choices(pairs, k=len(pairs))) for _ in range(draws))
    return of(pairs), drawn[math.floor(0.025 * draws)], drawn[math.ceil(0.975 * draws) - 1]


def _add(engine: Engine, decoding: int) -> None:
    from vllm import SamplingParams

    length = engine.llm.llm_engine.model_config.max_model_len
    for i in range(decoding):
        params = SamplingParams(temperature=0, max_tokens=length - 100, ignore_eos=True, detokenize=False)
        engine.engine.add_request(f"decode-{time.monotonic_ns()}-{i}", {"prompt_token_ids": prompt(i, 64)}, params)
    for _ in range(8):  # prompts
        engine.engine.step()


if __name__ == "__main__":  # the process of OtherLoad
    load(*sys.argv[1:])
