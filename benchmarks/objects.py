"""The object store tier beside the plainest loop over the same client library.

    python benchmarks/objects.py [--check] [--json FILE] [--blocks 128] [--rounds 5] [--endpoint URL]

Blocks are written and read through `kvbm.tiers.objects.store.ObjectStore`, which verifies every block and copies it to
its address, and by a bare loop of obstore's asynchronous calls with as many requests at a time, in turns. The limits
compare the best rate of each, because a round that something else on the machine has disturbed does not show what the
code can do, and the median of the CPU time. The same again with 20 ms of delay before every answer.

The target is a small HTTP server of this script in a process of its own, which keeps objects in memory and speaks as
much of S3 as is needed. `--endpoint` takes another one, for example a real store; then there is no round with delay.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import mmap
import os
import platform
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from statistics import median
from typing import Any, NamedTuple

from kvbm.tiers.objects.client import Client
from kvbm.tiers.objects.format import Codec, Names, object_id, place_of
from kvbm.tiers.objects.settings import ObjectSettings
from kvbm.tiers.objects.store import ObjectStore

BLOCK = 2 << 20
DELAY = 0.02
MIN_RATE = 0.85  # of the bare loop
MIN_RATE_DELAYED = 0.80
MAX_CPU = 1.3  # times that of the bare loop
BUCKET = "bench"


class Figure(NamedTuple):
    """One round: bytes a second, and seconds of this process's CPU for a gigabyte."""

    rate: float
    cpu: float


# ---------------------------------------------------------------------------------------------------------------------
# The target


class Target:
    """GET, HEAD, PUT, bulk deletion and an empty listing, over as many connections as come."""

    LISTING = (
        b'<?xml version="1.0"?><ListBucketResult><Name>bench</Name><IsTruncated>false</IsTruncated></ListBucketResult>'
    )

    def __init__(self, delay: float) -> None:
        self._delay = delay
        self._objects: dict[bytes, bytearray] = {}
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=256)

    def run(self) -> None:
        while True:
            connection, _ = self.listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        rest = b""
        while True:
            while b"\r\n\r\n" not in rest:
                more = connection.recv(65536)
                if not more:
                    return
                rest += more
            head, _, rest = rest.partition(b"\r\n\r\n")
            first, *lines = head.split(b"\r\n")
            method, path, _ = first.split(b" ")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
            body = bytearray(int(headers.get(b"content-length", 0)))
            have = min(len(body), len(rest))
            body[:have] = rest[:have]
            rest = rest[have:]
            view = memoryview(body)
            while have < len(body):
                have += connection.recv_into(view[have:])
            if self._delay:
                time.sleep(self._delay)
            connection.sendall(self._answer(method, path, headers, body))
            if method == b"GET" and b"list-type" not in path:
                connection.sendall(self._objects.get(path, b""))

    def _answer(self, method: bytes, path: bytes, headers: dict[bytes, bytes], body: bytearray) -> bytes:
        if method == b"PUT":
            if b"if-none-match" in headers and path in self._objects:
                return b"HTTP/1.1 412 Precondition Failed\r\nContent-Length: 0\r\n\r\n"
            self._objects[path] = body
            return b'HTTP/1.1 200 OK\r\nETag: "tag"\r\nContent-Length: 0\r\n\r\n'
        if method == b"POST":  # a bulk deletion
            keys = re.findall(rb"<Key>(.*?)</Key>", bytes(body))
            for key in keys:
                self._objects.pop(b"/%s/%s" % (BUCKET.encode(), key), None)
            deleted = b"".join(b"<Deleted><Key>%s</Key></Deleted>" % key for key in keys)
            text = b'<?xml version="1.0"?><DeleteResult>%s</DeleteResult>' % deleted
            return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text) + text
        if b"list-type" in path:
            return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(self.LISTING) + self.LISTING
        if path not in self._objects:
            return b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
        fields = b'ETag: "tag"\r\nLast-Modified: Mon, 16 Nov 2026 10:00:00 GMT\r\n'
        return b"HTTP/1.1 200 OK\r\n%sContent-Length: %d\r\n\r\n" % (fields, len(self._objects[path]))


