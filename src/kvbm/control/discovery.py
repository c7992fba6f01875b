"""Registers leaders and workers in Dynamo's service discovery, as cards in etcd or in a directory.

An entry in etcd lives as long as its lease (:mod:`kvbm.tiers.cards`); a file lives as long as its process. If etcd or
the directory is lost, other processes do not find the engine for a while, and nothing else happens.

    kvbm/<namespace>/leaders/<engine>        kvbm/<namespace>/workers/<engine>/<rank>
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import tempfile
from pathlib import Path

import msgspec

from kvbm.config import Config
from kvbm.tiers import cards
from kvbm.tiers.cards import LEASE_SECONDS, EtcdRegistry, Registry
from kvbm.tiers.directory import private_directory

MAX_CARDS = 10_000
MAX_CARD_BYTES = 65_536
_ROOT = "kvbm"


class Card(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One leader or worker."""

    role: str  # "leader" or "worker"
    engine: str
    rank: int = 0
    host: str
    pid: int
    model: str = ""
    version: str = ""
    control: str = ""  # address of a leader's control socket on its machine
    metrics: str = ""

    def name(self, namespace: str) -> str:
        end = f"workers/{self.engine}/{self.rank}" if self.role == "worker" else f"leaders/{self.engine}"
        return f"{_ROOT}/{namespace}/{end}"


class FileRegistry:
    """One file a card, which only its owner can read. Cards of processes that have ended do not count.

    Dynamo owns the directory; KVBM owns its subdirectory ``kvbm``.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._made: dict[Path, bytes] = {}

    def enter(self, cards: dict[str, bytes]) -> None:
        for name, card in cards.items():
            path = self._directory / f"{name}.json"
            # A killed process may have left a card of the same name.
            if _content(path) == card:
                continue
            for level in reversed(path.relative_to(self._directory).parents[:-1]):
                private_directory(self._directory / level, "DYN_FILE_KV")
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".")
            with os.fdopen(handle, "wb") as file:
                file.write(card)
            os.replace(temporary, path)
            self._made[path] = card

    def withdraw(self) -> None:
        for path, card in self._made.items():
            if _content(path) == card:
                path.unlink(missing_ok=True)
            for parent in list(path.parents)[: len(path.relative_to(self._directory).parts) - 1]:
                with contextlib.suppress(OSError):
                    parent.rmdir()  # fails unless it is empty
        self._made = {}

    def entries(self, prefix: str) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        root = self._directory / _ROOT
        if not _is_own(root):
            return found
        for path in sorted(itertools.islice(root.rglob("*.json"), MAX_CARDS)):
            name = str(path.relative_to(self._directory).with_suffix(""))
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                card = _content(path)
                if card is None or not name.startswith(prefix):
                    continue
                if Path(f"/proc/{msgspec.json.decode(card, type=Card).pid}").exists():
                    found[name] = card
        return found


def _is_own(directory: Path) -> bool:
    """In /tmp any user can create a directory of this name and fill it."""
    try:
        found = os.lstat(directory)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _content(path: Path) -> bytes | None:
    """The content of a regular file of this user and of usual size; None for any other. A pipe would block the open."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size > MAX_CARD_BYTES:
            return None
        return file.read(MAX_CARD_BYTES)


def registry(config: Config) -> Registry | None:
    """The registry of this deployment; None for a discovery backend that KVBM does not support."""
    if config.discovery_backend == "etcd":
        return EtcdRegistry(config.etcd_endpoints)
    if config.discovery_backend == "file":
        return FileRegistry(Path(config.discovery_dir or Path(tempfile.gettempdir()) / "dynamo_store_kv"))
    return None


def find(config: Config) -> list[Card]:
    """Every leader and worker of the namespace."""
    place = registry(config)
    if place is None:
        return []
    found = []
    for _, card in sorted(place.entries(f"{_ROOT}/{config.dynamo_namespace}/").items()):
        with contextlib.suppress(msgspec.MsgspecError):  # of another program or release
            found.append(msgspec.json.decode(card, type=Card))
    return found


class Registration(cards.Registration):
    """Keeps the cards of an engine entered until :meth:`close`."""

    def __init__(self, place: Registry, given: list[Card], namespace: str, every: float = LEASE_SECONDS / 3) -> None:
        super().__init__(place, {card.name(namespace): msgspec.json.encode(card) for card in given}, every)
