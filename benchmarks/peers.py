"""Reads from peers beside the plainest way to move the same bytes: `recv_into` over a bare socket, and memcpy.

    python benchmarks/peers.py            # a table
    python benchmarks/peers.py --check    # exits with 1 where a promise is missed; --json FILE keeps the figures

All of it runs on one machine over loopback: read ratios, not absolutes. The plain loops neither verify nor encrypt.
Each figure is the best of several rounds that take turns, so that a busy moment hits all alike. CPU seconds are those
of reader and source together.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import resource
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("src", "tests/tiers/peers")]

import numpy as np  # noqa: E402
from peer_member import Member, Reader  # noqa: E402

from kvbm.tiers.host.shared import MappableSlab  # noqa: E402
from kvbm.tiers.host.slab import HostSlab  # noqa: E402
from kvbm.tiers.peers.client import NIXL  # noqa: E402
from kvbm.tiers.peers.nixl_path import Agent, api  # noqa: E402

SOCKET_SHARE, MEMCPY_SHARE, NIXL_SHARE = 0.8, 0.8, 0.9


class PlainSource:
    """A process that sends a slab over a bare socket whenever it gets a byte."""

    def __init__(self, size: int, piece: int) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.pid = os.fork()
        if self.pid == 0:
            memory = mmap.mmap(-1, size)
            memory.write(os.urandom(1 << 20) * (size >> 20))
            view = memoryview(memory)
            connection, _ = listener.accept()
            while connection.recv(1):
                for at in range(0, size, piece):
                    connection.sendall(view[at : at + piece])
            os._exit(0)
        self.connection = socket.create_connection(listener.getsockname())
        listener.close()

    def read(self, target: memoryview, piece: int) -> None:
        self.connection.send(b"\0")
        for at in range(0, len(target), piece):
            view = target[at : at + piece]
            while view:
                view = view[self.connection.recv_into(view, 0, socket.MSG_WAITALL) :]

    def close(self) -> None:
        self.connection.close()
        os.waitpid(self.pid, 0)


class PlainNixl:
    """A process that writes a slab into this one's memory with NIXL whenever it gets a byte, unchecked."""

    def __init__(self, size: int, slot: int, target: int) -> None:
        mine, its = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            mine.close()
            memory = np.ones(size, np.uint8)
            agent = Agent((memory.ctypes.data, size), "127.0.0.1")
            metadata = its.recv(1 << 16)
            pairs = [(memory.ctypes.data + at, target + at) for at in range(0, size, slot)]
            while its.recv(1):
                agent.push(metadata, pairs, slot, 60)
                its.send(b"\0")
            os._exit(0)
        its.close()
        self.connection = mine
        self.agent = Agent((target, size), "127.0.0.1")
        mine.send(self.agent.metadata)

    def read(self) -> None:
        self.connection.send(b"\0")
        self.connection.setblocking(False)
        while True:
            self.agent.progress()
            try:
                self.connection.recv(1)
                return
            except BlockingIOError:
                pass

    def close(self) -> None:
        self.connection.close()
        self.agent.close()
        os.waitpid(self.pid, 0)


def cpu_seconds(pid: int = 0) -> float:
    """Of this process, or of another one."""
    if not pid:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def best(ways: dict[str, tuple[Callable[[], None], int]], size: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Name -> (GB/s of the best round, CPU seconds a GB over all rounds)."""
    fastest = dict.fromkeys(ways, float("inf"))
    cpu = dict.fromkeys(ways, 0.0)
    for call, _ in ways.values():
        call()
    for _ in range(rounds):
        for name, (call, pid) in ways.items():
            used, began = cpu_seconds() + (cpu_seconds(pid) if pid else 0), time.perf_counter()
            call()
            fastest[name] = min(fastest[name], time.perf_counter() - began)
            cpu[name] += cpu_seconds() + (cpu_seconds(pid) if pid else 0) - used
    return {name: (size / fastest[name] / 1e9, cpu[name] / rounds / (size / 1e9)) for name in ways}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--mib", type=int, default=2, help="MiB of a block")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    blocks, slot = options.blocks, options.mib << 20
    size = blocks * slot
    os.environ.setdefault("UCX_TLS", "tcp,self")  # as between two machines
    plain = PlainSource(size, slot)
    pushed = np.zeros(size, np.uint8)
    plain_nixl = PlainNixl(size, slot, pushed.ctypes.data) if api() is not None else None
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        os.chmod(folder, 0o700)
        member = Member(folder, blocks, slot)
        numbers = list(range(blocks))
        member.store(*numbers)
        remote = Reader([member.tcp], blocks, slot)
        near = Reader([member.unix], blocks, slot)
        own = HostSlab(size).carve(blocks, slot)
        shared = MappableSlab(size).carve(blocks, slot)
        target = memoryview(remote.memory).cast("B")

        def read(reader: Reader) -> None:
            # In parts, as a load comes.
            part = max(1, reader.store.chunk_bytes // slot)
            operations = [reader.begin(numbers[at : at + part], at=at) for at in range(0, blocks, part)]
            for operation in operations:
                assert operation.wait(60)
                assert not operation.bad, operation.reason

        def copy(source: int, destination: int) -> None:
            for at in range(0, size, slot):
                ctypes.memmove(destination + at, source + at, slot)

        pid, to = member.server.pid, ctypes.addressof(near.memory)
        ways: dict[str, tuple[Callable[[], None], int]] = {}
        if plain_nixl is not None:
            over_nixl = Reader([member.tcp], blocks, slot, ways=(NIXL,))
            ways = {
                "plain NIXL loop": (plain_nixl.read, plain_nixl.pid),
                "peer over NIXL, verified": (lambda: read(over_nixl), pid),
            }
        found = best(
            {
                "plain recv_into loop": (lambda: plain.read(target, slot), plain.pid),
                "peer over a socket, encrypted and verified": (lambda: read(remote), pid),
                "plain memcpy from shared memory": (lambda: copy(member.slab.address, to), 0),
                "neighbour, mapped and verified": (lambda: read(near), pid),
                "memcpy, private slab with huge pages": (lambda: copy(own.address, to), 0),
                "memcpy, shared slab": (lambda: copy(shared.address, to), 0),
                **ways,
            },
            size,
            options.rounds,
        )
        if plain_nixl is not None:
            over_nixl.close()
            plain_nixl.close()
        for thing in (remote, near, member, own, shared):
            thing.close()
    plain.close()
    print(f"{blocks} blocks of {options.mib} MiB, best of {options.rounds}, {os.cpu_count()} cores")
    for name, (rate, cpu) in found.items():
        print(f"{name:46} {rate:6.2f} GB/s  {cpu:5.2f} CPU-s/GB")
    rates = [rate for rate, _ in found.values()]
    shares = {"socket": (rates[1] / rates[0], SOCKET_SHARE), "mapped": (rates[3] / rates[2], MEMCPY_SHARE)}
    if plain_nixl is not None:
        shares["NIXL"] = rates[7] / rates[6], NIXL_SHARE
    missed = [name for name, (share, least) in shares.items() if share < least]
    for name, (share, least) in shares.items():
        print(f"{name}: {share:.0%} of the plain loop (promise: {least:.0%})")
    if options.json:
        about = {"cores": os.cpu_count(), "blocks": blocks, "mib": options.mib, "rounds": options.rounds}
        figures = {name: {"gb_per_second": rate, "cpu_seconds_per_gb": cpu} for name, (rate, cpu) in found.items()}
        about["shares"] = {name: share for name, (share, _) in shares.items()}
        options.json.write_text(json.dumps({**about, **figures}, indent=1) + "\n")
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
