"""The contract of a tier: its declaration, how its catalog and its stores open, and how a rank reads and writes."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import msgspec

from kvbm.config import Config, slots_for, split_shares
from kvbm.core.catalog import Catalog
from kvbm.core.clock import Clock
from kvbm.core.rate import Rate
from kvbm.gil import notify
from kvbm.plans import Hello, TierHello, TierName
from kvbm.tiers.bounded import Call

if TYPE_CHECKING:
    from kvbm.core.catalog import Journal
    from kvbm.core.policy.admission import AdmissionRule
    from kvbm.core.pool import Pool

# Identifies the KV of an engine: model, weights, dtype, layout, block size, ranks, scheme of the keys.
Fingerprint = Mapping[str, str | int]

# How a rank uses its cache where every rank has the same KV: its own cache, a cache that it alone writes and other
# processes read, or a cache that another process writes.
Access = Literal["own", "writer", "reader"]


def fingerprint(cache: Fingerprint, layout: str) -> Fingerprint:
    """What names a cache that outlives the engine: equal fingerprints mean exchangeable bytes on every rank.

    The stages of a pipeline have different layers, and each rank knows only its own. The number of layers is left out
    then: the model and the degree of parallelism decide it.
    """
    return {**cache, "layout": layout.partition("*")[2] if cache.get("pipeline_parallel", 1) != 1 else layout}


def common_fingerprint(cache: Fingerprint, layouts: Iterable[str]) -> Fingerprint | None:
    """That of all ranks; None when their layers are of different kinds, so that they have no cache in common."""
    first, *others = (fingerprint(cache, layout) for layout in layouts)
    return first if all(other == first for other in others) else None


class RankContext(NamedTuple):
    """One rank, as a tier sees it at start. Nothing of it depends on the engine's tensors."""

    config: Config
    rank: int
    ranks: int
    block_bytes: int  # of this rank
    slot_bytes: int  # block_bytes, padded to whole pages
    # Names the cache of this rank (:func:`fingerprint`). None: no block of this rank may outlive the engine.
    cache: Fingerprint | None = None
    device: str = "cpu"
    access: Access = "own"
    # Bytes of a block in all caches of this rank that share the size of a tier; 0: block_bytes.
    sized_bytes: int = 0
    # A tier lets other processes map the near memory (Tier.shares_near_memory).
    shares_near_memory: bool = False

    def slots_for(self, setting: str, gigabytes: float, override: int, copies: int = 0) -> int:
        """Slots of a tier whose size covers all ranks, which keep ``copies`` of a block: by default one each. Raises
        ValueError when not even one block fits."""
        block_bytes = (self.sized_bytes or self.block_bytes) * (copies or self.ranks)
        slots = slots_for(gigabytes, override, block_bytes)
        if slots < 1:
            raise ValueError(
                f"{setting}={gigabytes:g} holds no block: one block takes {block_bytes / 1e9:.6f} GB over all "
                f"{self.ranks} ranks. Set it to more than that."
            )
        return slots


class LeaderContext(NamedTuple):
    """The ranks, as a tier sees them when the leader starts."""

    config: Config
    hellos: Sequence[Hello]
    # Names the cache of all ranks together. None: no block may outlive the engine.
    cache: Fingerprint | None = None
    access: Access = "own"
    clock: Clock = float  # for eviction policies

    @property
    def block_bytes(self) -> int:
        return sum(hello.block_bytes for hello in self.hellos)

    def opened(self, name: TierName) -> list[TierHello]:
        """The tier as each rank has opened it; empty unless all ranks have."""
        found = [tier for hello in self.hellos if (tier := hello.tier(name)) is not None]
        return found if len(found) == len(self.hellos) else []


class Route(NamedTuple):
    """Blocks move to ``target``; the leader makes an :class:`~kvbm.tiers.edges.Edge` of it."""

    target: TierName
    source: TierName | None = None  # None: the near tier
    admission: AdmissionRule | None = None  # None: every block
    max_pending_blocks: int = 1024
    bypass: bool = False  # the near tier is only the staging buffer of the target


