"""One peer, as an engine sees it: asks what it holds, and reads blocks from it.

There are two ways to read. A neighbour on this machine hands over its memory, and blocks are copied straight from it.
From another machine they come over an encrypted socket. Either way a block counts only when its bytes, its key, the
fingerprint of the cache and the generation of its slot are right.

Only the thread that reads a block writes to its destination. When a load is given up, or the peer is late, the thread
closes the connection before it reports the end: no byte that comes later has a place to go. Until that report the
destination stays with the load: that is its quarantine.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvbm.core.keys import Key
from kvbm.tiers.host.shared import map_ahead
from kvbm.tiers.peers.board import Board
from kvbm.tiers.peers.checksum import checksum, copy_and_sum
from kvbm.tiers.peers.finder import Source
from kvbm.tiers.peers.nixl_path import Agent, pause
from kvbm.tiers.peers.server import is_same_user, split_address
from kvbm.tiers.peers.wire import (
    SLICE_SECONDS,
    About,
    Answer,
    Ask,
    Block,
    Changes,
    Channel,
    Filter,
    Lease,
    Leased,
    PeerError,
    Push,
    Pushed,
    Read,
    Who,
    authenticate_client,
    bound_to,
    digest,
    join_keys,
)

UNIX = "unix:"
MAPPED, SOCKET, NIXL = "mapped memory", "socket", "NIXL"
TRIES = 3  # reads over each way, before the faster one is taken
logger = logging.getLogger("kvbm")

_CONNECT_SECONDS = 1.0
_LEASE_BYTES = 8 << 20  # leased at once
_PUSHES = 2  # at a time: one arrives while the other is verified; more take the processor from each other
# On two cores, two threads use up the memory's bandwidth, and more take the caches from each other.
COPIERS = max(2, min(4, (os.cpu_count() or 1) // 4))
_copying = threading.BoundedSemaphore(COPIERS)


class Identity(NamedTuple):
    """This engine, as it introduces itself."""

    who: Who
    machine: str
    secret: str
    rank: int = -1  # -1: the leader, which reads no blocks
    seconds: float = 1.0  # without progress, after which a read is given up
    ways: tuple[str, ...] = (SOCKET,)  # to another machine, that may be used
    memory: tuple[int, int] = (0, 0)  # address and bytes of the slots that blocks are read into

    @property
    def fingerprint(self) -> str:
        return digest(self.who.fingerprint)


class Neighbour:
    """A neighbour's memory, mapped: the generations of its slots, and the slab of the same rank."""

    def __init__(self, about: About, files: Sequence[int], rank: int) -> None:
        self.generation = about.generation
        self.slot_bytes = about.slot_bytes[rank]
        self.board = Board(files[0], -1, about.slots)
        mapping = mmap.mmap(files[1 + rank], about.slots * self.slot_bytes, access=mmap.ACCESS_READ)
        self._slab = np.frombuffer(mapping, np.uint8)  # keeps the mapping
        self.address, self.size = self._slab.ctypes.data, self._slab.nbytes

    def copy(self, slot: int, generation: int, total: int, target: int, key: Key) -> str:
        """Empty, or why the copy is not the block. ``total``: the checksum that the neighbour's server has found."""
        generations = self.board.generations
        if not 0 <= slot < len(generations) or int(generations[slot]) != generation:
            return "withdrawn"
        found = copy_and_sum(target, self.address + slot * self.slot_bytes, self.slot_bytes, key)
        if int(generations[slot]) != generation:
            return "withdrawn"
        return "" if found == total else "damaged"


