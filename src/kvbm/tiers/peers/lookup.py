"""Which peer holds which block. The leader asks, and never waits: threads of this class put the questions.

One question a peer covers a whole prompt. The best peers are asked side by side; a peer that does not answer delays a
request by ``lookup_seconds`` at most, and is not asked again for a while after it has been silent a few times.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvbm.core.breaker import Breaker
from kvbm.core.catalog import PENDING, Hint, SourceState
from kvbm.core.keys import Key
from kvbm.gil import begin_short_turns, end_short_turns, notify, short_turns
from kvbm.tiers.bounded import DaemonThreads
from kvbm.tiers.peers import sources as table
from kvbm.tiers.peers.client import MAPPED, SOCKET, Identity, Peer
from kvbm.tiers.peers.finder import Finder, Source
from kvbm.tiers.peers.sources import MAX_SOURCES, SourceTable
from kvbm.tiers.peers.store import SOURCE_BITS
from kvbm.tiers.peers.wire import PeerError

logger = logging.getLogger("kvbm")

PRESENT_SECONDS = 10.0  # a block that a peer held counts as there for so long
MISSING_SECONDS = 1.0  # the same prompt is not asked for again for so long
SLOW_SECONDS = 30.0  # a source that is slower than computing is tried again after so long
MAX_KEYS = 1 << 18
MAX_ASKED = 1 << 15  # keys in one question
MAX_CHECKS = 64
_MAX_RECENT = 1024
_THREADS = 8


class _Known:
    """One source, with its number."""

    def __init__(self, number: int, peer: Peer) -> None:
        self.number = number
        self.peer = peer
        self.breaker = Breaker()
        self.is_told = False
        self.failed_reads = 0
        self.slow_until = 0.0
        self.used_at = 0.0


class _Check:
    def __init__(self, keys: Sequence[Key], start: int, deadline: float) -> None:
        self.keys = keys[start : start + MAX_ASKED]
        self.span = keys[start], keys[-1]
        self.began = time.monotonic()
        self.deadline = deadline
        self.waiting = frozenset(self.keys)
        self.left = 1


class Lookup:
    """``tables``: of each rank. ``own``: addresses of this engine. The leader's thread calls :meth:`expect`,
    :meth:`find` and :meth:`discard`."""

    def __init__(
        self,
        finder: Finder,
        me: Identity,
        tables: Sequence[SourceTable],
        lookup_seconds: float,
        own: Sequence[str] = (),
    ) -> None:
        self._finder = finder
        self._own = frozenset(own)
        self._me = me
        self._tables = tables
        self._lookup_seconds = lookup_seconds
        self.break_even: Callable[[], float] | None = None
        self._lock = threading.Lock()  # never held across a question
        self._known: dict[str, _Known] = {}  # by address
        self._found: OrderedDict[Key, tuple[int, float]] = OrderedDict()  # key -> (place, until when)
        self._handles = 0
        self._checks: list[_Check] = []
        self._answer_seconds = 0.0  # of a check whose answer came in time, smoothed
        self._recent: OrderedDict[tuple[Key, Key], float] = OrderedDict()
        self._threads = DaemonThreads(_THREADS, "kvbm-peer-ask")

    # -- the leader ---------------------------------------------------------------------------------------------------

    def expect(self, keys: Sequence[Key], start: int, hint: Hint | None) -> None:
        if start >= len(keys) or (hint is None and not self._finder.members()):
            return  # no request waits for nothing
        now, span = time.monotonic(), (keys[start], keys[-1])
        with self._lock:
            is_known = now < self._recent.get(span, 0.0) or any(check.span == span for check in self._checks)
            if is_known or len(self._checks) >= MAX_CHECKS:
                return
            check = _Check(keys, start, now + self._lookup_seconds)
            self._checks.append(check)
        begin_short_turns()  # the engine's thread computes on
        try:
            begun = self._threads.submit(self._begin, check, keys, start, hint)
        except RuntimeError:  # closed
            end_short_turns()
            self._end(check)
        else:
            begun.add_done_callback(lambda _: end_short_turns())

    def find(self, key: Key) -> int | None:
        now = time.monotonic()
        with self._lock:
            place, until = self._found.get(key, (0, 0.0))
            if now < until:
                return place
            for check in self._checks:
                if now < check.deadline and key in check.waiting:
                    return PENDING
        return None

    def answer_seconds(self, key: Key) -> float | None:
        """Expected seconds until a pending block is found or not: as long as answers have taken lately, or before the
        first of them as long as the lookup may take. None for a block that is not pending."""
        now = time.monotonic()
        with self._lock:
            due = self._answer_seconds or self._lookup_seconds
            begun = [check.began for check in self._checks if now < check.deadline and key in check.waiting]
        return max(0.0, max(begun) + due - now) if begun else None

    def discard(self, keys: Sequence[Key]) -> None:
        with self._lock:
            for key in keys:
                self._found.pop(key, None)

    def clear(self) -> None:
        with self._lock:
            self._found.clear()
            self._recent.clear()

    def close(self, seconds: float) -> None:
        self._finder.close()
        self._threads.close(seconds, cancel=True)
        for known in self._known.values():
            known.peer.close()

    # -- the threads --------------------------------------------------------------------------------------------------

    def _begin(self, check: _Check, keys: Sequence[Key], start: int, hint: Hint | None) -> None:
        asked: list[_Known] = []
        try:
            candidates = self._finder.candidates(keys, start, hint)
            asked = [known for source in candidates if (known := self._enter(source)) and self._is_usable(known)]
        except Exception as error:
            logger.warning("peers: nothing was asked: %s: %s", type(error).__name__, error)
        with self._lock:
            check.left = len(asked)
        if not asked:
            self._end(check)
        for known in asked[1:]:
            self._threads.submit(self._ask, check, known)
        if asked:
            self._ask(check, asked[0])

    def _ask(self, check: _Check, known: _Known) -> None:
        seconds = max(self._lookup_seconds, self._me.seconds / 4)
        found: list[bool] = []
        try:
            with short_turns():
                found = known.peer.ask(check.keys, seconds)
        except PeerError as error:
            self._failed(known, error)
        except Exception as error:
            self._failed(known, PeerError("other", f"{type(error).__name__}: {error}"))
        with self._lock:
            if found:
                taken = time.monotonic() - check.began
                self._answer_seconds = 0.8 * self._answer_seconds + 0.2 * taken if self._answer_seconds else taken
                known.breaker.succeeded()
                known.is_told = False
                self._learn(known, [key for key, there in zip(check.keys, found, strict=True) if there])
            check.left -= 1
            is_over = check.left == 0 or (bool(found) and all(found))
        if is_over:
            self._end(check)

    def _failed(self, known: _Known, error: PeerError) -> None:
        if known.peer.is_self:
            return
        with self._lock:
            known.breaker.failed(time.monotonic())
            is_told, known.is_told = known.is_told, True
        for each in self._tables[:1]:
            each.add(known.number, 0, 0, [error.kind], False)
        if not is_told:
            logger.warning("peer %s is not used for now: %s", known.peer.source.address, error)

    def _end(self, check: _Check) -> None:
        with self._lock:
            if check in self._checks:
                self._checks.remove(check)
            self._recent.pop(check.span, None)
            self._recent[check.span] = time.monotonic() + MISSING_SECONDS
            while len(self._recent) > _MAX_RECENT:
                self._recent.popitem(last=False)
        notify()

    # -- sources ------------------------------------------------------------------------------------------------------

    def _enter(self, source: Source) -> _Known | None:
        """The source by its number: one that was not used for long makes room for a new one."""
        if source.address in self._own or source.fingerprint not in ("", self._me.fingerprint):
            return None
        with self._lock:
            known = self._known.get(source.address)
            if known is None:
                number = len(self._known)
                if number >= MAX_SOURCES:
                    oldest = min(self._known, key=lambda address: self._known[address].used_at)
                    number = self._known.pop(oldest).number
                    mask = (1 << SOURCE_BITS) - 1
                    gone = [key for key, (place, _) in self._found.items() if place & mask == number]
                    for key in gone:
                        del self._found[key]
                for each in self._tables:
                    each.enter(number, source)
                known = self._known[source.address] = _Known(number, Peer(source, self._me))
            known.used_at = time.monotonic()
            return known

    def _is_usable(self, known: _Known) -> bool:
        """Not this engine, nor a source that is silent, fails, or brings blocks more slowly than they are computed."""
        now, counts = time.monotonic(), [each.counts(known.number) for each in self._tables]
        failed = sum(count[table.FAILED_READS] for count in counts)
        with self._lock:
            if failed > known.failed_reads:
                known.breaker.failed(now)
            known.failed_reads = failed
            if known.peer.is_self or known.breaker.is_open(now):
                return False
        rate, needed = _rate(counts), 0.0 if self.break_even is None else self.break_even()
        if 0 < rate < needed and known.slow_until < now:
            is_new = not known.slow_until
            known.slow_until = now + SLOW_SECONDS
            if is_new:
                logger.info(
                    "peer %s brings %.3f GB/s, and computing is as fast as %.3f GB/s: it is asked again in %.0f s",
                    known.peer.source.address, rate / 1e9, needed / 1e9, SLOW_SECONDS,
                )  # fmt: skip
                return False
            return True  # a probe: it may be faster by now
        return not (0 < rate < needed)

    def states(self) -> list[SourceState]:
        with self._lock:
            known = [each for each in self._known.values() if not each.peer.is_self]
        now, states = time.monotonic(), []
        for each in known:
            counts = [rank.counts(each.number) for rank in self._tables]
            refused: dict[str, int] = {}
            for count in counts:
                for kind, number in table.refusals(count).items():
                    refused[kind] = refused.get(kind, 0) + number
            is_mapped = sum(count[table.MAPPED_BLOCKS] for count in counts) > 0
            states.append(
                SourceState(
                    source=each.peer.source.address,
                    path=MAPPED if is_mapped else each.peer.path or SOCKET,
                    blocks=min(count[table.BLOCKS] for count in counts),
                    bytes=sum(count[table.BYTES] for count in counts),
                    bytes_per_second=_rate(counts),
                    refused=refused,
                    is_suspended=each.breaker.is_open(now),
                )
            )
        return states

    # -- the caller holds the lock ------------------------------------------------------------------------------------

    def _learn(self, known: _Known, keys: Sequence[Key]) -> None:
        until = time.monotonic() + PRESENT_SECONDS
        for key in keys:
            before, valid = self._found.pop(key, (0, 0.0))
            if valid < time.monotonic():
                self._handles += 1
                before = self._handles << SOURCE_BITS | known.number
            self._found[key] = before, until
        while len(self._found) > MAX_KEYS:
            self._found.popitem(last=False)


def _rate(counts: Sequence[Sequence[int]]) -> float:
    """Bytes a second of the slowest rank that has been measured."""
    return float(min((count[table.RATE] for count in counts if count[table.RATE]), default=0))
