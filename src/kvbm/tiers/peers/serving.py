"""Answers the questions of peers from an engine's memory. Runs in the server process, one thread a connection.

Nothing here waits for the engine. A block that the engine withdraws while it is sent is noticed by its generation, and
the reader is told with the next message.
"""

from __future__ import annotations

import mmap
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

import kvbm
from kvbm.core.catalog import ServedState
from kvbm.core.keys import Key
from kvbm.tiers.peers.board import Board, Directory
from kvbm.tiers.peers.checksum import checksum
from kvbm.tiers.peers.nixl_path import Agent
from kvbm.tiers.peers.wire import (
    VERSION,
    About,
    Answer,
    Ask,
    Block,
    Changes,
    Channel,
    Dismiss,
    Facts,
    Filter,
    Lease,
    Leased,
    PeerError,
    Probe,
    Push,
    Pushed,
    Read,
    Refused,
    Who,
    bound_to,
    digest,
    split_keys,
)

LEASE_SECONDS = 2.0
MIN_PUSH_SECONDS = 5.0
IDLE_SECONDS = 600.0  # a connection without a question for so long is closed
# Words of the lease file, which the engine reads for its metrics.
BLOCKS, BYTES, QUESTIONS, CONNECTIONS = range(4)
KINDS = ("secret", "fingerprint", "version", "malformed", "damaged", "late", "gone", "withdrawn", "user", "busy")
_FIRST_KIND = 8


def served(board: Board) -> ServedState:
    """What the server has counted, as its engine sees it."""
    words = [int(word) for word in board.counters]
    refused = {kind: words[_FIRST_KIND + n] for n, kind in enumerate(KINDS) if words[_FIRST_KIND + n]}
    return ServedState(words[BLOCKS], words[BYTES], words[QUESTIONS], refused)


class FairShare:
    """Divides a rate between the machines that read: each that waits gets a block in its turn."""

    def __init__(self, bytes_per_second: float = 0.0) -> None:
        self._rate = bytes_per_second  # 0: no limit
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[threading.Event]] = OrderedDict()
        self._is_taken = False

    def wait(self, machine: str, size: int) -> None:
        """Until this machine may have a block of so many bytes."""
        if not self._rate:
            return
        event = threading.Event()
        with self._lock:
            self._waiting.setdefault(machine, deque()).append(event)
            self._admit()
        event.wait()
        time.sleep(size / self._rate)
        with self._lock:
            self._is_taken = False
            self._admit()

    def _admit(self) -> None:
        if self._is_taken or not self._waiting:
            return
        self._is_taken = True
        machine, events = self._waiting.popitem(last=False)
        events.popleft().set()
        if events:
            self._waiting[machine] = events  # behind the others


