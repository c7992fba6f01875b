"""The object store tier beside the plainest loop over the same client library.

    python benchmarks/objects.py [--check] [--json FILE] [--blocks 128] [--rounds 10]
    python benchmarks/objects.py --endpoint URL --bucket B     a real store (AWS_ACCESS_KEY_ID, ...), without the delay

Blocks are written and read as an engine does it, through the tier's own process, which verifies every block and copies
it to its address, and by a bare loop of obstore's asynchronous calls with as many requests at a time, in turns. The
bare loop neither hashes nor copies. The limits compare the best rate of each, because a round that something else on
the machine has disturbed does not show what the code can do, and the median of the CPU time. The same again through a
proxy that delays every request by 20 ms. The target is nginx on this machine (benchmarks/object_target.py).

What the tier does to the requests and steps of an engine: benchmarks/object_engine.py.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import logging
import mmap
import os
import platform
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from statistics import median
from typing import Any, NamedTuple

from msgspec.structs import replace
from object_target import DELAY_SECONDS, delayed, nginx

from kvbm.tiers.host.shared import SharedMemory
from kvbm.tiers.objects.client import Client
from kvbm.tiers.objects.format import Names, object_id, place_of
from kvbm.tiers.objects.process import Setup
from kvbm.tiers.objects.process_store import ProcessStore
from kvbm.tiers.objects.settings import ObjectSettings

BLOCK = 2 << 20
MIN_RATE = 0.85  # of the bare loop
MIN_RATE_DELAYED = 0.80
MAX_CPU = 1.3  # times that of the bare loop


class Figure(NamedTuple):
    """One round: bytes a second, and seconds of the client's CPU for a gigabyte, in all its processes."""

    rate: float
    cpu: float


# ---------------------------------------------------------------------------------------------------------------------
# The two sides


class Memory:
    """As a host tier that another process can map."""

    def __init__(self, blocks: int) -> None:
        self.size = blocks * BLOCK
        self._memory = SharedMemory.make(self.size)
        self.file = self._memory.file
        self.map = mmap.mmap(self.file, self.size)
        noise = os.urandom(1 << 20)
        for at in range(0, self.size, len(noise)):
            self.map[at : at + len(noise)] = noise
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.addresses = [self.address + i * BLOCK for i in range(blocks)]


class Bare:
    """obstore's own asynchronous calls, a block an object, unverified, into memory of obstore's."""

    def __init__(self, settings: ObjectSettings, memory: Memory) -> None:
        from obstore.store import S3Store

        options: dict[str, Any] = {"allow_http": True, "timeout": timedelta(seconds=60)}
        self._store = S3Store(
            settings.bucket, endpoint=settings.endpoint, region=settings.region,
            access_key_id=settings.access_key, secret_access_key=settings.secret_key, unsigned_payload=True,
            client_options=options,
        )  # fmt: skip
        self.pid = os.getpid()
        self._views = [memoryview(memory.map)[i * BLOCK : (i + 1) * BLOCK] for i in range(len(memory.addresses))]
        self._concurrency = settings.concurrency
        self._names = [f"bare/{os.urandom(8).hex()}" for _ in self._views]

    def write(self) -> None:
        asyncio.run(self._all(self._put))

    def read(self) -> None:
        asyncio.run(self._all(self._get))

    def delete(self) -> None:
        self._store.delete(self._names)

    def close(self) -> None:
        return

    async def _all(self, call: Callable[[int], Any]) -> None:
        turns = asyncio.Semaphore(self._concurrency)

        async def one(i: int) -> None:
            async with turns:
                await call(i)

        await asyncio.gather(*(one(i) for i in range(len(self._views))))

    async def _put(self, i: int) -> None:
        await self._store.put_async(self._names[i], self._views[i], mode="create", use_multipart=False)

    async def _get(self, i: int) -> None:
        data = await (await self._store.get_async(self._names[i])).bytes_async()
        assert len(data) == BLOCK


class Tier:
    """``in_threads``: of this process, instead of in one of its own as under an engine."""

    def __init__(self, settings: ObjectSettings, memory: Memory, in_threads: bool = False) -> None:
        self._settings = settings
        cache: dict[str, str | int] = {"model": os.urandom(8).hex()}
        setup = Setup(settings, cache, 0, 1, BLOCK, logging.WARNING)
        self._store = setup.open_store() if in_threads else ProcessStore(setup)
        self._store.attach(memory)
        self.pid = os.getpid() if in_threads else self._store.pid
        names = Names(cache, settings.encryption_secret)
        self._memory = memory  # its addresses are used to the end
        self._addresses = memory.addresses
        self._tags = [os.urandom(32) for _ in memory.addresses]
        self._places = [place_of(object_id(tag, 0), 0) for tag in self._tags]
        self._names = [names.description, *(names.of(0, place >> 6) for place in self._places)]

    def write(self) -> None:
        self._finish(self._store.write(self._places, self._addresses, self._tags))

    def read(self) -> None:
        self._finish(self._store.read(self._places, self._addresses, self._tags))

    def delete(self) -> None:
        Client(self._settings).delete(self._names)

    def close(self) -> None:
        self._store.close()

    @staticmethod
    def _finish(operation: Any) -> None:
        operation.wait()
        if operation.bad:
            raise RuntimeError(f"{len(operation.bad)} blocks failed: {operation.reason}")