class Link:
    """One connection to a peer's server. One thread at a time uses it."""

    def __init__(self, channel: Channel, about: About, files: Sequence[int]) -> None:
        self.channel = channel
        self.about = about
        self.files = files  # of a neighbour, until they are mapped
        self.is_local = bool(files)
        self.agent: Agent | None = None

    @classmethod
    def open(cls, address: str, me: Identity, seconds: float) -> Link:
        """Raises PeerError."""
        connection = connect(address, min(seconds, _CONNECT_SECONDS))
        channel = Channel(connection, seconds)
        files: Sequence[int] = ()
        try:
            if connection.family == socket.AF_UNIX:
                if not is_same_user(connection):
                    raise PeerError("user", f"{address} belongs to another user")
            elif not me.secret:
                raise PeerError("secret", f"{address} is not asked: set KVBM_PEER_SECRET or KVBM_PEER_SECRET_FILE")
            else:
                authenticate_client(channel, me.secret)
            channel.send(me.who)
            about: About = channel.receive(About)
            if connection.family == socket.AF_UNIX:
                if not channel.wait(seconds):
                    raise PeerError("late", f"no answer for {seconds:g} s")
                _, files, _, _ = socket.recv_fds(connection, 1, len(about.slot_bytes) + 1)
                if len(files) != len(about.slot_bytes) + 1:
                    raise PeerError("malformed", "the neighbour hands over too few files")
            return cls(channel, about, files)
        except BaseException:
            channel.close()
            _close_all(files)
            raise

    def close_files(self) -> None:
        _close_all(self.files)
        self.files = ()

    def close(self) -> None:
        """Whatever the peer still sends reaches no memory after this."""
        if self.agent is not None:
            self.agent.close()
            self.agent = None
        self.channel.close()
        self.close_files()


class _Read:
    """Blocks to read to these addresses, and what has become of them."""

    def __init__(self, keys: Sequence[Key], addresses: Sequence[int], is_abandoned: Callable[[], bool]) -> None:
        self.keys, self.addresses, self.is_abandoned = keys, addresses, is_abandoned
        self.arrived: set[int] = set()  # positions
        self.bad: dict[int, str] = {}  # position -> kind of failure

    def settle(self, position: int, why: str) -> None:
        """``why`` it is not the block; empty: it has come."""
        if why:
            self.bad[position] = why
        else:
            self.arrived.add(position)

    def memory(self, position: int, size: int) -> memoryview:
        return memoryview((ctypes.c_char * size).from_address(self.addresses[position])).cast("B")


