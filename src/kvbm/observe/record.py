"""A record of the leader's decisions, one JSON object a line, for analysis and replay.

The engine's thread puts lines into a bounded queue and never waits: a line that does not fit is dropped and counted. A
writer thread empties the queue. The file is bounded too: at ``max_bytes`` the record ends with a line that says so.

Every line but the last has ``event`` and ``at``, milliseconds from the start of the leader's clock: the time of the
operation, which policies and admission rules saw as well (:class:`~kvbm.core.clock.OperationClock`):

``start``
    the first line: the facts that a replay needs (block size, bytes of a block, slots of each tier, blocks of the
    engine's own cache, terms of the cost model), and ``time``, the Unix time at 0
``request``
    a request has ended. ``timestamp`` (milliseconds, of its first admission), ``input_length``, ``output_length`` and
    ``hash_ids`` are those of a Mooncake trace with blocks of the engine's size, so tools for such traces read it once
    it is sorted by ``timestamp``. ``hash_ids`` name all full blocks, the prompt's and then the answer's, with 52 bits
    of their keys, which do not reveal the tokens. Further fields: tokens found by tier, tokens loaded, and the reason.
    For a replay in the same order: ``lookups`` (:class:`LookupLine`), ``stores`` (:class:`StoreLine`) and ``ended``;
    ``hints`` (:class:`HintsLine`), if the caller gave any, and ``cache_salt``, if that is a tenant with a share
``load``, ``store``, ``move``
    a transfer has ended on all ranks: tier, blocks, seconds, and whether a block was lost
``moves``
    blocks that waited to be moved have got plans, or were passed over because they are gone, or there already
``reset``
    the leader has forgotten every block
``end``
    the last line of a record that was closed: why it ends, and the number of dropped lines

Operations of requests that run side by side overlap. ``order`` numbers them all: each lookup, plan of a store or of
moves, end of a transfer, end of a request and reset takes the next number. ``ended`` is the number of a request's own
end. `kvbm simulate` replays them in this order, and at these times.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvbm.core.clock import OperationClock
from kvbm.core.cost import Prices
from kvbm.plans import TierName

logger = logging.getLogger("kvbm")

QUEUE = 2048  # lines that may wait for the writer
WARN_EVERY = 1024  # dropped lines

_encode = msgspec.json.Encoder().encode


class LookupLine(msgspec.Struct, frozen=True):
    """The engine has admitted a request, with these blocks. A request that was preempted has several."""

    order: int
    at: float  # as in a line
    prompt_tokens: int
    device_tokens: int  # that the engine had itself
    limit: int  # the lookup asked for blocks up to this one; 0: there was none
    found: dict[TierName, int]  # blocks
    loaded: int  # blocks
    others_running: bool
    prices: Prices | None  # of the cost model; None without a lookup


class StoreLine(msgspec.Struct, frozen=True):
    """A step has completed blocks of a request. Equal orders: blocks of several requests, stored together."""

    order: int
    at: float
    first: int
    end: int
    plan: int  # 0: no block was left to store
    place: int = 0  # among those stored together


class HintsLine(msgspec.Struct, frozen=True):
    """What the caller of a request has said of it."""

    session: int
    final: bool
    retention: list[tuple[int, float | None, int, int]]  # priority, seconds (None: no end), first block, end


class Sink:
    """The part of a record that the engine's thread uses. This one drops every line: recording is off."""

    dropped = 0

    def now(self) -> float:
        """``at`` of a line."""
        return 0.0

    def add(self, event: str, keys: Sequence[bytes] = (), **fields: Any) -> None:
        return


class Record(Sink):
    """Raises OSError if it cannot create the file. Only one thread may call ``add``."""

    def __init__(self, folder: Path, max_bytes: int, clock: OperationClock, **header: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        name = f"kvbm-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.jsonl"
        self.path = folder / name
        self.dropped = 0
        self._max_bytes = max_bytes
        self._clock = clock
        self._full = False
        self._queue: queue.SimpleQueue[tuple[dict[str, Any], Sequence[bytes]] | None] = queue.SimpleQueue()
        # Only this user can read it. O_EXCL follows no link and opens no existing file.
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._file = os.fdopen(descriptor, "wb", buffering=1 << 16)
        clock.tick()
        self._epoch = time.time() - clock()
        self.add("start", time=self._epoch, **header)
        self._thread = threading.Thread(target=self._write, name="kvbm-record", daemon=True)
        self._thread.start()

    def add(self, event: str, keys: Sequence[bytes] = (), **fields: Any) -> None:
        """Queue a line. The writer thread turns ``keys`` into ``hash_ids``. Never waits, never raises."""
        if self._full:
            return
        if self._queue.qsize() >= QUEUE:
            self.dropped += 1
            if self.dropped % WARN_EVERY == 1:
                logger.warning("the record cannot keep up: %d lines dropped so far", self.dropped)
            return
        self._queue.put(({"event": event, "at": self.now(), **fields}, keys))

    def now(self) -> float:
        return round(self._clock() * 1e3, 3)

    def close(self) -> None:
        """Write the queued lines and end."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(timeout=5)

    def _write(self) -> None:
        written = 0
        why = "stopped"
        try:
            while (item := self._queue.get()) is not None:
                data = _encode(self._complete(*item))
                if written + len(data) > self._max_bytes:
                    self._full = True
                    why = "full"
                    logger.warning("the record %s is full (KVBM_RECORD_MAX_MB) and ends here", self.path)
                    break
                self._file.write(data + b"\n")
                written += len(data) + 1
                if self._queue.empty():
                    self._file.flush()
            self._file.write(_encode({"event": "end", "why": why, "dropped": self.dropped}) + b"\n")
            self._file.close()
        except Exception as error:
            # For example a full disk. The engine goes on.
            self._full = True
            logger.warning("the record %s ends here: %s", self.path, error)

    def _complete(self, line: dict[str, Any], keys: Sequence[bytes]) -> dict[str, Any]:
        if "began" in line:
            line["timestamp"] = round((line.pop("began") - self._epoch) * 1e3)
        if line["event"] == "request":
            line["hash_ids"] = hash_ids(keys)
        return line


def seconds(at: float) -> float:
    """The time that the clock told, from ``at`` of a line: to the last bit, where it counts whole microseconds."""
    return round(at * 1e3) / 1e6


def hash_ids(keys: Sequence[bytes]) -> list[int]:
    """52 bits of each key: distinct for millions of blocks, and exact in every JSON reader."""
    words = np.frombuffer(b"".join([key[:8] for key in keys]), dtype=">u8")
    ids: list[int] = (words >> np.uint64(12)).tolist()
    return ids