def cpu_seconds(processes: set[int]) -> float:
    """Of all their threads; the kernel's clocks of processes (clock_getcpuclockid)."""
    return sum(time.clock_gettime(~process << 3 | 2) for process in processes)


def timed(call: Callable[[], None], size: int, process: int) -> Figure:
    """``process``: works for this one."""
    processes = {os.getpid(), process}
    used, began = cpu_seconds(processes), time.monotonic()
    call()
    seconds = time.monotonic() - began
    return Figure(size / seconds, (cpu_seconds(processes) - used) / (size / 1e9))


def compare(
    settings: ObjectSettings, memory: Memory, rounds: int, clear: Callable[[], None] | None
) -> dict[str, dict[str, Figure]]:
    """By direction and side the best rate and the median of the CPU time of all rounds. ``clear``: empties the target;
    None: each side deletes its own objects."""
    sealed = replace(settings, encryption_secret="bench")
    sides: dict[str, Bare | Tier] = {
        "bare": Bare(settings, memory), "tier": Tier(settings, memory), "encrypted": Tier(sealed, memory),
    }  # fmt: skip
    found: dict[str, dict[str, list[Figure]]] = {"write": {}, "read": {}}
    for number in range(rounds + 1):
        for name, side in sides.items():
            for direction, call in (("write", side.write), ("read", side.read)):
                figure = timed(call, memory.size, side.pid)
                if number:  # the first round connects and faults memory in
                    found[direction].setdefault(name, []).append(figure)
            if clear is not None:
                clear()
            else:
                side.delete()
    for side in sides.values():
        side.close()
    return {
        direction: {
            name: Figure(max(figure.rate for figure in figures), median(figure.cpu for figure in figures))
            for name, figures in by_name.items()
        }
        for direction, by_name in found.items()
    }


def report(title: str, found: dict[str, dict[str, Figure]], min_rate: float) -> bool:
    print(title)
    good = True
    for direction, figures in found.items():
        bare = figures["bare"]
        for name, figure in figures.items():
            share, cpu = figure.rate / bare.rate, figure.cpu / bare.cpu
            verdict = ""
            if name == "tier":
                passed = share >= min_rate and cpu <= MAX_CPU
                good &= passed
                verdict = f"  {'ok' if passed else 'MISSED'} (>= {min_rate:.2f}, <= {MAX_CPU:.1f})"
            print(
                f"  {direction:<6} {name:<10} {figure.rate / 1e9:6.2f} GB/s ({share:4.2f})  "
                f"{figure.cpu:5.2f} CPU s/GB ({cpu:4.2f}){verdict}"
            )
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--blocks", type=int, default=128, help="of 2 MiB")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--endpoint", help="a real store in place of nginx")
    parser.add_argument("--bucket", default="bench")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a limit is missed")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    memory = Memory(options.blocks)
    settings = ObjectSettings(
        bucket=options.bucket, endpoint=options.endpoint or "", region=os.environ.get("AWS_REGION", "us-east-1"),
        access_key=os.environ.get("AWS_ACCESS_KEY_ID", "key"),
        secret_key=os.environ.get("AWS_SECRET_ACCESS_KEY", "secret"),
        timeout_seconds=60.0, concurrency=options.concurrency,
    )  # fmt: skip
    results: dict[str, Any] = {}
    good = True

    def run(title: str, endpoint: str, min_rate: float, clear: Callable[[], None] | None) -> bool:
        found = compare(replace(settings, endpoint=endpoint), memory, options.rounds, clear)
        results[title] = {
            direction: {name: figure._asdict() for name, figure in figures.items()}
            for direction, figures in found.items()
        }
        return report(title, found, min_rate)

    if options.endpoint:
        good = run(options.endpoint, options.endpoint, MIN_RATE, None)
    else:
        with ExitStack() as stack:
            target = stack.enter_context(nginx())
            good &= run("nginx", target.endpoint, MIN_RATE, target.clear)
            slow = stack.enter_context(delayed(target.port))
            title = f"nginx, {DELAY_SECONDS * 1e3:.0f} ms delay"
            good &= run(title, slow, MIN_RATE_DELAYED, target.clear)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": platform.platform(), "cpus": os.cpu_count(), "results": results}, file, indent=2)
            file.write("\n")
    return 0 if good or not options.check else 1


if __name__ == "__main__":
    sys.exit(main())
