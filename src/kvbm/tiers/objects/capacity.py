"""The bound on the blocks of a cache in the bucket (DYN_KVBM_OBJECT_NUM_BLOCKS).

One engine of those that share the cache keeps the bound: it holds the *lease*, an object that it rewrites regularly.
The others watch the lease. An engine that sees the same lease for ``LEASE_SECONDS`` by its own clock takes it over, so
clocks need not agree. Two engines may hold the lease for a moment, which is harmless: both delete the oldest objects,
and deleting an object twice is the same as once.

Without a bound KVBM deletes nothing, and a lifecycle rule of the bucket should.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from kvbm.tiers.objects.client import Client, MissingError, ObjectStoreError
from kvbm.tiers.objects.format import Names, blocks_of_name

logger = logging.getLogger("kvbm")

LEASE_SECONDS = 90.0
TRIM_SECONDS = 300.0  # between two listings of the bucket: 1,000 objects are one request
TRIM_TO = 0.95  # of the bound, so that not every trim deletes
_DELETE_BATCH = 500


def statement(num_blocks: int) -> str:
    """Which rule is in force, for the log and for `kvbm doctor`."""
    if num_blocks:
        return f"at most {num_blocks:,} blocks (DYN_KVBM_OBJECT_NUM_BLOCKS); the oldest are deleted first"
    return (
        "no bound on the number of blocks (DYN_KVBM_OBJECT_NUM_BLOCKS=0): set a lifecycle rule on the bucket that "
        "deletes objects after some days, or a bound"
    )


class Lease:
    """Elects one writer. Every method makes requests: not for the engine's threads."""

    def __init__(self, client: Client, name: str, seconds: float = LEASE_SECONDS) -> None:
        self._client = client
        self._name = name
        self._seconds = seconds
        self._owner = os.urandom(16).hex()
        self._tag = ""  # of our own last write; empty while another engine holds the lease
        self._seen = ("", 0.0)  # the other holder's tag, and when it was first seen
        self._writes = 0

    def hold(self) -> bool:
        """Acquire or renew. Call it at least three times in ``seconds``. Raises ObjectStoreError."""
        now = time.monotonic()
        try:
            _, tag = self._client.head(self._name)
        except MissingError:
            if self._client.put(self._name, [self._content()]):
                self._tag = self._client.head(self._name)[1]
                return True
            return False
        if tag == self._tag:
            self._tag = self._client.replace(self._name, self._content())
            return True
        self._tag = ""
        if tag != self._seen[0]:
            self._seen = tag, now
        if now - self._seen[1] < self._seconds:
            return False
        # Expired. Of several engines that delete it now, one creates the next.
        self._client.delete([self._name])
        self._seen = "", 0.0
        return self.hold()

    def release(self) -> None:
        if self._tag and self.hold():
            self._client.delete([self._name])
            self._tag = ""

    def _content(self) -> bytes:
        self._writes += 1  # another content, and so another tag, each time
        return json.dumps({"owner": self._owner, "writes": self._writes}).encode()


class Trimmed(NamedTuple):
    blocks: int  # that are left
    deleted: int


def trim(clients: Sequence[Client], names: Names, num_blocks: int) -> Trimmed:
    """Delete the oldest objects of all ranks until at most ``num_blocks`` blocks are left. Raises ObjectStoreError."""
    found = [
        (listed.modified, listed.name, blocks)
        for listed in clients[0].list(names.prefix(0))
        if (blocks := blocks_of_name(listed.name))
    ]
    total = sum(blocks for _, _, blocks in found)
    if total <= num_blocks:
        return Trimmed(total, 0)
    found.sort()
    doomed: list[str] = []
    left = total
    for _, name, blocks in found:
        if left <= num_blocks * TRIM_TO:
            break
        doomed.append(name.removeprefix(names.prefix(0)))
        left -= blocks
    for at in range(0, len(doomed), _DELETE_BATCH):
        # Rank 0 first: lookups ask for its object first, so none finds a block that is half gone.
        for rank, client in enumerate(clients):
            client.delete([names.prefix(rank) + name for name in doomed[at : at + _DELETE_BATCH]])
    return Trimmed(left, total - left)


class Keeper:
    """A thread that keeps the bound while this engine holds the lease."""

    def __init__(
        self,
        clients: Sequence[Client],
        names: Names,
        num_blocks: int,
        lease_seconds: float = LEASE_SECONDS,
        trim_seconds: float = TRIM_SECONDS,
    ) -> None:
        self._clients = clients
        self._names = names
        self._num_blocks = num_blocks
        self._lease = Lease(clients[0], names.lease, lease_seconds)
        self._pause = lease_seconds / 3
        self._trim_seconds = trim_seconds
        self._closed = threading.Event()
        self.blocks = 0  # at the last listing; 0 while another engine keeps the bound
        self._thread = threading.Thread(target=self._run, name="kvbm-object-capacity", daemon=True)
        self._thread.start()

    def close(self, timeout: float = 1.0) -> bool:
        self._closed.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        trimmed_at = -self._trim_seconds
        while not self._closed.is_set():
            try:
                if self._lease.hold() and time.monotonic() - trimmed_at >= self._trim_seconds:
                    trimmed_at = time.monotonic()
                    self.blocks, deleted = trim(self._clients, self._names, self._num_blocks)
                    if deleted:
                        logger.info(
                            "object store: deleted the %d oldest blocks, %d are left (DYN_KVBM_OBJECT_NUM_BLOCKS=%d)",
                            deleted, self.blocks, self._num_blocks,
                        )  # fmt: skip
            except ObjectStoreError as error:
                logger.debug("object store: the bound was not checked: %s", error)
            self._closed.wait(self._pause)
        try:
            self._lease.release()
        except ObjectStoreError as error:
            logger.debug("object store: the lease was not released: %s", error)
