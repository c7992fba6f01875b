"""Cards: small entries of a member of the deployment, which other members find in etcd while the member lives.

An entry in etcd lives as long as its lease, which a thread renews every few seconds. If etcd is lost, other processes
do not find the member for a while, and nothing else happens: the thread enters the cards again as soon as it can. KVBM
uses etcd's HTTP gateway and needs no client library.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

logger = logging.getLogger("kvbm")

LEASE_SECONDS = 10
MAX_ANSWER_BYTES = 64 << 20  # of etcd


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


class Registration:
    """A thread that keeps cards entered until :meth:`close`."""

    def __init__(self, place: Registry, cards: Mapping[str, bytes], every: float = LEASE_SECONDS / 3) -> None:
        self._place = place
        self._cards = dict(cards)
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
