"""Which member of the fleet may hold a prompt's prefix: the members, a copy of each one's filter, and the choice.

Bookkeeping alone: no socket, no thread, no clock. :mod:`kvbm.tiers.peers.finding.finder` feeds it, and the fleet
simulation (``benchmarks/fleet.py``) drives the same code. Any thread may call any method.

A member is a candidate while its filter is known. A member that does not answer loses its filter, and with it every
candidacy, until it answers again: so a death costs the dead member's blocks and nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import msgspec
import xxhash

from kvbm.core.catalog import Hint
from kvbm.core.key_filter import FilterCopy, Probe, Update
from kvbm.core.keys import Key
from kvbm.tiers.peers.finder import MAX_CANDIDATES, Source

MAX_MEMBERS = 1024
# Between two questions for a member's changes: the shortest while it changes, twice as long after each answer
# without a change, so that an idle fleet of 64 asks each member 16 times a second in all.
MIN_POLL_SECONDS, MAX_POLL_SECONDS = 0.5, 4.0
MAX_RETRY_SECONDS = 30.0  # of a member that does not answer
_UPDATE = msgspec.msgpack.Decoder(Update | None)


class Member:
    """One member, as this engine knows it."""

    __slots__ = ("answers", "copy", "due", "interval", "is_asked", "is_silent", "source")

    def __init__(self, source: Source, now: float) -> None:
        self.source = source
        self.copy: FilterCopy | None = None  # None until it has answered, and after it did not
        self.answers = 0
        self.due = now
        self.interval = MIN_POLL_SECONDS
        self.is_asked = False  # a question is under way
        self.is_silent = False  # the last question was not answered


class Fleet:
    """``fingerprint``: of this engine's cache; members with another one are left out."""

    def __init__(self, fingerprint: str) -> None:
        self.received_bytes = 0  # of filters and their updates
        self.refused = 0  # updates that fit no filter, and members beyond the limit
        self._fingerprint = fingerprint
        self._own: Source | None = None
        self._members: dict[str, Member] = {}  # by address
        self._lock = threading.Lock()

    # -- members ------------------------------------------------------------------------------------------------------

    def set_own(self, own: Source) -> None:
        with self._lock:
            self._own = own
            for address in [address for address, member in self._members.items() if self._is_own(member.source)]:
                del self._members[address]

    def set_members(self, sources: Iterable[Source], now: float) -> None:
        """These are all members now. Those that were known keep their filters."""
        wanted: dict[str, Source] = {}
        for source in sources:
            if self._is_own(source) or (source.fingerprint and source.fingerprint != self._fingerprint):
                continue
            if len(wanted) >= MAX_MEMBERS:
                self.refused += 1
                continue
            known = wanted.get(source.address)
            wanted[source.address] = source if known is None or not known.member else known
        with self._lock:
            before, self._members = self._members, {}
            for address, source in wanted.items():
                member = before.get(address)
                if member is None or member.source.generation != source.generation:
                    member = Member(source, now)  # a new server process has other blocks
                member.source = source
                self._members[address] = member

    def members(self) -> list[Source]:
        with self._lock:
            return [member.source for member in self._members.values()]

    def silent(self) -> list[Source]:
        """Members that do not answer."""
        with self._lock:
            return [member.source for member in self._members.values() if member.is_silent]

    def _is_own(self, source: Source) -> bool:
        own = self._own
        return own is not None and (
            source.address == own.address
            or bool(own.member and source.member == own.member)
            or bool(own.generation and source.generation == own.generation)
        )

    # -- filters ------------------------------------------------------------------------------------------------------

    def take_due(self, now: float) -> list[tuple[Source, int, int]]:
        """(member, epoch, number) of the questions for changes to ask now. Each ends with :meth:`answered` or
        :meth:`failed`."""
        questions = []
        with self._lock:
            for member in self._members.values():
                if now >= member.due and not member.is_asked:
                    member.is_asked = True
                    copy = member.copy
                    questions.append((member.source, copy.epoch if copy else 0, copy.number if copy else -1))
        return questions

    def next_due(self) -> float | None:
        """When :meth:`take_due` has work again; None while all questions are under way."""
        with self._lock:
            return min((member.due for member in self._members.values() if not member.is_asked), default=None)

    def answered(self, source: Source, answer: bytes, now: float) -> None:
        """A member's answer, as it came."""
        try:
            update = _UPDATE.decode(answer)
            with self._lock:
                self.received_bytes += len(answer)
                member = self._members.get(source.address)
                if member is None:
                    return
                member.is_asked = member.is_silent = False
                if update is not None:
                    copy = member.copy or FilterCopy()
                    copy.apply(update)
                    member.copy = copy
                is_new, member.answers = not member.answers, member.answers + 1
                changed = is_new or update is not None
                member.interval = MIN_POLL_SECONDS if changed else min(2 * member.interval, MAX_POLL_SECONDS)
                member.due = now + member.interval
        except (ValueError, msgspec.MsgspecError):
            self.refused += 1
            self.failed(source, now)

    def failed(self, source: Source, now: float) -> bool:
        """A member has not answered: it is no candidate until it does. Returns whether it had answered before."""
        with self._lock:
            member = self._members.get(source.address)
            if member is None:
                return False
            was_silent = member.is_silent
            member.copy, member.is_asked, member.is_silent, member.answers = None, False, True, 0
            member.due = now + member.interval
            member.interval = min(2 * member.interval, MAX_RETRY_SECONDS)
            return not was_silent

    # -- the choice ---------------------------------------------------------------------------------------------------

    def candidates(self, keys: Sequence[Key], start: int, hint: Hint | None) -> list[Source]:
        """The members to ask for ``keys[start:]``, the longest run first; of equal ones those on this machine first,
        and the others in an order of the prompt's own, so that the holders of a popular prefix share the work.

        A hint counts as a run of the length that it says, unless the filter of the named member says more. A filter is
        a few seconds old. So in a fleet that is small enough to ask every member, filters only decide the order.
        """
        if start >= len(keys):
            return []
        probe = Probe(keys[start:])
        with self._lock:
            known = [member for member in self._members.values() if not member.is_silent]
        ask_all = len(known) <= MAX_CANDIDATES
        runs: dict[str, tuple[int, Source]] = {}
        best: dict[int, str] = {}  # epoch of a filter -> address: a neighbour may be listed by two addresses
        for member in known:
            copy, source = member.copy, member.source
            run = 0 if copy is None else copy.leading(probe)
            if copy is not None:
                other = best.setdefault(copy.epoch, source.address)
                if other != source.address:
                    if runs[other][1].machine:
                        continue
                    del runs[other]
                    best[copy.epoch] = source.address
            if run or ask_all:
                runs[source.address] = run, source
        if hint is not None:
            found = runs.get(hint.address)
            told = (hint.blocks or len(keys)) - start
            named = next((member.source for member in known if member.source.address == hint.address), None)
            if named is None and hint.introduces and not self._is_own(Source(hint.address)):
                named = Source(hint.address)
            if told > 0 and named is not None:
                runs[hint.address] = max(told, found[0] if found is not None else 0), named
        machine = self._own.machine if self._own is not None else ""
        seed = int.from_bytes(keys[start][:8], "big")
        ranked = sorted(
            (
                -run,
                bool(machine) and source.machine != machine,
                xxhash.xxh3_64_intdigest(address.encode(), seed),
                source,
            )
            for address, (run, source) in runs.items()
        )
        return [source for _, _, _, source in ranked[:MAX_CANDIDATES]]
