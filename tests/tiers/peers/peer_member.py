"""An engine without a model: host memory, a pool of blocks and the real server process beside it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import random

from kvbm.core.pool import Pool
from kvbm.tiers.host.shared import MappableSlab, SharedMemory, machine
from kvbm.tiers.peers.client import SOCKET, Identity
from kvbm.tiers.peers.finder import Source
from kvbm.tiers.peers.launch import ServerProcess
from kvbm.tiers.peers.server import Setup
from kvbm.tiers.peers.sources import SourceTable
from kvbm.tiers.peers.store import PeerStore
from kvbm.tiers.peers.wire import VERSION, Who

SECRET = "a secret of the tests"
CACHE = {"model": "toy", "weights": "1234", "layout": "2*f32", "tensor_parallel": 1}


def key(number) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def content(number, size) -> bytes:
    return random.Random(str(number)).randbytes(size)


class NoFinder:
    def candidates(self, keys, start, hint):
        return ()

    def members(self):
        return ()

    def announce(self, own, held):
        self.own = own

    def close(self):
        pass


class Member:
    """``listen``: empty for neighbours only."""

    def __init__(
        self, directory, slots=16, slot_bytes=64 << 10, listen="127.0.0.1:0", cache=CACHE, name="", engine=0, **settings
    ):
        self.slots, self.slot_bytes, self.cache = slots, slot_bytes, cache
        self.slab = MappableSlab(slots * slot_bytes).carve(slots, slot_bytes)
        self.pool = Pool(slots)
        self.generation = os.urandom(8).hex()
        setup = Setup(
            **{
                "engine": engine or os.getpid(), "control": -1, "board": -1, "leases": -1, "slabs": [], "slots": slots,
                "slot_bytes": [slot_bytes], "fingerprint": dict(cache), "member": name, "machine": machine(),
                "generation": self.generation, "directory": str(directory), "listen": listen, "secret": SECRET,
                "nixl": True, "seconds": 60.0, **settings,
            }
        )  # fmt: skip
        file = SharedMemory(os.dup(self.slab.file), os.fstat(self.slab.file).st_size)
        self.server = ServerProcess(setup, [file], NoFinder())
        self.board = self.server.board
        self.pool.mirror = self.board
        self.server.start(())
        assert self.server.is_ready.wait(60)

    def store(self, *numbers) -> None:
        """Publish blocks, each under its number."""
        slots = self.pool.reserve([key(number) for number in numbers])
        for number, slot in zip(numbers, slots, strict=True):
            ctypes.memmove(self.address(slot), content(number, self.slot_bytes), self.slot_bytes)
        self.pool.commit(slots)

    def address(self, slot) -> int:
        return self.slab.address + slot * self.slot_bytes

    def slot_of(self, number) -> int:
        return self.pool.find(key(number))

    @property
    def tcp(self) -> Source:
        return Source(self.server.address)

    @property
    def unix(self) -> Source:
        return Source("unix:" + self.server.path)

    def counters(self) -> list[int]:
        return [int(word) for word in self.board.counters]

    def close(self) -> None:
        self.server.close(10)
        self.pool.mirror = None
        self.board.close()
        self.slab.close()


class Reader:
    """The other engine: a rank's store, and memory to read into. ``elsewhere``: it runs on another machine."""

    def __init__(
        self,
        sources,
        blocks=16,
        slot_bytes=64 << 10,
        secret=SECRET,
        cache=CACHE,
        seconds=60.0,
        elsewhere=True,
        ways=(SOCKET,),
    ):
        self.slot_bytes = slot_bytes
        self.memory = ctypes.create_string_buffer(blocks * slot_bytes)
        place = "another machine" if elsewhere else machine()
        memory = ctypes.addressof(self.memory), len(self.memory)
        me = Identity(Who(VERSION, dict(cache), ""), place, secret, 0, seconds, ways, memory)
        self.store = PeerStore(me, slot_bytes)
        self.table = SourceTable(self.store._table_file.file)
        for number, source in enumerate(sources):
            self.table.enter(number, source)

    def begin(self, numbers, source=0, at=0):
        addresses = [ctypes.addressof(self.memory) + (at + i) * self.slot_bytes for i in range(len(numbers))]
        return self.store.read([source] * len(numbers), addresses, [key(number) for number in numbers])

    def read(self, numbers, source=0, at=0):
        operation = self.begin(numbers, source, at)
        assert operation.wait(60)
        return operation

    def block(self, i) -> bytes:
        return self.memory.raw[i * self.slot_bytes : (i + 1) * self.slot_bytes]

    def counts(self, source=0):
        return self.table.counts(source)

    def close(self) -> None:
        assert self.store.close(10)
