"""Registers leaders and workers in Dynamo's service discovery, as cards in etcd or in a directory.

An entry in etcd lives as long as its lease, which is renewed every few seconds; a file lives as long as its process. If
etcd or the directory is lost, other processes do not find the engine for a while, and nothing else happens: a thread
enters the cards again as soon as it can. KVBM uses etcd's HTTP gateway and needs no client library.

    kvbm/<namespace>/leaders/<engine>        kvbm/<namespace>/workers/<engine>/<rank>
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import itertools
import logging
import os
import stat
import tempfile
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Protocol

import msgspec

from kvbm.config import Config
from kvbm.tiers.directory import private_directory

logger = logging.getLogger("kvbm")

LEASE_SECONDS = 10
MAX_CARDS = 10_000
MAX_CARD_BYTES = 65_536
MAX_ANSWER_BYTES = 64 << 20  # of etcd
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


class Registry(Protocol):
    """Keeps cards."""

    def enter(self, cards: dict[str, bytes]) -> None:
        """Enter the cards, or renew them. Called every few seconds. Raises OSError on failure."""

    def withdraw(self) -> None: ...

    def entries(self, prefix: str) -> dict[str, bytes]: ...


class EtcdRegistry:
    def __init__(self, endpoints: str, lease_seconds: int = LEASE_SECONDS) -> None:
        self._endpoints = [_url(part) for part in endpoints.split(",") if part.strip()]
        self._lease_seconds = lease_seconds
        self._lease: str | None = None

    def enter(self, cards: dict[str, bytes]) -> None:
        if self._lease is not None:
            answer = self._call("lease/keepalive", {"ID": self._lease})
            if int(answer.get("result", {}).get("TTL", 0)) > 0:
                return
            self._lease = None  # it expired while etcd was not reachable
        granted = self._call("lease/grant", {"TTL": self._lease_seconds})
        if "ID" not in granted:
            raise OSError(f"etcd grants no lease: {granted}")
        lease = str(granted["ID"])
        for name, card in cards.items():
            self._call("kv/put", {"key": _text(name.encode()), "value": _text(card), "lease": lease})
        self._lease = lease

    def withdraw(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            self._call("lease/revoke", {"ID": lease})

    def entries(self, prefix: str) -> dict[str, bytes]:
        start = prefix.encode()
        found = self._call("kv/range", {"key": _text(start), "range_end": _text(start[:-1] + bytes([start[-1] + 1]))})
        pairs = found.get("kvs", ())
        return {base64.b64decode(p["key"]).decode(): base64.b64decode(p.get("value", "")) for p in pairs}

    def _call(self, method: str, body: dict[str, Any]) -> dict[str, Any]:
        error: Exception = OSError("ETCD_ENDPOINTS names no address")
        for endpoint in self._endpoints:
            request = urllib.request.Request(
                f"{endpoint}/v3/{method}", msgspec.json.encode(body), {"Content-Type": "application/json"}
            )
            try:
                with _opener.open(request, timeout=3) as response:
                    return msgspec.json.decode(response.read(MAX_ANSWER_BYTES), type=dict[str, Any])
            except urllib.error.HTTPError as refused:
                if method == "lease/keepalive":
                    return {}
                error = OSError(f"{endpoint}: {refused}")
            except OSError as failed:
                error = failed
            except (ValueError, http.client.HTTPException, msgspec.MsgspecError) as failed:
                error = OSError(f"{endpoint}: {failed!r}; ETCD_ENDPOINTS wants addresses such as http://localhost:2379")
        raise OSError(str(error)) from error


# etcd is part of the deployment, so a proxy for the internet does not lead to it.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


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


class Registration:
    """A thread that keeps cards entered until :meth:`close`."""

    def __init__(self, place: Registry, cards: list[Card], namespace: str, every: float = LEASE_SECONDS / 3) -> None:
        self._place = place
        self._cards = {card.name(namespace): msgspec.json.encode(card) for card in cards}
        self._every = every
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="kvbm-discovery", daemon=True)
        self._thread.start()

    def _keep(self) -> None:
        well = True
        while True:
            try:
                self._place.enter(self._cards)
                if not well:
                    logger.info("KVBM is registered again")
                well = True
            except Exception as error:
                if well:
                    logger.warning("KVBM is not registered for now: %s. Nothing else depends on it.", error)
                well = False
            if self._over.wait(self._every):
                return

    def close(self) -> None:
        self._over.set()
        self._thread.join(timeout=10)
        with contextlib.suppress(Exception):
            self._place.withdraw()


def _url(endpoint: str) -> str:
    endpoint = endpoint.strip().rstrip("/")
    return endpoint if "://" in endpoint else f"http://{endpoint}"


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