class Tier(msgspec.Struct, frozen=True, kw_only=True):
    """Declares a tier and opens its catalog and its stores. A tier's folder provides one object of a subclass.

    ``open_store`` runs on every rank, ``open_catalog`` and ``connect`` in the leader's process after all ranks have
    opened theirs. A tier that cannot be used now logs the reason and returns None, and the engine runs without it. A
    tier raises only for a setting that can never be met: the engine refuses to start then.
    """

    name: TierName
    level: str  # upstream's number, for example "g2"
    medium: str  # of its blocks in KV events
    prior: Rate  # of loads, until they are measured
    size_setting: str  # sets how many blocks it holds
    policy_setting: str = ""  # sets its eviction policy; empty: it has none of its own
    staged: bool = True  # its blocks pass through slots of the near tier; False: it is the near tier
    keyed: bool = False  # addressed by key and not by numbered slots
    persistent: bool = False  # outlives the engine
    writable: bool = True  # False: no blocks move to it from this engine
    shared: bool = False  # other engines read and write it too
    shares_near_memory: bool = False  # other processes map the near tier's memory where this tier is wanted
    advice: str = ""  # how to make it faster, for a user whose loads from it take longer than computing
    # Upstream's metric names: the endings of kvbm_offload_blocks_* with the source of the blocks ("" for any), the
    # ending of kvbm_onboard_blocks_*, and whether there are kvbm_{name}_read_failures and _write_failures.
    offload_metrics: dict[str, str] = {}
    onboard_metric: str = ""
    counts_failures: bool = False

    def is_wanted(self, config: Config) -> bool:
        """Whether the settings ask for this tier."""
        return False

    def outlives_engine(self, config: Config) -> bool:
        """Whether the next engine can find the blocks of this one here, so that the cache needs a fingerprint."""
        return self.persistent and self.is_wanted(config)

    def cache_root(self, config: Config) -> Path | None:
        """The directory with the caches of this tier, where they outlive the engine on this machine."""
        return None

    def open_store(self, context: RankContext) -> Call[Store | None] | None:
        """Begin to open a rank's store while the engine goes on with its start."""
        return None

    def staging_slots(self, config: Config, slot_bytes: int) -> int:
        """Near slots that this tier needs as a staging buffer where the user asks for no near tier; 0: it cannot be
        used without one."""
        return 0

    def open_catalog(self, context: LeaderContext) -> Catalog | None:
        """The leader's catalog, with the blocks that the tier holds from before."""
        return None

    def eviction_policy(self, config: Config) -> str:
        """The name of the policy that the settings ask for."""
        return "lru"

    def make_pool(self, config: Config, slots: int, clock: Clock, journal: Journal | None = None) -> Pool:
        """The catalog of so many numbered slots, for :meth:`open_catalog` and `kvbm simulate`."""
        from kvbm.core.policy import make_policy
        from kvbm.core.policy.shares import Shares
        from kvbm.core.pool import Pool

        name, shares = self.eviction_policy(config), dict(enumerate(split_shares(config.tenant_shares).values(), 1))
        name = "lru" if name == "auto" else name
        policy = make_policy(name, slots, clock)
        if shares:
            policy = Shares(slots, shares, lambda size: make_policy(name, size, clock))
        pool = Pool(slots, policy, journal)
        pool.policy = f"{name} with shares" if shares else name
        return pool

    def connect(self, config: Config, clock: Clock) -> Sequence[Route]:
        """The ways on which blocks come to this tier, once its catalog is open. ``clock``: for admission rules."""
        return ()


class Operation:
    """Reads or writes under way. Its results are valid once :meth:`done` is True.

    The store that carries it out sets the number of parts, calls :meth:`begin_part` and :meth:`end_part` for each of
    them, from any thread, and skips the work of parts that begin after the operation was cancelled.
    """

    def __init__(self, kind: str, slots: Sequence[int], addresses: Sequence[int], tags: Sequence[bytes], size: int):
        if not len(slots) == len(addresses) == len(tags):
            raise ValueError(f"{len(slots)} slots, {len(addresses)} addresses and {len(tags)} tags do not match")
        self.kind = kind
        self.slots, self.addresses, self.tags = slots, addresses, tags
        self.bytes = len(slots) * size
        self.bad: list[int] = []  # positions that did not arrive, or were not written
        self.reason = ""  # why the first of them failed
        self.began = self.ended = 0.0  # by the monotonic clock, first byte and last; the time in the queue is before
        self._lock = threading.Lock()
        self._over = threading.Event()
        self.cancelled = False
        self.parts_left = 0

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def done(self) -> bool:
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        return self._over.wait(timeout)

    def cancel(self) -> None:
        """Skip the parts that have not begun by now; their positions count as bad."""
        self.cancelled = True

    def begin_part(self) -> None:
        with self._lock:
            self.began = self.began or time.monotonic()

    def end_part(self, bad: Sequence[int], reason: str) -> bool:
        """True when it was the last one."""
        with self._lock:
            self.bad += bad
            self.reason = self.reason or reason
            self.parts_left -= 1
            if self.parts_left:
                return False
        self.bad.sort()
        self.ended = time.monotonic()
        self.began = self.began or self.ended
        self._over.set()
        notify()
        return True


class NearMemory(Protocol):
    """The near tier's memory on one rank."""

    file: int  # other processes of this user can map it; -1: they cannot
    address: int
    size: int


class PersistentMemory(Protocol):
    """Near memory that outlives the engine. The worker hashes the blocks that it has stored there, and records the
    checksums of a store once the leader has called it good."""

    def hash(self, slots: Sequence[int], tags: Sequence[bytes]) -> Operation: ...

    def record(self, hashes: Any) -> None:
        """``hashes``: an operation that :meth:`hash` has returned."""


class Store(ABC):
    """One rank's store of a staged tier.

    ``read`` and ``write`` return at once and never raise because the medium fails: the operation says so. The caller
    keeps the memory at the addresses alive and, for a write, unchanged until the operation is over. Tags name the
    blocks: a read verifies that it got the block of its tag, and reports any other as bad. A keyed store addresses
    blocks by their tags and ignores the places: those are handles of its catalog.
    """

    slots: int = 0  # 0 for a keyed tier
    identity: str = ""  # names the cache behind it: every rank must have opened the same one
    chunk_bytes: int = 32 << 20  # of one read: enough for full speed, few enough to overlap with the copy of another
    stall_seconds: float = 30.0  # loads are given up when nothing has come from the store for so long

    @abstractmethod
    def read(self, slots: Sequence[int], addresses: Sequence[int], tags: Sequence[bytes]) -> Operation: ...

    @abstractmethod
    def write(self, slots: Sequence[int], addresses: Sequence[int], tags: Sequence[bytes]) -> Operation: ...

    @abstractmethod
    def close(self, timeout: float | None = None) -> bool:
        """Finish or give up within ``timeout`` seconds, or a bound of the store's own. False when an operation still
        hangs: its memory must stay."""

    def attach(self, near: NearMemory) -> None:
        """The memory that blocks pass through is there. Comes before the first read."""
        return

    def describe(self) -> str:
        """For the log line of the rank, for example ``64 slots on disk at /path``."""
        return f"{self.slots} slots" if self.slots else "addressed by key"

    def measure(self) -> Rate | None:
        """The rate of reads, measured before the store serves anything; None when that is not known."""
        return None
