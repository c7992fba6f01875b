"""The leader's part of a tier: which blocks the tier holds, and where."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvbm.core.keys import Key

if TYPE_CHECKING:  # numpy comes with it, and the process of the metrics port does without
    from kvbm.core.policy.base import Turn

# Answer of Catalog.find: the tier does not know yet, and asking again soon finds out.
PENDING = -1


class Hint(NamedTuple):
    """Where a router says that the first blocks of a request lie. A tier may ask there first, and believes nothing."""

    address: str  # "host:port"
    blocks: int = 0  # how many of the request's first blocks; 0: not said
    # Whether the address may be new to this engine. A client of the engine's HTTP port can set some hints: those only
    # choose among known members, or a client could make the engine connect to any address.
    introduces: bool = True


class SourceState(NamedTuple):
    """What has come from one of several sources of a tier, summed over the ranks."""

    source: str
    path: str  # how its bytes come, in words
    blocks: int
    bytes: int
    bytes_per_second: float  # of the slowest rank; 0: not measured
    refused: dict[str, int]  # blocks that did not come or were refused, by kind
    is_suspended: bool = False


class ServedState(NamedTuple):
    """What other engines have read from this one through a tier, summed over the ranks."""

    blocks: int
    bytes: int
    questions: int  # which of these blocks are there?
    refused: dict[str, int]  # connections and reads, by kind


class Journal(Protocol):
    """A persistent record of the blocks in a catalog, for the next engine. Every call returns at once."""

    def put(self, pairs: Sequence[tuple[Key, int]]) -> None:
        """These blocks lie in these places now, on every rank."""

    def remove(self, keys: Iterable[Key]) -> None:
        """These blocks are gone."""

    def touch(self, keys: Sequence[Key], is_prefix: bool = False) -> None:
        """These blocks have been used, here or elsewhere; the first of them last. ``is_prefix``: they are the front of
        one prompt, without a gap."""

    def clear(self) -> None:
        """Every block is gone."""

    def close(self, timeout: float | None = None) -> None:
        """Write what is left within ``timeout`` seconds, or a bound of the journal's own. Waits."""


