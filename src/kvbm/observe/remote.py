"""Snapshots of another process's engine, from its metrics port."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

import msgspec

from kvbm.observe.format import printable
from kvbm.observe.snapshot import Snapshot, from_json

MAX_BYTES = 8 << 20
MAX_TEXT = 2000  # characters of one text of a snapshot

# Requests to this machine must not go through a proxy of the user's environment.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class NotReachableError(Exception):
    """The port gave no valid snapshot; the text says why and what to do."""


def normal_url(text: str) -> str:
    """The URL of `6880`, `host:6880` or `http://host:6880/`."""
    text = text.strip()
    if text.isdigit():
        return f"http://127.0.0.1:{text}"
    return (text if "://" in text else f"http://{text}").rstrip("/")


def _read(response: http.client.HTTPResponse, timeout: float) -> bytes:
    """Read the answer with bounds on bytes and seconds: any user of the machine may have taken the port."""
    body = bytearray()
    end = time.monotonic() + timeout
    while part := response.read1(65536):
        body += part
        if len(body) > MAX_BYTES or time.monotonic() > end:
            raise OSError(f"an answer of more than {MAX_BYTES} bytes, or of more than {timeout:g} s")
    return bytes(body)


def _printable(value: Any) -> Any:
    """The same value with every text in it printable: any user of the machine may have taken the port."""
    if isinstance(value, str):
        return printable(value, MAX_TEXT)
    if isinstance(value, list):
        return [_printable(each) for each in value]
    if isinstance(value, dict):
        return {_printable(key): _printable(each) for key, each in value.items()}
    return value


def _check_address(url: str) -> None:
    """Raise InvalidURL for an address that no server can have."""
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError("not an address")
    except ValueError as error:
        raise http.client.InvalidURL(str(error)) from error


def fetch(url: str, requests: int = 0, timeout: float = 5.0) -> Snapshot:
    """The state of the engine with its metrics port at ``url``; raises `NotReachableError`."""
    try:
        _check_address(url)
        with _OPENER.open(f"{url}/api/state?requests={requests}", timeout=timeout) as response:
            return from_json(msgspec.json.encode(_printable(msgspec.json.decode(_read(response, timeout)))))
    except urllib.error.HTTPError as error:
        raise NotReachableError(
            f"{url} answered with {error.code}: this is not a metrics port of KVBM. Use the port in the engine's log, "
            "DYN_KVBM_METRICS_PORT."
        ) from error
    except http.client.InvalidURL as error:
        raise NotReachableError(f"{url}: {error}. Expected a port, host:port or a URL, for example 6880.") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(error, msgspec.DecodeError):
            raise NotReachableError(f"{url} gave no snapshot that this release can read: {error}") from error
        reason = getattr(error, "reason", error) or type(error).__name__
        raise NotReachableError(
            f"nothing answers at {url} ({reason}). Start the engine with DYN_KVBM_METRICS=1; the port is "
            "DYN_KVBM_METRICS_PORT, 6880 by default."
        ) from error