@contextmanager
def target(delay: float) -> Iterator[str]:
    process = subprocess.Popen([sys.executable, __file__, "--serve", str(delay)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.kill()
        process.wait()


# ---------------------------------------------------------------------------------------------------------------------
# The two sides


class Memory:
    def __init__(self, blocks: int) -> None:
        self.map = mmap.mmap(-1, blocks * BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        noise = os.urandom(1 << 20)
        for at in range(0, len(self.map), len(noise)):
            self.map[at : at + len(noise)] = noise
        first = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.addresses = [first + i * BLOCK for i in range(blocks)]


class Bare:
    """obstore's own asynchronous calls, a block an object, unverified, into memory of obstore's."""

    def __init__(self, settings: ObjectSettings, memory: Memory) -> None:
        from obstore.store import S3Store

        options: dict[str, Any] = {"allow_http": True, "timeout": timedelta(seconds=60)}
        self._store = S3Store(
            settings.bucket, endpoint=settings.endpoint, region="us-east-1", access_key_id="key",
            secret_access_key="secret", unsigned_payload=True, client_options=options,
        )  # fmt: skip
        self._views = [memoryview(memory.map)[i * BLOCK : (i + 1) * BLOCK] for i in range(len(memory.addresses))]
        self._concurrency = settings.concurrency
        self._names = [f"bare/{os.urandom(8).hex()}" for _ in self._views]

    def write(self) -> None:
        asyncio.run(self._all(self._put))

    def read(self) -> None:
        asyncio.run(self._all(self._get))

    def clear(self) -> None:
        self._store.delete(self._names)

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
    def __init__(self, settings: ObjectSettings, memory: Memory) -> None:
        self._client = Client(settings)
        names = Names({"model": os.urandom(8).hex()}, settings.encryption_secret)
        codec = Codec(names.scope, settings.encryption_secret)
        self._store = ObjectStore(self._client, names, codec, 0, BLOCK)
        self._addresses = memory.addresses
        self._tags = [os.urandom(32) for _ in memory.addresses]
        self._places = [place_of(object_id(tag, 0), 0) for tag in self._tags]
        self._names = [names.of(0, place >> 6) for place in self._places]

    def write(self) -> None:
        self._finish(self._store.write(self._places, self._addresses, self._tags))

    def read(self) -> None:
        self._finish(self._store.read(self._places, self._addresses, self._tags))

    def clear(self) -> None:
        self._client.delete(self._names)
        self._store.close()

    @staticmethod
    def _finish(operation: Any) -> None:
        operation.wait()
        if operation.bad:
            raise RuntimeError(f"{len(operation.bad)} blocks failed: {operation.reason}")


def timed(call: Callable[[], None], size: int) -> Figure:
    used = resource.getrusage(resource.RUSAGE_SELF)
    began = time.monotonic()
    call()
    seconds = time.monotonic() - began
    now = resource.getrusage(resource.RUSAGE_SELF)
    cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return Figure(size / seconds, cpu / (size / 1e9))


def compare(settings: ObjectSettings, memory: Memory, rounds: int) -> dict[str, dict[str, Figure]]:
    """By direction and side the best rate and the median of the CPU time of all rounds."""
    sealed = ObjectSettings(bucket=settings.bucket, endpoint=settings.endpoint, region=settings.region,
                            access_key="key", secret_key="secret", encryption_secret="bench",
                            timeout_seconds=settings.timeout_seconds, concurrency=settings.concurrency)  # fmt: skip
    sides: dict[str, Callable[[], Bare | Tier]] = {
        "bare": lambda: Bare(settings, memory),
        "tier": lambda: Tier(settings, memory),
        "encrypted": lambda: Tier(sealed, memory),
    }
    found: dict[str, dict[str, list[Figure]]] = {"write": {}, "read": {}}
    for number in range(rounds + 1):
        for name, make in sides.items():
            side = make()
            for direction, call in (("write", side.write), ("read", side.read)):
                figure = timed(call, len(memory.map))
                if number:  # the first round connects and faults memory in
                    found[direction].setdefault(name, []).append(figure)
            side.clear()
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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--endpoint", help="another target than this script's own")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a limit is missed")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--serve", type=float, metavar="DELAY", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        server = Target(options.serve)
        print(server.listener.getsockname()[1], flush=True)
        server.run()
    memory = Memory(options.blocks)
    cases = [("no delay", 0.0, MIN_RATE), (f"{DELAY * 1e3:.0f} ms delay", DELAY, MIN_RATE_DELAYED)]
    good, results = True, {}
    for title, delay, min_rate in cases[:1] if options.endpoint else cases:
        with target(delay) as own:
            settings = ObjectSettings(
                bucket=BUCKET, endpoint=options.endpoint or own, region="us-east-1", access_key="key",
                secret_key="secret", timeout_seconds=60.0, concurrency=options.concurrency,
            )  # fmt: skip
            found = compare(settings, memory, options.rounds)
        good &= report(title, found, min_rate)
        results[title] = {
            direction: {name: figure._asdict() for name, figure in figures.items()}
            for direction, figures in found.items()
        }
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": platform.platform(), "cpus": os.cpu_count(), "results": results}, file, indent=2)
            file.write("\n")
    return 0 if good or not options.check else 1


if __name__ == "__main__":
    sys.exit(main())
