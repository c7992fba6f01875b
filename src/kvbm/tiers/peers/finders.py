"""Finders: a list in the settings, and the engines of this user on this machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from kvbm.config import Config
from kvbm.core.catalog import Hint
from kvbm.core.keys import Key
from kvbm.tiers.peers.client import UNIX
from kvbm.tiers.peers.finder import MAX_CANDIDATES, Finder, Source
from kvbm.tiers.peers.server import SUFFIX

_LOOK_SECONDS = 1.0


class StaticFinder:
    """Neighbours first, then the list. A hint comes before both: the address that it names must prove the secret."""

    def __init__(self, addresses: Sequence[str], directory: Path) -> None:
        self._listed = [Source(address) for address in addresses]
        self._directory = directory
        self._own: Source | None = None
        self._neighbours: list[Source] = []
        self._looked_at = 0.0
        self._lock = threading.Lock()

    def candidates(self, keys: Sequence[Key], start: int, hint: Hint | None) -> Sequence[Source]:
        hinted = [Source(hint.address)] if hint is not None else []
        return list(dict.fromkeys([*hinted, *self.members()]))[:MAX_CANDIDATES]

    def members(self) -> Sequence[Source]:
        with self._lock:  # else a second thread would take the list that the first is about to replace
            if time.monotonic() - self._looked_at > _LOOK_SECONDS:
                paths = sorted(self._directory.glob("*" + SUFFIX))
                own = "" if self._own is None else self._own.generation + SUFFIX
                self._neighbours = [Source(UNIX + str(path)) for path in paths if path.name != own]
                self._looked_at = time.monotonic()
        return [*self._neighbours, *self._listed]

    def announce(self, own: Source, held: Collection[Key]) -> None:
        self._own = own
        self._listed = [source for source in self._listed if source.address != own.address]
        self._looked_at = 0.0

    def close(self) -> None:
        return


def make_finder(config: Config, fingerprint: str, directory: Path) -> Finder:
    """``fingerprint``: the digest of this engine's cache. ``directory``: of the Unix sockets of this machine."""
    addresses = [address.strip() for address in config.peers.split(",") if address.strip()]
    return StaticFinder(addresses, directory)