class Catalog(ABC):
    """Finds, reserves, commits, pins and drops blocks of one tier.

    The leader's thread calls every method. None of them blocks, or raises because a tier is full, slow or gone. A
    *place* is an integer: the number of a slot, or a handle of the catalog's own where the tier is addressed by key.
    The worker's store gets both the places and the keys (tags) of a plan.
    """

    # Told of every change, in order: of blocks that have become findable (True), that no longer are (False), and that
    # were being written and will not become findable (None). Once each, before the next change.
    on_change: Callable[[Sequence[Key], bool | None], None] | None = None
    # Kept up to date while it is set; None for a tier that ends with the engine.
    journal: Journal | None = None
    _discarded: Journal | None = None  # written to no more, and still to be closed
    # Goes up with every change of what can be found.
    changes: int = 0
    size: int = 0  # places; of a tier without a bound, those that hold a block as far as this engine knows
    is_bounded: bool = True
    takes_hints: bool = False  # a hint can tell this tier where to look
    evictions: int = 0
    policy: str = ""  # the name of its eviction policy; empty: it has none to choose
    # Lookups and reads wait for a network: the leader begins both while a request waits in the engine's queue.
    is_remote: bool = False

    # Bytes a second, of one rank, below which the engine computes a block sooner than a tier brings it. For tiers whose
    # sources differ in speed; None: not known.
    break_even: Callable[[], float] | None = None

    def attach(self, near: Catalog) -> None:
        """All catalogs are open; ``near`` is that of the near tier."""
        return

    def sources(self) -> Sequence[SourceState]:
        """Of a tier that reads from several places: each of them. Called from any thread."""
        return ()

    def served(self) -> ServedState | None:
        """Of a tier through which other engines read from this one. Called from any thread."""
        return None

    # -- finding ------------------------------------------------------------------------------------------------------

    def expect(self, keys: Sequence[Key], start: int = 0, hint: Hint | None = None) -> None:
        """A request with the prefix ``keys`` is about to look for ``keys[start:]``, or all of them but the last, which
        the engine computes: that one may be in one object with others. A tier with slow lookups starts them here."""
        return

    @abstractmethod
    def find(self, key: Key) -> int | None:
        """The place of a block; None when the tier does not have it, ``PENDING`` while it does not know yet. The tier
        bounds how long it says so: a lookup that is not answered in time finds nothing."""

    def answer_seconds(self, key: Key) -> float | None:
        """Expected seconds until the tier knows whether it has a block; None unless it is looking for the block."""
        return None

    def is_alone(self, place: int) -> bool:
        """Whether the block in this place takes a read of its own, where most blocks of the tier come several in one: a
        load of such blocks takes a time by their number, and not by their bytes."""
        return False

    def match(self, keys: Sequence[Key], start: int = 0) -> list[int]:
        """Places of the longest run of blocks that begins at ``keys[start]``."""
        places = []
        for key in keys[start:] if start else keys:
            place = self.find(key)
            if place is None or place == PENDING:
                break
            places.append(place)
        return places

    @abstractmethod
    def holds(self, key: Key) -> bool:
        """True when the block is here or on its way here, so writing it again would be wasted."""

    @abstractmethod
    def is_writing(self, key: Key) -> bool: ...

    @abstractmethod
    def key_of(self, place: int) -> Key | None: ...

    def __contains__(self, key: Key) -> bool:
        place = self.find(key)
        return place is not None and place != PENDING

    @property
    @abstractmethod
    def findable(self) -> Collection[Key]:
        """All blocks that can be found, as they are at any moment."""

    @property
    @abstractmethod
    def arriving(self) -> Collection[Key]:
        """All blocks that are being written, as they are at any moment."""

    # -- writing ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def reserve(self, keys: Sequence[Key], tenants: Sequence[int] | None = None) -> list[int] | None:
        """A place for each key, evicting as needed; None, and nothing changed, when that many cannot be had. Every
        place ends with :meth:`commit` or :meth:`abandon`. ``tenants``: of each block; None: the common one."""

    def tenants_of(self, places: Sequence[int]) -> Sequence[int] | None:
        """The tenant of each block; None when all are the common one's."""
        return None

    def fitting(self, keys: Sequence[Key], room: int) -> int:
        """How many of the first ``room`` of these keys to write now. A tier that writes several blocks in one leaves
        some for later, rather than tear them from those that follow."""
        return room

    @abstractmethod
    def commit(self, places: Sequence[int]) -> None:
        """Every rank has written these places: their blocks can be found from now on."""

    @abstractmethod
    def abandon(self, places: Iterable[int]) -> None:
        """These places could not be written: their blocks are never found."""

    # -- reading ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def pin(self, places: Sequence[int]) -> None:
        """Keep these places, just found, from being evicted until :meth:`unpin`. Two pins need two unpins."""

    @abstractmethod
    def unpin(self, places: Sequence[int], used: bool = True) -> None:
        """Undo one pin each. ``used``: a request has used the blocks; False: they were only copied elsewhere."""

    @abstractmethod
    def touch(self, keys: Sequence[Key]) -> None:
        """A request uses these blocks, wherever it found them: the last of them is the first to go."""

    def end_turn(self, keys: Sequence[Key], turn: Turn) -> None:
        """A request has ended that used this prefix, wherever it found it. Once for each request; counts as a touch."""
        self.touch(keys)

    # -- forgetting ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def drop(self, keys: Iterable[Key]) -> int:
        """Make these blocks unfindable at once; returns how many could be found before."""

    def suspect(self) -> None:
        """A load has given up waiting for a read. The leader plans no other before that read has ended. A tier that can
        find out by itself whether it answers does so in the background, and finds nothing until then."""
        return

    @abstractmethod
    def clear(self) -> int:
        """Drop every block that can be found; returns how many there were. The journal keeps them: the leader decides
        whether the next engine may have them (:meth:`discard`). The weights have changed, or a rank is gone: a tier
        that other engines write to looks for their blocks no more, and finds only what this engine writes from now
        on."""

    def discard(self) -> None:
        """The blocks of this engine are for no other: empty the journal and write no more to it."""
        journal, self.journal = self.journal, None
        if journal is not None:
            journal.clear()
            self._discarded = journal

    @property
    def outlives_engine(self) -> bool:
        """Whether the next engine finds the blocks that are committed from now on."""
        return self.journal is not None

    def close(self, timeout: float | None = None) -> None:
        """The engine ends. The only method that may wait: for the journal, within ``timeout`` seconds."""
        open_journals = [journal for journal in (self.journal, self._discarded) if journal is not None]
        self.journal = self._discarded = None
        for journal in open_journals:
            journal.close(timeout)

    # -- counting -----------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def available(self) -> int:
        """How many blocks :meth:`reserve` could take right now."""

    @property
    @abstractmethod
    def free(self) -> int:
        """Places that hold nothing."""

    @property
    @abstractmethod
    def writing(self) -> int: ...

    @property
    @abstractmethod
    def pinned(self) -> int: ...


class ReadOnlyCatalog(Catalog):
    """Finds blocks that others write and keep. A pin holds nothing; events come from those who keep the blocks."""

    def holds(self, key: Key) -> bool:
        return key in self

    def is_writing(self, key: Key) -> bool:
        return False

    def key_of(self, place: int) -> Key | None:
        return None

    def reserve(self, keys: Sequence[Key], tenants: Sequence[int] | None = None) -> list[int] | None:
        return None

    def commit(self, places: Iterable[int]) -> None:
        raise NotImplementedError("this tier's blocks are written by others")

    abandon = commit

    def pin(self, places: Sequence[int]) -> None:
        return

    def unpin(self, places: Sequence[int], used: bool = True) -> None:
        return

    def touch(self, keys: Sequence[Key]) -> None:
        return

    def drop(self, keys: Iterable[Key]) -> int:
        return 0

    findable: Collection[Key] = ()
    arriving: Collection[Key] = ()
    available = writing = 0
