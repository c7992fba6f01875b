"""The finder of an engine: keeps the list of members and the copies of their filters up to date, and names candidates.

Lookups use what is known at that moment and never wait. One thread reads the lists of members and gives out the
questions for changes of filters; a few threads ask them, so that one member that hangs does not delay the others.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence

from kvbm.core.catalog import Hint
from kvbm.core.keys import Key
from kvbm.tiers.bounded import DaemonThreads
from kvbm.tiers.peers.finder import Source
from kvbm.tiers.peers.finding.fleet import Fleet
from kvbm.tiers.peers.finding.member_lists import MemberList
from kvbm.tiers.peers.wire import PeerError

logger = logging.getLogger("kvbm")

ASKING_THREADS = 4
END_SECONDS = 1.0

# (member, epoch, number of the last known change) -> its answer: msgpack of an ``Update``, or of nil. Raises OSError.
AskFilter = Callable[[Source, int, int], bytes]


class FleetFinder:
    """Implements :class:`kvbm.tiers.peers.finder.Finder`."""

    def __init__(self, lists: Sequence[MemberList], fingerprint: str, ask_filter: AskFilter) -> None:
        self.fleet = Fleet(fingerprint)
        self._lists = lists
        self._ask_filter = ask_filter
        self._read_at = [0.0] * len(lists)  # when each is to be read again
        self._read: list[Sequence[Source]] = [()] * len(lists)  # of each list, when it was last readable
        self._failing: set[int] = set()  # lists that cannot be read now
        self._own: Source | None = None
        self._wake, self._over = threading.Event(), threading.Event()
        self._asking = DaemonThreads(ASKING_THREADS, "kvbm-peer-filter")
        self._thread = threading.Thread(target=self._run, name="kvbm-peer-find", daemon=True)
        self._thread.start()

    # -- the contract -------------------------------------------------------------------------------------------------

    def candidates(self, keys: Sequence[Key], start: int, hint: Hint | None) -> Sequence[Source]:
        return self.fleet.candidates(keys, start, hint)

    def members(self) -> Sequence[Source]:
        return self.fleet.members()

    def announce(self, own: Source, held: Collection[Key]) -> None:
        """The server process serves the filter and keeps the registration: here it only matters which member is us."""
        self._own = own
        self.fleet.set_own(own)
        self._read_at = [0.0] * len(self._lists)
        self._wake.set()

    def close(self) -> None:
        self._over.set()
        self._wake.set()
        self._thread.join(END_SECONDS)
        self._asking.close(END_SECONDS, cancel=True)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self._refresh()
                for question in self.fleet.take_due(time.monotonic()):
                    self._asking.submit(self._ask, *question)
            except Exception as error:  # the thread goes on: a fault here costs hits
                logger.warning("Finding peers failed: %s", error, exc_info=True)
            due = self.fleet.next_due()
            wake_at = min([*self._read_at, math.inf if due is None else due])
            # 10 ms, so that nothing makes the loop spin; 1 s, to see the end.
            self._wake.wait(min(max(0.01, wake_at - time.monotonic()), 1.0))
            self._wake.clear()

    def _refresh(self) -> None:
        due = [n for n, at in enumerate(self._read_at) if time.monotonic() >= at]
        for n in due:
            members = self._lists[n]
            try:
                self._read[n] = members.read()
                if n in self._failing:
                    self._failing.discard(n)
                    logger.info("The list of peers can be read again")
            except OSError as error:
                if n not in self._failing:
                    self._failing.add(n)
                    logger.warning("The list of peers cannot be read, the last one stays in force: %s", error)
            self._read_at[n] = time.monotonic() + members.seconds
        if not due:
            return
        everyone = [source for part in self._read for source in part]
        self.fleet.set_members((source for source in everyone if not self._is_own_address(source)), time.monotonic())

    def _is_own_address(self, source: Source) -> bool:
        """A list may name this engine by any of its names: an address of this machine with our port."""
        own = self._own
        if own is None or source.address.startswith("unix:") or own.address.startswith("unix:"):
            return False
        host, _, port = source.address.rpartition(":")
        return port == own.address.rpartition(":")[2] and _is_local(host.strip("[]"))

    def _ask(self, source: Source, epoch: int, number: int) -> None:
        try:
            answer = self._ask_filter(source, epoch, number)
        except Exception as error:  # whatever it is: the member has not answered
            is_new = self.fleet.failed(source, time.monotonic())
            # No lookup asks a silent member, so only this log says why it refuses. A member may end at any time.
            if is_new and isinstance(error, PeerError) and error.kind not in ("gone", "late", "self"):
                logger.warning("peer %s is not used for now: %s", source.address, error)
        else:
            self.fleet.answered(source, answer, time.monotonic())
        self._wake.set()


def _is_local(host: str) -> bool:
    """Whether an address belongs to this machine: only those can be bound."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True
