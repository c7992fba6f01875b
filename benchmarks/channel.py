"""How fast plans and reports travel between leader and workers, in their own processes on this machine.

    python benchmarks/channel.py [--ranks 3] [--plans 20000] [--blocks 32]

Prints round trips (a plan out, the last rank's report back, nothing else under way), the rate with many plans under
way, and what one call costs the engine's thread. In-band: only what encoding and decoding cost, since the engine
carries the bytes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from contextlib import closing

from kvbm.plans import (
    Copy,
    Hello,
    LoadPlan,
    LoadResult,
    Report,
    StepPlan,
    TierHello,
    decode_reports,
    decode_step,
    encode,
)
from kvbm.runtime.channel import ZmqLeader, ZmqWorker
from kvbm.tiers.registry import NEAR


def make_plan(number: int, blocks: int) -> StepPlan:
    copy = Copy(NEAR.name, list(range(1000, 1000 + blocks)), list(range(blocks)))
    return StepPlan([LoadPlan(number, "cmpl-0123456789abcdef", [copy], in_step=False)])


def serve(rank: int, pub_url: str, ack_url: str) -> None:
    with closing(ZmqWorker(Hello(rank, 1, "any", [TierHello(NEAR.name, 1)]), pub_url, ack_url)) as worker:
        worker.wait(60)
        worker.confirm()
        while worker.lost is None:
            for plan in worker.receive(timeout=1.0):
                worker.send(Report(rank, [LoadResult(load.id) for load in plan.loads]))


def microseconds(samples: list[float]) -> str:
    cuts = statistics.quantiles(samples, n=100)
    return f"p50 {cuts[49] * 1e6:7.1f} µs   p99 {cuts[98] * 1e6:7.1f} µs"


def round_trips(leader: ZmqLeader, plans: int, blocks: int) -> list[float]:
    samples = []
    for number in range(plans):
        begun = time.perf_counter()
        leader.send(make_plan(number, blocks))
        missing = leader.ranks
        while missing:
            missing -= len(leader.receive())
        samples.append(time.perf_counter() - begun)
    return samples


def stream(leader: ZmqLeader, plans: int, blocks: int, ahead: int = 512) -> tuple[float, list[float], list[float]]:
    """(plans a second, seconds in each send, seconds in each receive) with up to ``ahead`` plans under way."""
    ready = [make_plan(number, blocks) for number in range(plans)]
    sends, receives = [], []
    answered = sent = 0
    begun = time.perf_counter()
    while answered < plans * leader.ranks:
        if sent < plans and sent - answered // leader.ranks < ahead:
            before = time.perf_counter()
            leader.send(ready[sent])
            sends.append(time.perf_counter() - before)
            sent += 1
        before = time.perf_counter()
        answered += sum(len(report.loads) for report in leader.receive())
        receives.append(time.perf_counter() - before)
    return plans / (time.perf_counter() - begun), sends, receives


def in_band(plans: int, blocks: int) -> list[float]:
    samples = []
    for number in range(plans):
        plan = make_plan(number, blocks)
        begun = time.perf_counter()
        received = decode_step(encode(plan))
        decode_reports(encode([Report(0, [LoadResult(load.id) for load in received.loads])]))
        samples.append(time.perf_counter() - begun)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--plans", type=int, default=20_000)
    parser.add_argument("--blocks", type=int, default=32, help="blocks in a plan")
    options = parser.parse_args()
    plans, blocks = options.plans, options.blocks

    print(f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"{options.ranks} ranks, {plans} plans of {blocks} blocks")
    print(f"in-band  codec round trip  {microseconds(in_band(plans, blocks))}")
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="kvbm-") as there,
        closing(ZmqLeader(options.ranks, f"ipc://{there}/pub", f"ipc://{there}/ack", timeout=60)) as leader,
    ):
        workers = [
            spawn.Process(target=serve, args=(rank, leader.pub_url, leader.ack_url), daemon=True)
            for rank in range(options.ranks)
        ]
        for worker in workers:
            worker.start()
        leader.wait()
        round_trips(leader, 200, blocks)
        print(f"zeromq   round trip        {microseconds(round_trips(leader, max(plans // 10, 100), blocks))}")
        rate, sends, receives = stream(leader, plans, blocks)
        print(f"zeromq   send()            {microseconds(sends)}")
        print(f"zeromq   receive()         {microseconds(receives)}")
        print(f"zeromq   throughput        {rate:,.0f} plans/s to every rank and as many reports/s back from each")
        for worker in workers:
            worker.kill()
            worker.join()


if __name__ == "__main__":
    main()
