"""Publishes the events of KVBM's tiers for engines whose own publisher cannot; the consolidator subscribes.

The messages have vLLM's format. The engine's scheduler thread sends them, so the socket drops instead of waiting.
Events contain the tokens of prompts and the names of tenants, so the socket admits processes of the same user only.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence

import msgspec
import zmq

from kvbm.core.catalog import Catalog
from kvbm.core.keys import Key, Scope
from kvbm.events.ledger import Ledger, Removed, Run, Stored
from kvbm.plans import TierName
from kvbm.tiers.registry import TIERS

logger = logging.getLogger("kvbm")

MAX_WAITING = 100_000  # messages


class ZmqPublisher:
    """Binds its socket; raises zmq.ZMQError if it cannot."""

    def __init__(self, pools: Mapping[TierName, Catalog], block_size: int, rank: int = 0) -> None:
        # An abstract socket has no file and disappears with the process.
        self.endpoint = f"ipc://@kvbm-events-{os.getpid()}-{rank}"
        self._block_size = block_size
        self._rank = rank
        self._sent = 0
        self._encode = msgspec.msgpack.Encoder().encode
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.set_hwm(MAX_WAITING)
        self.ledger = Ledger(pools, block_size)
        try:
            self._socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
            self._socket.bind(self.endpoint)
        except zmq.ZMQError:
            self.close()
            raise

    def follow(self, keys: Sequence[Key], tokens: Sequence[int], first: int, end: int, scope: Scope) -> None:
        """Describe blocks ``first`` to ``end`` of a request, which a tier may hold or receive."""
        size = self._block_size
        for start, stop in self.ledger.undescribed(keys, first, end):
            run_keys = tuple(keys[start:stop])
            parent = keys[start - 1] if start else None
            text = list(tokens[start * size : stop * size])
            self.ledger.describe(Run(run_keys, run_keys, parent, text, (scope.lora, scope.cache_salt)))

    def pump(self) -> None:
        """Send the events that are owed."""
        while self.ledger.owed:
            events = [self._translate(event) for event in self.ledger.take()]
            if events:
                payload = self._encode([time.time(), events, self._rank])
                self._socket.send_multipart([b"", self._sent.to_bytes(8, "big"), payload], zmq.NOBLOCK)
                self._sent += 1

    def _translate(self, event: Stored | Removed) -> dict[str, object]:
        names = [_number(name) for name in event.names]
        if isinstance(event, Removed):
            return {"type": "BlockRemoved", "block_hashes": names, "medium": TIERS[event.tier].medium}
        lora, salt = event.about
        told: dict[str, object] = {
            "type": "BlockStored",
            "block_hashes": names,
            "parent_block_hash": None if event.parent is None else _number(event.parent),
            "token_ids": event.tokens,
            "block_size": self._block_size,
            "medium": TIERS[event.tier].medium,
        }
        if lora is not None:
            told["lora_name"] = lora
        if salt is not None:
            told["cache_salt"] = salt
        return told

    def close(self) -> None:
        self.ledger.stop()
        self._socket.close(linger=0)
        self._context.term()


def _number(key: Key) -> int:
    return int.from_bytes(key[-8:], "big")
