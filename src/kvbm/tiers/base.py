"""The contract of a tier: what it is, and how its bytes are read and written on a rank."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec

from kvbm.core.rate import Rate
from kvbm.plans import TierName


class Tier(msgspec.Struct, frozen=True, kw_only=True):
    """What a tier is: the facts that the rest of KVBM asks for."""

    name: TierName
    level: str  # upstream's number, for example "g2"
    medium: str  # of its blocks in KV events
    prior: Rate  # of loads, until they are measured
    size_setting: str  # sets how many blocks it holds
    staged: bool = True  # its blocks pass through slots of the near tier; False: it is the near tier
    keyed: bool = False  # addressed by key and not by numbered slots
    persistent: bool = False  # outlives the engine
    writable: bool = True
    shared: bool = False  # other engines read and write it too
    advice: str = ""  # how to make it faster, for a user whose loads from it take longer than computing
    # Upstream's metric names: the endings of kvbm_offload_blocks_* with the source of the blocks ("" for any), the
    # ending of kvbm_onboard_blocks_*, and whether there are kvbm_{name}_read_failures and _write_failures.
    offload_metrics: dict[str, str] = {}
    onboard_metric: str = ""
    counts_failures: bool = False


class Operation:
    """Reads or writes on their way. What it says about their end is valid once :meth:`done` is True.

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
        return True


class Store(ABC):
    """One rank's half of a staged tier.

    ``read`` and ``write`` return at once and never raise because the medium fails: the operation says so. The caller
    keeps the memory at the addresses alive and, for a write, unchanged until the operation is over. Tags name the
    blocks: a read verifies that it got the block of its tag, and reports any other as bad.
    """

    slots: int = 0  # 0 for a keyed tier

    @abstractmethod
    def read(self, slots: Sequence[int], addresses: Sequence[int], tags: Sequence[bytes]) -> Operation: ...

    @abstractmethod
    def write(self, slots: Sequence[int], addresses: Sequence[int], tags: Sequence[bytes]) -> Operation: ...

    @abstractmethod
    def close(self, timeout: float | None = None) -> bool:
        """Finish or give up within ``timeout`` seconds, or a bound of the store's own. False when an operation still
        hangs: its memory must stay."""

    def measure(self) -> Rate | None:
        """The rate of reads, measured before the store serves anything; None when that is not known."""
        return None
