"""A snapshot to look at, for tests that need one."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgspec

from kvbm.observe.server import Server
from kvbm.observe.snapshot import Flow, HitRates, Identity, Request, Saved, Served, Snapshot, TierState

IDENTITY = Identity(
    kvbm="2.0", engine="vllm", engine_version="0.31.0", model="a/model", ranks=2, block_tokens=16,
    block_bytes=1_000_000, engine_blocks=100,
)  # fmt: skip
HOST = TierState(tier="host", slots=400, free=100, writing=20, idle=270, pinned=10, block_bytes=1_000_000, evictions=7,
                 bytes_per_second=50e9, measured=True)  # fmt: skip
DISK = TierState(tier="disk", slots=1000, free=900, writing=0, idle=100, pinned=0, block_bytes=1_000_000,
                 bytes_per_second=2e9, measured=True)  # fmt: skip
FLOWS = [
    Flow(source="device", target="host", blocks=307, bytes=307_000_000, seconds=0.5, failed_blocks=2, queued_blocks=20),
    Flow(source="host", target="device", blocks=55, bytes=55_000_000, seconds=0.25),
    Flow(source="host", target="disk", blocks=100, bytes=100_000_000, seconds=1.0),
    Flow(source="disk", target="device", blocks=5, bytes=5_000_000, seconds=0.125, failed_blocks=1),
]
REQUEST = Request(
    id="cmpl-1", at=1000.0, prompt_tokens=330, device_tokens=16, found={"host": 160, "disk": 80}, loaded_tokens=240,
    why="loaded in the step (no other requests running)", in_step=True, load_seconds=0.01, saved_seconds=0.2,
)  # fmt: skip
SERVED = [Served(tier="peer", blocks=9, bytes=9_000_000, questions=3, refused={"secret": 2})]
SNAPSHOT = Snapshot(
    at=1060.0, started=1000.0, identity=IDENTITY, tiers=[HOST, DISK], flows=FLOWS, lookups=30, looked_up_blocks=120,
    matched_tokens=960, matched_blocks={"host": 55, "disk": 5},
    hit_rates=HitRates(requests=30, blocks=120, hits={"host": 55, "disk": 5}),
    refused_blocks={"queue full": 3}, refused_loads={"recomputing is faster": 4}, hints={"taken": 6}, served=SERVED,
    unpackable_blocks=5,
    escapes=0.0005,
    outcomes={"loaded": 12, "not found": 18}, missed={"new": 16, "evicted": 2}, failures={'load: "odd"\\': 2},
    saved=Saved(saved_seconds=2.5, lost_seconds=0.25, loads=12, prefill_tokens_per_second=9000.0, measured=True),
    requests=[REQUEST],
)  # fmt: skip


def snapshot(**changes: Any) -> Snapshot:
    return msgspec.structs.replace(SNAPSHOT, **changes)


class FixedSource:
    """Gives out what it is set to, and counts how often it was asked."""

    def __init__(self, now: Snapshot = SNAPSHOT) -> None:
        self.now = now
        self.asked = 0

    def snapshot(self, requests: int = 0) -> Snapshot:
        self.asked += 1
        return msgspec.structs.replace(self.now, requests=self.now.requests[:requests])


class Here(Server):
    """Runs what is otherwise a process of its own in a thread, so that a test can set its limits."""

    def __init__(self, source: FixedSource, limits: Any) -> None:
        super().__init__(source, "127.0.0.1", 0)
        self._limits = limits

    def _start_child(self) -> socket.socket | None:
        from kvbm.observe.web import Web

        channel, theirs = socket.socketpair()
        with self._lock:
            self._channel = channel
        web = Web(self._socket.dup(), theirs, os.getppid(), self._limits)
        self._web = threading.Thread(target=self._run, args=(web,))
        self._web.start()
        return channel

    def _run(self, web: Any) -> None:
        web.run()
        for connection in list(web._connections.values()):
            web._close(connection)
        web._selector.close()
        web._listening.close()
        web._channel.close()

    def _end_child(self) -> int:
        self._web.join()
        return 0


@contextlib.contextmanager
def serving(source: FixedSource, limits: Any) -> Iterator[Server]:
    server = Here(source, limits)
    server.start()
    try:
        yield server
    finally:
        server.close()