class Peer:
    """Keeps connections to one source for the threads of this process."""

    def __init__(self, source: Source, me: Identity) -> None:
        self.source = source
        self.path = ""  # how blocks come, once that is known
        self.is_self = False
        self._me = me
        self._lock = threading.Lock()
        self._idle: list[Link] = []
        self._local = ""  # its Unix socket, where it turns out to be a neighbour
        self._neighbour: Neighbour | None = None
        self._watched: socket.socket | None = None  # a handle of the connection that came with the neighbour's memory
        self._is_told = False  # which way was chosen
        self._pushing = threading.BoundedSemaphore(_PUSHES)
        self._rates: dict[str, list[float]] = {}  # blocks a second of the latest reads, by way

    def ask(self, keys: Sequence[Key], seconds: float) -> list[bool]:
        """Which of these blocks the peer holds. Raises PeerError."""
        with self._link(seconds) as link:
            link.channel.send(Ask(join_keys(list(keys))))
            answer: Answer = link.channel.receive(Answer)
            if len(answer.found) != len(keys):
                raise PeerError("malformed", "an answer of another length")
            return [bool(found) for found in answer.found]

    def changes(self, epoch: int, number: int, seconds: float) -> bytes:
        """What has changed in the peer's filter of keys since this change, as it comes. Raises PeerError."""
        with self._link(seconds) as link:
            link.close_files()  # nothing is read: a dead engine's memory must not be kept for this
            link.channel.send(Changes(epoch, number))
            answer: Filter = link.channel.receive(Filter)
            return answer.update

    def read(
        self,
        keys: Sequence[Key],
        addresses: Sequence[int],
        is_abandoned: Callable[[], bool],
        begin: Callable[[], None],
    ) -> list[tuple[int, str]]:
        """(position, kind of failure) of the blocks that did not come. Raises nothing. ``begin``: is called when there
        is a connection: what the first one takes says nothing about the rate of reads."""
        read = _Read(keys, addresses, is_abandoned)
        try:
            with self._link(self._me.seconds) as link:
                link.channel.is_abandoned = is_abandoned
                way = MAPPED if link.is_local else self._choose(link.about)
                if way == MAPPED:
                    self._map(link)
                begin()
                began = time.monotonic()
                {MAPPED: self._copy, SOCKET: self._receive, NIXL: self._pushed}[way](link, read)
                self._measured(way, len(read.arrived), time.monotonic() - began)
                link.channel.is_abandoned = None
        except PeerError as error:
            kind = error.kind
        except Exception as error:
            kind = type(error).__name__
        else:
            kind = "withdrawn"
        return [(i, read.bad.get(i, kind)) for i in range(len(keys)) if i not in read.arrived]

    def _copy(self, link: Link, read: _Read) -> None:
        """From the memory of a neighbour."""
        neighbour, count = self._map(link), len(read.keys)
        part = max(1, _LEASE_BYTES // neighbour.slot_bytes)

        def lease(at: int) -> None:
            if at < count:
                link.channel.send(Lease(self._me.rank, join_keys(list(read.keys[at : at + part]))))

        lease(0)
        for at in range(0, count, part):
            leased: Leased = link.channel.receive(Leased)
            lease(at + part)  # the server sums these up while the others are copied
            places = zip(leased.slots, leased.generations, leased.sums, strict=True)
            with _copying:
                for i, place in zip(range(at, min(at + part, count)), places, strict=True):
                    if read.is_abandoned():
                        raise PeerError("abandoned", "the load was given up")
                    read.settle(i, neighbour.copy(*place, read.addresses[i], read.keys[i]))

    def _receive(self, link: Link, read: _Read) -> None:
        """Over a socket. A block counts when the next message says that it was not withdrawn while it was sent."""
        rank, channel, keys, last = self._me.rank, link.channel, read.keys, -1
        fingerprint, size = self._me.fingerprint, link.about.slot_bytes[rank]
        channel.send(Read(rank, join_keys(list(keys))))
        for i in range(len(keys) + 1):
            block: Block = channel.receive(Block)
            if last >= 0:
                read.settle(last, "" if block.is_last_good else "withdrawn")
            last = -1
            if i == len(keys) or not block.generation:
                continue
            channel.receive_block(read.memory(i, size), bound_to(keys[i], fingerprint, rank, block.generation))
            last = i

    def _pushed(self, link: Link, read: _Read) -> None:
        """Over NIXL. After an error the agent goes with the connection, before this read is over."""
        channel = link.channel
        if link.agent is None:
            link.agent = Agent(self._me.memory, channel.socket.getsockname()[0])
        while not self._pushing.acquire(timeout=SLICE_SECONDS):
            if read.is_abandoned():
                return
        try:
            channel.send(Push(self._me.rank, join_keys(list(read.keys)), list(read.addresses), link.agent.metadata))
            self._await_push(link, link.agent, read.is_abandoned)
            pushed: Pushed = channel.receive(Pushed)
        finally:
            self._pushing.release()
        size = link.about.slot_bytes[self._me.rank]
        for i, total in enumerate(pushed.sums[: len(read.keys)]):
            is_good = bool(total) and checksum(read.memory(i, size), read.keys[i]) == total
            read.settle(i, "" if is_good else "damaged" if total else "withdrawn")

    def _await_push(self, link: Link, agent: Agent, is_abandoned: Callable[[], bool]) -> None:
        heard = time.monotonic()
        while not link.channel.wait(0):
            agent.progress()
            waited = time.monotonic() - heard
            if is_abandoned():
                raise PeerError("abandoned", "the load was given up")
            if waited > self._me.seconds:
                raise PeerError("late", f"no answer for {self._me.seconds:g} s")
            pause(waited)

    def _choose(self, about: About) -> str:
        """The way of the next read from another machine: each is tried a few times, then the faster one is taken."""
        ways = [way for way in self._me.ways if way != NIXL or about.nixl] or [SOCKET]
        with self._lock:
            untried = [way for way in ways if len(self._rates.setdefault(way, [])) < TRIES]
            if untried:
                return min(untried, key=lambda way: len(self._rates[way]))
            return max(ways, key=lambda way: max(self._rates[way]))

    def _measured(self, way: str, blocks: int, seconds: float) -> None:
        with self._lock:
            rates = self._rates.setdefault(way, [])
            rates[:] = [*rates, blocks / max(seconds, 1e-9)][-TRIES:]
            best = max(self._rates, key=lambda each: max(self._rates[each], default=0.0))
            ways = (MAPPED,) if way == MAPPED else self._me.ways
            is_measured = all(len(self._rates.get(each, [])) == TRIES for each in ways)
            if is_measured and (best != self.path or not self._is_told):
                self.path, self._is_told = best, True
                logger.info(
                    "peer %s: blocks come over %s (%s)", self.source.address, best,
                    ", ".join(f"{each} {max(found):.0f} blocks/s" for each, found in self._rates.items() if found),
                )  # fmt: skip

    def _map(self, link: Link) -> Neighbour:
        """The neighbour's memory, until its server ends: a dead engine's memory must not be kept by its readers."""
        with self._lock:
            neighbour = self._neighbour
            if neighbour is None or neighbour.generation != link.about.generation:
                if not link.files:
                    raise PeerError("gone", "the neighbour's server has ended")
                neighbour = self._neighbour = Neighbour(link.about, link.files, self._me.rank)
                self._watched = socket.socket(fileno=os.dup(link.channel.socket.fileno()))
                for call, argument in (self._watch, self._watched), (self._map_ahead, None):
                    threading.Thread(target=call, args=(neighbour, argument), name="kvbm-peer-map", daemon=True).start()
            link.close_files()
            return neighbour

    def _map_ahead(self, neighbour: Neighbour, _: None) -> None:
        map_ahead(neighbour.address, neighbour.size, lambda: self._neighbour is not neighbour)

    def _watch(self, neighbour: Neighbour, connection: socket.socket) -> None:
        poll = select.poll()
        poll.register(connection, 0)  # the end of the connection alone
        poll.poll()
        with self._lock:
            if self._neighbour is neighbour:
                self._neighbour = self._watched = None
        connection.close()
        self.close()

    @contextlib.contextmanager
    def _link(self, seconds: float) -> Iterator[Link]:
        """A connection for one conversation. It is closed after any error: what comes later must reach nothing."""
        with self._lock:
            link = self._idle.pop() if self._idle else None
        if link is not None and (
            link.channel.wait(0) or (link.is_local and self._me.rank >= 0 and not self._neighbour)
        ):
            link.close()  # closed by the peer
            link = None
        if link is None:
            link = self._open(seconds)
        link.channel.seconds = seconds
        try:
            yield link
        except BaseException:
            link.close()
            raise
        with self._lock:
            self._idle.append(link)

    def _open(self, seconds: float) -> Link:
        link = self._open_at(self._local or self.source.address, seconds)
        about = link.about
        if about.generation == self._me.who.generation:
            self.is_self = True
            link.close()
            raise PeerError("self", "this engine's own server")
        if not link.is_local and about.machine == self._me.machine and os.path.exists(about.path):
            with contextlib.suppress(PeerError):
                near = self._open_at(UNIX + about.path, seconds)
                if near.about.generation == about.generation:
                    link.close()
                    self._local, link = UNIX + about.path, near
                else:
                    near.close()
        if self._me.rank < 0:
            link.close_files()  # the leader reads no blocks, and must not keep a dead neighbour's memory
        elif self._me.rank >= len(about.slot_bytes):
            link.close()
            raise PeerError("fingerprint", f"it has {len(about.slot_bytes)} ranks")
        if link.is_local or not self.path or self.path == MAPPED:
            self.path = MAPPED if link.is_local else self._me.ways[0]
        return link

    def _open_at(self, address: str, seconds: float) -> Link:
        try:
            return Link.open(address, self._me, seconds)
        except PeerError:
            self._local = ""
            raise

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
            if self._watched is not None:
                with contextlib.suppress(OSError):
                    self._watched.shutdown(socket.SHUT_RDWR)  # ends its thread, and the server's
        for link in idle:
            link.close()


def connect(address: str, seconds: float) -> socket.socket:
    try:
        if address.startswith(UNIX):
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(seconds)
            try:
                connection.connect(address.removeprefix(UNIX))
            except BaseException:
                connection.close()
                raise
            return connection
        connection = socket.create_connection(split_address(address), seconds)
    except (OSError, ValueError) as error:
        raise PeerError("gone", f"{address} cannot be reached: {error}") from None
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _close_all(files: Sequence[int]) -> None:
    for file in files:
        os.close(file)
