"""Where the list of members comes from: a static list, a file, or cards under etcd leases.

:meth:`MemberList.read` runs on the finder's thread and may wait. It raises OSError when the list cannot be read now;
the finder keeps the last one then.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from kvbm.core.hints import parse_endpoint
from kvbm.tiers.peers.finder import Source

ETCD = "etcd"
FILE = "file:"
SUFFIX = ".sock"
MAX_FILE_BYTES = 1 << 20
_ROOT = "kvbm"


class MemberList(Protocol):
    seconds: float  # between two readings

    def read(self) -> Sequence[Source]: ...


class NeighbourList:
    """The engines of this user on this machine: their servers' sockets in a directory that only this user may enter.
    A socket is named after the generation of its server."""

    seconds = 0.5

    def __init__(self, directory: Path, machine: str) -> None:
        self._directory = directory
        self._machine = machine

    def read(self) -> Sequence[Source]:
        if not self._directory.exists():
            return ()  # no engine has run here
        paths = sorted(path for path in self._directory.iterdir() if path.suffix == SUFFIX)
        return [Source(f"unix:{path}", machine=self._machine, generation=path.stem) for path in paths]


class AddressList:
    """``host:port`` each. A name with several addresses stands for several members, for example a headless service of
    Kubernetes; it is resolved at every reading."""

    seconds = 3.0

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses

    def read(self) -> Sequence[Source]:
        found: dict[str, Source] = {}
        error: OSError | None = None
        for address in self._addresses:
            if address.startswith("unix:"):
                found[address] = Source(address)
                continue
            host, _, port = address.rpartition(":")
            try:
                entries = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
            except OSError as failed:
                error = OSError(f"{address}: {failed}")
                continue
            for family, _, _, _, place in entries:
                resolved = f"[{place[0]}]:{port}" if family == socket.AF_INET6 else f"{place[0]}:{port}"
                found[resolved] = Source(resolved)
        if error is not None and not found:
            raise error
        return list(found.values())


class FileList:
    """One ``host:port`` a line; ``#`` begins a comment. For a list that another program keeps, a ConfigMap for
    example. It is read again when it has changed."""

    seconds = 1.0

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: tuple[int, int, int] | None = None
        self._list = AddressList(())

    def read(self) -> Sequence[Source]:
        status = os.stat(self._path)
        state = status.st_ino, status.st_size, status.st_mtime_ns
        if state != self._read:
            with open(self._path, encoding="utf-8", errors="replace") as file:
                self._list = AddressList(parse_addresses(file.read(MAX_FILE_BYTES), str(self._path)))
            self._read = state
        return self._list.read()


class EtcdList:
    """Cards of all members of a namespace with the same cache. A member writes one card and renews its lease; no block
    ever becomes a key in etcd."""

    seconds = 3.0

    def __init__(self, endpoints: str, namespace: str, fingerprint: str) -> None:
        from kvbm.tiers.cards import EtcdRegistry  # an HTTP client, which the server process need not load

        self._registry = EtcdRegistry(endpoints)
        self._prefix = prefix(namespace, fingerprint)

    def read(self) -> Sequence[Source]:
        found = []
        for card in self._registry.entries(self._prefix).values():
            with contextlib.suppress(msgspec.MsgspecError):  # of another program or release
                found.append(msgspec.json.decode(card, type=Source))
        return found


def prefix(namespace: str, fingerprint: str) -> str:
    return f"{_ROOT}/{namespace}/peers/{fingerprint}/"


def card_name(namespace: str, own: Source) -> str:
    return prefix(namespace, own.fingerprint) + re.sub(r"[^A-Za-z0-9_.:-]", "_", own.member or own.address)


def parse_addresses(text: str, where: str) -> list[str]:
    """Addresses between commas and line ends. Raises OSError for one that is none: the list of a file can be wrong at
    any time, and the last one that was right stays in force."""
    found = []
    for line in text.splitlines():
        for word in line.partition("#")[0].replace(",", " ").split():
            if not word.startswith("unix:/") and parse_endpoint(f"tcp://{word}") is None:
                raise OSError(f"{where}: {word!r} is no address; expected host:port, for example 10.0.0.4:23280")
            found.append(word)
    return found
