"""`object_engine.py steps`: decode steps of an engine with and without the object store tier busy."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from object_requests import Engine, model_path, percentile, prompt

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

    def __init__(self, endpoint: str, blocks: int, core: set[int]) -> None:
        command = [sys.executable, __file__, endpoint, str(blocks)]
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


def steps(options: argparse.Namespace) -> dict[str, Any]:
    """Each load between two idle stretches, which its steps are compared with; the median of all rounds."""
    import objects
    from object_target import nginx

    cores = sorted(os.sched_getaffinity(0))
    here, there = {cores[0]}, {cores[-1]}
    engine = Engine(options.model or model_path("tiny"), {"cpu_cache_override_num_blocks": 256}, 1024, 512)
    before = set(os.listdir("/proc/self/task"))
    for task in before:
        os.sched_setaffinity(int(task), here)
    with nginx() as target, contextlib.ExitStack() as stack:
        for process in target.processes:
            os.sched_setaffinity(process, there)
        memory, settings = objects.Memory(options.blocks), nginx_settings(target.endpoint)

        def pair(in_threads: bool = False) -> list[Any]:
            found = [objects.Tier(settings, memory, in_threads) for _ in range(2)]
            for tier in found:
                stack.callback(tier.close)
                tier.write()
                tier.read()
            return found

        (reader, writer), (old_reader, old_writer) = pair(), pair(in_threads=True)
        other = OtherLoad(target.endpoint, options.blocks, there)
        spinner = Spinner(there)
        stack.callback(other.close)
        stack.callback(spinner.close)
        every = 2 * options.blocks * objects.BLOCK / 0.2e9
        loads = {
            "tier": Load(reader.read, writer.write),
            "tier, 0.2 GB/s": Load(reader.read, writer.write, every=every),
            "tier in threads": Load(old_reader.read, old_writer.write),
            "bare loop": other,
            "spinning": spinner,
        }
        tasks = [int(task) for task in set(os.listdir("/proc/self/task")) - before]
        for process in (reader.pid, writer.pid):
            tasks += map(int, os.listdir(f"/proc/{process}/task"))
        for task in tasks:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(task, there)

        def stretch(count: int) -> list[float]:
            times: list[float] = []
            while len(times) < count:
                if not engine.engine.has_unfinished_requests():
                    _add(engine)
                waited, began = engine.queued(), time.perf_counter()
                engine.engine.step()
                times.append(time.perf_counter() - began - (engine.queued() - waited))
            return times

        measures = {"median": statistics.median, "mean": statistics.fmean, "p99": lambda times: percentile(times, 99)}
        stretch(200)
        idle: list[float] = []
        rises: dict[str, dict[str, list[float]]] = {name: {each: [] for each in measures} for name in loads}
        seconds = dict.fromkeys(loads, 0.0)
        for number in range(options.rounds):
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
                for measure, f in measures.items():
                    rises[name][measure].append(100 * (f(busy) / f(quiet + after) - 1))
                idle += after
                quiet = after
    engine.close()
    print(f"  idle            {1e3 * statistics.median(idle):7.3f} ms a step (median)")
    rows = {}
    for name, by_measure in rises.items():
        rate = loads[name].moved * options.blocks * objects.BLOCK / seconds[name]
        rise = {measure: statistics.median(found) for measure, found in by_measure.items()}
        spread = statistics.quantiles(by_measure["median"], n=4)
        rows[name] = {"bytes_per_second": rate, "percent": rise, "quartiles_of_median": spread}
        print(
            f"  {name:15} {rate / 1e9:5.2f} GB/s: median {rise['median']:+.2f} % (quartiles {spread[0]:+.2f} to "
            f"{spread[2]:+.2f}), mean {rise['mean']:+.2f} %, p99 {rise['p99']:+.2f} %"
        )
    good = rows["tier"]["percent"]["median"] <= MAX_STEP_PERCENT
    print(f"  {'ok' if good else 'MISSED'} (median <= +{MAX_STEP_PERCENT:.0f} % while the tier reads and writes)")
    return {"good": good, "idle_ms": 1e3 * statistics.median(idle), "load_average": os.getloadavg(), "rows": rows}


def _add(engine: Engine) -> None:
    from vllm import SamplingParams

    for i in range(4):
        params = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
        engine.engine.add_request(f"decode-{time.monotonic_ns()}-{i}", {"prompt_token_ids": prompt(i, 64)}, params)
    for _ in range(8):  # prompts
        engine.engine.step()


if __name__ == "__main__":  # the process of OtherLoad
    load(*sys.argv[1:])
