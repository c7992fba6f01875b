"""Which objects are known to be in the bucket.

The leader asks, and never waits: an answer is found, missing, or pending while a check is under way. A check walks
along the keys of a prompt in windows, with an existence request (HEAD) for each object and rank, and ends at the first
block that is not there. Threads of the class make the requests. Objects that several prompts need are asked for once.

A block of a prefix lies either in the object of its aligned group of blocks or in an object of its own. The check asks
for the group first. It asks for the single objects only where the group is missing, and a block that no complete group
of this prompt contains is looked for alone.

Answers age: an object may be deleted, and another engine may write one. The engine's own writes are known at once.

A lookup is pending no longer than the requests of its check usually take (their smoothed time plus four times its
deviation, as TCP bounds its retransmissions) or a part of the time that computing its blocks takes, whichever is more,
and never longer than KVBM_OBJECT_LOOKUP_SECS. An answer that comes later serves the next lookup; until it comes, and
after a request that failed until one succeeds, no lookup is pending.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvbm.core.catalog import PENDING
from kvbm.core.keys import Key
from kvbm.tiers.bounded import DaemonThreads
from kvbm.tiers.objects.client import Client, ObjectStoreError
from kvbm.tiers.objects.format import Names, blocks_in, object_id, object_of, place_of

PRESENT_SECONDS = 600.0  # an object that was there counts as there for so long
MISSING_SECONDS = 5.0  # an object that was not there may have been written since
MAX_OBJECTS = 1 << 18  # answers kept; about 150 bytes each
MAX_KEYS = 1 << 18  # places in groups kept; about 200 bytes each
MAX_CHECKS = 64  # prompts checked at a time; beyond that a prompt uses the answers that are known
MAX_RECENT = 1024
MIN_WAIT_SECONDS = 0.02  # of a measured deadline: a thread may have to wait for the interpreter that long
# Of the time that computing takes, for a lookup whose answer is late. A few milliseconds of bad luck must not cost a
# second of computing; a store that stalls costs one request so much more.
WAIT_SHARE = 0.125
_FIRST_WINDOW = 8  # objects; doubles with every window that is found whole
_TURN = 128  # keys; after as many a thread lets others have the interpreter


class _Latency:
    """Seconds of an existence request: smoothed, and its mean deviation."""

    def __init__(self) -> None:
        self.seconds = self._deviation = 0.0

    def observe(self, seconds: float) -> None:
        if not self.seconds:
            self.seconds, self._deviation = seconds, seconds / 2
            return
        self._deviation += (abs(seconds - self.seconds) - self._deviation) / 4
        self.seconds += (seconds - self.seconds) / 8

    @property
    def longest(self) -> float:
        return self.seconds + 4 * self._deviation


class _Check:
    """The keys of one prompt on their way through the requests. Threads of the pool use it, one at a time."""

    def __init__(self, keys: Sequence[Key], start: int, deadline: float) -> None:
        self.keys = keys
        self.start = start
        self.span = keys[start], keys[-1]
        self.deadline = deadline  # by the monotonic clock; the lookup goes on without an answer then
        self.began = time.monotonic()
        self.waiting: frozenset[Key] = frozenset()  # complete once the check has begun
        self.answers: dict[int, bool] = {}
        self.units: list[tuple[int | None, list[int]]] = []  # (group, its single objects), in order of the prefix
        self.at = 0
        self.window = _FIRST_WINDOW
        self.left = 0

    def next_objects(self, known: Callable[[int], bool | None]) -> list[int]:
        """The objects to ask for next; none when the check is over."""

        def answer(identifier: int) -> bool | None:
            return self.answers.get(identifier, known(identifier))

        while self.at < len(self.units):
            group, singles = self.units[self.at]
            found = answer(group) if group is not None else False
            if found is None:
                break
            if not found:
                states = [answer(single) for single in singles]
                unknown = states.index(None) if None in states else len(states)
                if False in states[:unknown]:
                    return []
                if unknown < len(states):
                    break
            self.at += 1
        wanted: list[int] = []
        for n, (group, singles) in enumerate(self.units[self.at : self.at + self.window]):
            if group is not None and answer(group) is None:
                wanted.append(group)
            elif group is None or n == 0:
                wanted += [single for single in singles if answer(single) is None]
        self.window *= 2
        return wanted


class Presence:
    """``clients`` by rank: an object counts as present when the objects of all ranks are there.

    The leader's thread calls :meth:`expect`, :meth:`find`, :meth:`add` and :meth:`discard`; all return at once.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        names: Names,
        bits: int,
        *,
        lookup_seconds: float = 0.25,
        present_seconds: float = PRESENT_SECONDS,
        missing_seconds: float = MISSING_SECONDS,
        max_objects: int = MAX_OBJECTS,
        has_answered: bool = True,
    ) -> None:
        """``has_answered``: the store has, when the ranks opened it. No lookup waits for one that has not."""
        self._clients = clients
        self._names = names
        self._bits = bits
        self._lookup_seconds = lookup_seconds
        self._lifetime = {True: present_seconds, False: missing_seconds}
        self._max_objects = max_objects
        self._lock = threading.Lock()  # never held across a request
        self._known: OrderedDict[int, tuple[bool, float]] = OrderedDict()  # object -> (there, until when)
        self._groups: OrderedDict[Key, int] = OrderedDict()  # key -> place in its group
        self._under_way: dict[int, list[_Check]] = {}  # object -> the checks that wait for it
        self._checks: list[_Check] = []
        # (first key, last key) of checks that are over -> until when. A lookup that comes again must not start the same
        # check again: it would find the answer pending for ever.
        self._recent: OrderedDict[tuple[Key, Key], float] = OrderedDict()
        self._concurrency = clients[0].settings.concurrency
        self._threads = DaemonThreads(self._concurrency, "kvbm-object-head")
        self.requests = 0
        # Seconds that the engine takes to compute so many blocks; 0 while that is not known.
        self.compute_seconds: Callable[[int], float] = lambda _: 0.0
        self._latency = _Latency()
        self._is_failing = not has_answered  # or the last existence request failed
        self.changes = 0  # goes up with every object that has become present or missing

    # -- the leader ---------------------------------------------------------------------------------------------------

    def expect(self, keys: Sequence[Key], start: int = 0) -> None:
        """A request is about to look for ``keys[start:]``, of a prompt whose keys are ``keys``. Starts a check."""
        if start >= len(keys):
            return
        if any(client.suspended for client in self._clients):
            self._expect_writes(keys, start)
            return
        now = time.monotonic()
        span = keys[start], keys[-1]
        with self._lock:
            is_known = now < self._recent.get(span, 0.0) or any(check.span == span for check in self._checks)
            if is_known or len(self._checks) >= MAX_CHECKS:
                return
            # A store that owes an answer, or has failed to give one, is slow for every request: the first one that
            # waited in vain is the last.
            is_late = self._is_failing or any(now >= check.deadline for check in self._checks)
            check = _Check(keys, start, now + (0.0 if is_late else self._longest_wait(len(keys) - start)))
            self._checks.append(check)
        try:
            self._threads.submit(self._begin, check)
        except RuntimeError:  # closed
            self._end(check)

    def _expect_writes(self, keys: Sequence[Key], start: int) -> None:
        """No check, but the blocks may be written once the store answers again: in their groups."""
        last = len(keys) >> self._bits << self._bits
        if self._bits and last > start and keys[last - 1] not in self._groups:
            with contextlib.suppress(RuntimeError):  # closed
                self._threads.post(self._cut, keys, start)

    def find(self, key: Key) -> int | None:
        """The place of a block; None when it is not known to be there, PENDING while a check is due to find out."""
        now = time.monotonic()
        with self._lock:
            place = self._groups.get(key)
            if place is not None and self._answer(object_of(place), now):
                return place
            alone = object_id(key, 0)
            if self._answer(alone, now):
                return place_of(alone, 0)
            for check in self._checks:
                if now < check.deadline and (key == check.span[0] or key in check.waiting):
                    return PENDING
        return None

    def is_alone(self, place: int) -> bool:
        """Whether a block lies in an object of its own, where blocks are grouped."""
        return self._bits > 0 and blocks_in(object_of(place)) == 1

    @property
    def probe_name(self) -> str:
        """Of an object that a probe may write."""
        return self._names.probe

    @property
    def latency_seconds(self) -> float:
        """Of one existence request, smoothed; 0 before the first."""
        return self._latency.seconds

    def answer_seconds(self, key: Key) -> float | None:
        """Expected seconds until a pending block is found or not; None for a block that is not pending."""
        now = time.monotonic()
        with self._lock:
            for check in self._checks:
                if now < check.deadline and (key == check.span[0] or key in check.waiting):
                    blocks = len(check.keys) - check.start
                    return max(0.0, check.began + self._windows(blocks) * self._latency.seconds - now)
        return None

    def _longest_wait(self, blocks: int) -> float:
        if not self._latency.seconds:
            return self._lookup_seconds  # nothing is measured yet
        measured = self._windows(blocks) * self._latency.longest
        at_stake = WAIT_SHARE * self.compute_seconds(blocks)
        return min(self._lookup_seconds, max(MIN_WAIT_SECONDS, measured, at_stake))

    def _windows(self, blocks: int) -> int:
        """Requests one after the other that a check of so many blocks takes, if all are there."""
        objects, window, threads, found = -(-blocks >> self._bits), _FIRST_WINDOW, self._concurrency, 0
        while objects > 0:
            found += -(-min(objects, window) // threads)
            objects -= window
            window *= 2
        return max(1, found)

    def place_for_write(self, keys: Sequence[Key]) -> list[int]:
        """Where to write these blocks: a group whose blocks are all among them gets one object."""
        with self._lock:
            groups = [self._groups.get(key) for key in keys]
        members: dict[int, int] = {}
        for place in groups:
            if place is not None:
                members[object_of(place)] = members.get(object_of(place), 0) + 1
        whole = {identifier for identifier, count in members.items() if count == 1 << self._bits}
        return [
            place if place is not None and object_of(place) in whole else place_of(object_id(key, 0), 0)
            for key, place in zip(keys, groups, strict=True)
        ]

    def last_whole(self, keys: Sequence[Key], room: int) -> int:
        """How many of the first ``room`` keys there are in front of a group that ends behind them."""
        with self._lock:
            torn = self._groups.get(keys[room])
            while torn is not None and room:
                place = self._groups.get(keys[room - 1])
                if place is None or object_of(place) != object_of(torn):
                    break
                room -= 1
        return room

    def was_there(self, key: Key) -> bool:
        """Whether the block was there at the last answer, however old that is: writing it again would be wasted."""
        with self._lock:
            place = self._groups.get(key)
            objects = (object_id(key, 0),) if place is None else (object_id(key, 0), object_of(place))
            return any(self._known.get(identifier, (False, 0.0))[0] for identifier in objects)

    def add(self, places: Sequence[int]) -> None:
        """Every rank has written these."""
        with self._lock:
            for identifier in {object_of(place) for place in places}:
                self._learn(identifier, True)

    def discard(self, places: Sequence[int]) -> None:
        """These could not be read: they count as missing until a check finds them again."""
        with self._lock:
            for identifier in {object_of(place) for place in places}:
                self._learn(identifier, False)

    def clear(self) -> None:
        with self._lock:
            self._known.clear()
            self._groups.clear()
            self._recent.clear()
            self.changes += 1

    def close(self, timeout: float | None = None) -> bool:
        with self._lock:
            self._checks.clear()
        return self._threads.close(timeout, cancel=True)

    @property
    def objects(self) -> int:
        """How many objects are known to be there."""
        with self._lock:
            return sum(there for there, _ in self._known.values())

    @property
    def checks(self) -> int:
        return len(self._checks)

    # -- the threads --------------------------------------------------------------------------------------------------

    def _begin(self, check: _Check) -> None:
        check.units = self._cut(check.keys, check.start)
        check.waiting = frozenset(check.keys[check.start :])
        self._step(check)

    def _cut(self, keys: Sequence[Key], start: int) -> list[tuple[int | None, list[int]]]:
        """Cut a prefix into groups: (group, its single objects) from the one of ``start`` on. Not on the leader's
        thread: a long prompt takes milliseconds."""
        size = 1 << self._bits
        first = start // size * size
        units: list[tuple[int | None, list[int]]] = []
        places: list[tuple[Key, int]] = []
        for at in range(first, len(keys), size):
            if (at - first) % _TURN < size:
                time.sleep(0)  # 2,048 blocks take milliseconds, and the engine's thread wants the interpreter
            members = keys[at : at + size]
            group = None
            if size > 1 and len(members) == size:
                group = object_id(members[-1], self._bits)
                places += [(key, place_of(group, index)) for index, key in enumerate(members)]
            units.append((group, [object_id(key, 0) for key in members[max(0, start - at) :]]))
        with self._lock:
            for key, place in places:
                self._groups[key] = place
                self._groups.move_to_end(key)
            while len(self._groups) > MAX_KEYS:
                self._groups.popitem(last=False)
        return units

    def _step(self, check: _Check) -> None:
        with self._lock:
            now = time.monotonic()
            wanted = check.next_objects(lambda identifier: self._answer(identifier, now))
            fresh = []
            for identifier in wanted:
                if identifier not in self._under_way:
                    self._under_way[identifier] = []
                    fresh.append(identifier)
                self._under_way[identifier].append(check)
            check.left = len(wanted)
        if not wanted:
            self._end(check)
        for identifier in fresh:
            try:
                self._threads.submit(self._ask, identifier)
            except RuntimeError:  # closed
                self._answered(identifier, None)

    def _ask(self, identifier: int) -> None:
        there: bool | None = True
        began = time.monotonic()
        try:
            for rank, client in enumerate(self._clients):
                self.requests += 1
                if not client.exists(self._names.of(rank, identifier)):
                    there = False
                    break
        except ObjectStoreError:
            there = None
            self._is_failing = True
        else:
            self._is_failing = False
            self._latency.observe(time.monotonic() - began)
        self._answered(identifier, there)

    def _answered(self, identifier: int, there: bool | None) -> None:
        ready = []
        with self._lock:
            if there is not None:
                self._learn(identifier, there)
            for check in self._under_way.pop(identifier):
                check.answers[identifier] = bool(there)  # no answer ends the check, as a missing object does
                check.left -= 1
                if not check.left:
                    ready.append(check)
        for check in ready:
            self._step(check)

    def _end(self, check: _Check) -> None:
        with self._lock:
            if check in self._checks:
                self._checks.remove(check)
            self._recent.pop(check.span, None)
            self._recent[check.span] = time.monotonic() + self._lifetime[False]
            while len(self._recent) > MAX_RECENT:
                self._recent.popitem(last=False)

    # -- the caller holds the lock ------------------------------------------------------------------------------------

    def _answer(self, identifier: int, now: float) -> bool | None:
        there, until = self._known.get(identifier, (False, 0.0))
        return there if now < until else None

    def _learn(self, identifier: int, there: bool) -> None:
        before, _ = self._known.pop(identifier, (False, 0.0))
        self._known[identifier] = there, time.monotonic() + self._lifetime[there]
        self.changes += before != there
        while len(self._known) > self._max_objects:
            self._known.popitem(last=False)