class Serving:
    """The blocks of one engine. ``slabs``: each rank's near memory."""

    def __init__(
        self,
        board: Board,
        slabs: Sequence[mmap.mmap],
        about: About,
        fingerprint: Mapping[str, str | int],
        *,
        seconds: float,
        bytes_per_second: float = 0.0,
        on_dismiss: Callable[[Dismiss], bool] = lambda _: False,
    ) -> None:
        self.about = about
        self.board = board
        self.files: Sequence[int] = ()  # for neighbours: the board and the slabs, read-only
        self._slabs = [memoryview(slab) for slab in slabs]
        self._fingerprint = dict(fingerprint)
        self._digest = digest(fingerprint)
        self._directory = Directory(board)
        self._lock = threading.Lock()
        self._seconds = seconds
        self._share = FairShare(bytes_per_second)
        self._on_dismiss = on_dismiss
        self._sums = [np.zeros((2, board.slots), np.uint64) for _ in slabs]  # generation and checksum by slot

    def count(self, word: int, amount: int = 1) -> None:
        with self._lock:
            self.board.counters[word] += np.uint64(amount)

    def refuse(self, kind: str) -> None:
        self.count(_FIRST_KIND + KINDS.index(kind) if kind in KINDS else _FIRST_KIND + KINDS.index("malformed"))

    # -- one connection -----------------------------------------------------------------------------------------------

    def serve(self, channel: Channel, machine: str) -> None:
        """Until the peer goes or breaks a rule. ``machine``: whose share of the bandwidth it takes."""
        first = channel.receive(Who, Dismiss, Probe)
        if isinstance(first, Dismiss):
            channel.send(Answer(bytes([self._on_dismiss(first)])))
            return
        if isinstance(first, Probe):
            channel.send(Facts(kvbm.__version__, self._fingerprint, self.about))
            return
        if (refused := self._compare(first)) is not None:
            channel.send(refused)
            self.refuse(refused.kind)
            return
        channel.send(self.about)
        if channel.socket.family == socket.AF_UNIX:
            socket.send_fds(channel.socket, [b"\0"], list(self.files))
        agents: dict[int, Agent] = {}  # by rank
        try:
            self._converse(channel, machine, agents)
        finally:
            for agent in agents.values():
                agent.close()

    def _converse(self, channel: Channel, machine: str, agents: dict[int, Agent]) -> None:
        while channel.wait(IDLE_SECONDS):
            message = channel.receive(Ask, Lease, Read, Push, Changes)
            if self.board.is_retired:
                channel.send(Refused("withdrawn", "this engine's cache was reset: its blocks are of no other engine"))
                return
            if isinstance(message, Ask):
                self._answer(channel, message)
            elif isinstance(message, Changes):
                channel.send(Filter(self._changes_since(message)))
            elif isinstance(message, Lease):
                channel.send(self._lease(self._rank(message.rank), split_keys(message.keys)))
            elif isinstance(message, Read):
                self._send(channel, machine, self._rank(message.rank), split_keys(message.keys))
            else:
                rank = self._rank(message.rank)
                if rank not in agents:
                    agents[rank] = self._open_agent(channel, rank)
                channel.send(self._push(agents[rank], message, split_keys(message.keys)))

    def _compare(self, who: Who) -> Refused | None:
        if who.version != VERSION:
            return Refused("version", f"this engine speaks version {VERSION} of the protocol, the peer {who.version}")
        if who.fingerprint == self._fingerprint:
            return None
        names = sorted({*who.fingerprint, *self._fingerprint})
        different = [
            f"{name} {self._fingerprint.get(name)!r} here and {who.fingerprint.get(name)!r} there"
            for name in names
            if who.fingerprint.get(name) != self._fingerprint.get(name)
        ]
        return Refused("fingerprint", "its blocks do not fit this engine: " + ", ".join(different))

    def _rank(self, rank: int) -> int:
        if not 0 <= rank < len(self._slabs):
            raise PeerError("malformed", f"there is no rank {rank}")
        return rank

    def _find(self, keys: list[Key]) -> list[tuple[int, int]]:
        with self._lock:
            return self._directory.find(keys)

    def _answer(self, channel: Channel, ask: Ask) -> None:
        self.count(QUESTIONS)
        channel.send(Answer(bytes(slot >= 0 for slot, _ in self._find(split_keys(ask.keys)))))

    def _changes_since(self, changes: Changes) -> bytes:
        with self._lock:
            self._directory.refresh()
            update = self._directory.filter.since(changes.epoch, changes.number)
        return msgspec.msgpack.encode(update)

    def _hold(self, keys: list[Key]) -> list[tuple[int, int]]:
        """Lease the blocks, and look again: the engine may have evicted one just before."""
        places = self._find(keys)
        self.board.lease([slot for slot, _ in places if slot >= 0], LEASE_SECONDS)
        return [place if self._is_same(*place) else (-1, 0) for place in places]

    def _is_same(self, slot: int, generation: int) -> bool:
        return slot >= 0 and int(self.board.generations[slot]) == generation

    def _slot(self, rank: int, slot: int) -> memoryview:
        size = self.about.slot_bytes[rank]
        return self._slabs[rank][slot * size : (slot + 1) * size]

    # -- neighbours ---------------------------------------------------------------------------------------------------

    def _lease(self, rank: int, keys: list[Key]) -> Leased:
        places = self._hold(keys)
        sums = [self._sum(rank, *place, key) if place[0] >= 0 else 0 for place, key in zip(places, keys, strict=True)]
        found = [place if total else (-1, 0) for place, total in zip(places, sums, strict=True)]
        good = sum(slot >= 0 for slot, _ in found)
        self.count(BLOCKS, good)
        self.count(BYTES, good * self.about.slot_bytes[rank])
        return Leased([slot for slot, _ in found], [generation for _, generation in found], sums)

    def _sum(self, rank: int, slot: int, generation: int, key: Key) -> int:
        """The checksum of a slot, computed when a peer wants it for the first time; 0 when it was withdrawn."""
        known = self._sums[rank]
        if int(known[0, slot]) == generation:
            return int(known[1, slot])
        found = checksum(self._slot(rank, slot), key)
        if not self._is_same(slot, generation):
            return 0
        known[1, slot], known[0, slot] = found, generation
        return found

    # -- other machines -----------------------------------------------------------------------------------------------

    def _send(self, channel: Channel, machine: str, rank: int, keys: list[Key]) -> None:
        is_last_good, size = True, self.about.slot_bytes[rank]
        for key in keys:
            ((slot, generation),) = self._hold([key])
            self._share.wait(machine, size)
            channel.send(Block(generation, is_last_good))
            is_last_good = True
            if generation:
                channel.send_block(self._slot(rank, slot), bound_to(key, self._digest, rank, generation))
                if is_last_good := self._is_same(slot, generation):
                    self.count(BLOCKS)
                    self.count(BYTES, size)
                else:
                    self.refuse("withdrawn")
        channel.send(Block(0, is_last_good))

    def _open_agent(self, channel: Channel, rank: int) -> Agent:
        """One for the connection: it goes with it."""
        slab = np.frombuffer(self._slabs[rank], np.uint8)
        return Agent((slab.ctypes.data, slab.nbytes), channel.socket.getsockname()[0])

    def _push(self, agent: Agent, push: Push, keys: list[Key]) -> Pushed:
        if len(push.addresses) != len(keys):
            raise PeerError("malformed", "as many addresses as keys are needed")
        rank, size = self._rank(push.rank), self.about.slot_bytes[push.rank]
        places = self._hold(keys)
        sums = [self._sum(rank, *place, key) if place[0] >= 0 else 0 for place, key in zip(places, keys, strict=True)]
        base = np.frombuffer(self._slabs[rank], np.uint8).ctypes.data
        pairs = [
            (base + place[0] * size, address)
            for place, address, total in zip(places, push.addresses, sums, strict=True)
            if total
        ]
        if pairs:
            agent.push(push.metadata, pairs, size, max(self._seconds, MIN_PUSH_SECONDS))
        sums = [total if total and self._is_same(*place) else 0 for place, total in zip(places, sums, strict=True)]
        self.count(BLOCKS, sum(map(bool, sums)))
        self.count(BYTES, sum(map(bool, sums)) * size)
        return Pushed(sums)
