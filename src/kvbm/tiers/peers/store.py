"""One rank's half of the peer tier: reads blocks from other engines, and lets them read those of this one."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence

import msgspec

from kvbm.core.keys import KEY_BYTES
from kvbm.gil import begin_short_turns, end_short_turns
from kvbm.tiers.base import NearMemory, Operation, Store
from kvbm.tiers.bounded import DaemonThreads
from kvbm.tiers.host.shared import Place, SharedMemory
from kvbm.tiers.peers.client import COPIERS, MAPPED, Identity, Peer
from kvbm.tiers.peers.sources import TABLE_BYTES, SourceTable

logger = logging.getLogger("kvbm")

SOURCE_BITS = 9  # of a place: the number of its source
_THREADS = 4 * COPIERS  # most ask while the others copy: on a busy machine a server takes milliseconds to answer
_END_SECONDS = 5.0


class Opened(msgspec.Struct, frozen=True, array_like=True):
    """For the leader: where it finds this rank's memory."""

    slab: Place
    table: Place
    slot_bytes: int


class PeerStore(Store):
    """Threads of its own read; an operation ends when none of them can write to its destinations any more."""

    slots = 0
    chunk_bytes = 16 << 20  # the copy to the engine begins after the first; each costs the engine's thread a step

    def __init__(self, me: Identity, slot_bytes: int) -> None:
        self._me = me
        self._slot_bytes = slot_bytes
        self._table_file = SharedMemory.make(TABLE_BYTES)
        self._table = SourceTable(self._table_file.file)
        self._peers: dict[int, Peer] = {}
        self._lock = threading.Lock()
        self._threads = DaemonThreads(_THREADS, "kvbm-peer-read")
        self._closing = False
        self.stall_seconds = 2 * me.seconds

    def attach(self, near: NearMemory) -> None:
        self._me = self._me._replace(memory=(near.address, near.size))
        if near.file >= 0:
            slab = SharedMemory(near.file, os.fstat(near.file).st_size).place
            opened = Opened(slab, self._table_file.place, self._slot_bytes)
            self.identity = msgspec.json.encode(opened).decode()

    def describe(self) -> str:
        return "blocks of peers"

    def read(self, slots: Sequence[int], addresses: Sequence[int], tags: Sequence[bytes]) -> Operation:
        operation = Operation("read", slots, addresses, tags, self._slot_bytes)
        by_source: dict[int, list[int]] = {}
        for position, place in enumerate(slots):
            by_source.setdefault(place & ((1 << SOURCE_BITS) - 1), []).append(position)
        operation.parts_left = len(by_source) or 1
        if not by_source:
            operation.end_part([], "")
        for number, positions in by_source.items():
            begin_short_turns()  # a system call for each piece, beside an engine that computes
            try:
                self._threads.post(self._read, operation, number, positions)
            except RuntimeError:
                end_short_turns()
                operation.end_part(positions, "closed")
        return operation

    def write(self, slots: Sequence[int], addresses: Sequence[int], tags: Sequence[bytes]) -> Operation:
        raise NotImplementedError("blocks are not written to peers: they read them")

    def _read(self, operation: Operation, number: int, positions: list[int]) -> None:
        bad, reason = positions, "the load was given up"
        has_begun = False
        good = 0
        try:
            if operation.cancelled or self._closing:
                return
            peer = self._peer(number)
            if peer is None:
                reason = f"no source has the number {number}"
                return

            def begin() -> None:
                nonlocal has_begun
                operation.begin_part()
                self._table.begin_read(number)
                has_begun = True

            failures = peer.read(
                [operation.tags[i][:KEY_BYTES] for i in positions],
                [operation.addresses[i] for i in positions],
                lambda: operation.cancelled or self._closing,
                begin,
            )
            bad = [positions[i] for i, _ in failures]
            good = len(positions) - len(bad)
            kinds = [kind for _, kind in failures]
            reason = f"peer {peer.source.address}: {kinds[0]}" if kinds else ""
            self._table.add(number, good, good * self._slot_bytes, kinds, peer.path == MAPPED)
        except Exception as error:
            bad, reason = positions, f"{type(error).__name__}: {error}"
        finally:
            end_short_turns()
            if has_begun:
                self._table.end_read(number, good * self._slot_bytes)
            operation.end_part(bad, reason)

    def _peer(self, number: int) -> Peer | None:
        source = self._table.source(number)
        with self._lock:
            peer = self._peers.get(number)
            if source is None or (peer is not None and peer.source == source):
                return peer
            if peer is not None:
                peer.close()
            peer = self._peers[number] = Peer(source, self._me)
            return peer

    def close(self, timeout: float | None = None) -> bool:
        self._closing = True
        ended = self._threads.close(_END_SECONDS if timeout is None else timeout)
        for peer in self._peers.values():
            peer.close()
        self._table_file.close()
        return ended
