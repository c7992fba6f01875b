"""Checks of an object store for `kvbm doctor`: reachability, credentials, clock, latency, rate.

Each function makes a few requests and answers with what it found; the doctor words it. None of them shows a secret.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import NamedTuple
from urllib.parse import urlsplit

from kvbm.tiers.objects.client import Client, MissingError, ObjectStoreError
from kvbm.tiers.objects.format import ROOT
from kvbm.tiers.objects.settings import ObjectSettings

MAX_SKEW_SECONDS = 300.0  # S3 refuses requests of clocks that differ by 15 minutes
SLOW_LATENCY_SECONDS = 0.1
_ROUNDS = 8
_PROBE_BYTES = 4 << 20
_PROBE_OBJECTS = 8


class Checked(NamedTuple):
    good: bool
    text: str
    cure: str = ""


class Speed(NamedTuple):
    """In bytes a second, with as many requests at a time as the tier makes, up to eight."""

    read: float
    write: float


def check_reachable(settings: ObjectSettings) -> Checked:
    """Whether anything answers HTTP at the endpoint, whatever it says."""
    try:
        seconds = _answer(settings)[0]
    except OSError as error:
        return Checked(
            False,
            f"Nothing answers at {settings.endpoint}: {error}.",
            "Check DYN_KVBM_OBJECT_ENDPOINT, and whether a firewall is in between.",
        )
    return Checked(True, f"{settings.endpoint or 'AWS'} answers in {seconds * 1e3:.0f} ms.")


def check_credentials(settings: ObjectSettings) -> Checked:
    """Whether the credentials may list, create, read and delete in the bucket."""
    try:
        client = Client(settings)
        client.check()
        name = _probe_name()
        client.put(name, [b"kvbm doctor"])
        try:
            read = bytes(client.get(name))
            again = client.put(name, [b"kvbm doctor, a second time"])
        finally:
            client.delete([name])
    except MissingError as error:
        return Checked(
            False,
            f"An object that was just written is not there: {error}.",
            "Use a store with read-after-write consistency.",
        )
    except ObjectStoreError as error:
        return Checked(
            False,
            f"Bucket {settings.bucket}: {error}.",
            "Check DYN_KVBM_OBJECT_BUCKET, _ACCESS_KEY, _SECRET_KEY and _REGION. KVBM needs to list, read, write and "
            "delete objects.",
        )
    if again or read != b"kvbm doctor":
        return Checked(
            False,
            f"The store of bucket {settings.bucket} overwrites an object although KVBM asks it not to (If-None-Match).",
            "Use a store with conditional writes: two engines could damage each other's objects here.",
        )
    return Checked(True, f"The credentials may list, read, write and delete in bucket {settings.bucket}.")


def check_clock(settings: ObjectSettings) -> Checked:
    """How far this machine's clock is from the store's, by the Date header of an answer."""
    try:
        _, date = _answer(settings)
    except OSError as error:
        return Checked(False, f"The store's clock cannot be read: {error}.", "Check DYN_KVBM_OBJECT_ENDPOINT.")
    if date is None:
        return Checked(True, "The store does not tell its time.")
    skew = time.time() - date
    if abs(skew) > MAX_SKEW_SECONDS:
        return Checked(
            False,
            f"This machine's clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the store's.",
            "Synchronise it (NTP): a store refuses requests whose time differs by 15 minutes or more.",
        )
    return Checked(True, f"This machine's clock is within {max(1.0, abs(skew)):.0f} s of the store's.")


def measure_latency(settings: ObjectSettings) -> float:
    """Seconds of an existence request, the median of a few. Raises ObjectStoreError."""
    client, name = Client(settings), _probe_name()
    client.exists(name)  # connects
    return median(_timed(lambda: client.exists(name)) for _ in range(_ROUNDS))


def measure_speed(settings: ObjectSettings) -> Speed:
    """Raises ObjectStoreError."""
    client = Client(settings)
    names = [_probe_name() for _ in range(_PROBE_OBJECTS)]
    data = os.urandom(_PROBE_BYTES)
    try:
        with ThreadPoolExecutor(min(_PROBE_OBJECTS, settings.concurrency)) as pool:
            write = _timed(lambda: list(pool.map(lambda name: client.put(name, [data]), names)))
            read = _timed(lambda: list(pool.map(client.get, names)))
    finally:
        with contextlib.suppress(ObjectStoreError):
            client.delete(names)
    return Speed(_PROBE_BYTES * len(names) / read, _PROBE_BYTES * len(names) / write)


def _answer(settings: ObjectSettings) -> tuple[float, float | None]:
    """(seconds, the store's time) of an unsigned request. Raises OSError."""
    parts = urlsplit(settings.endpoint or f"https://s3.{settings.region}.amazonaws.com")
    connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = connect(parts.hostname or "", parts.port, timeout=settings.timeout_seconds)
    began = time.monotonic()
    try:
        connection.request("HEAD", f"{parts.path or '/'}")
        date = connection.getresponse().getheader("Date")
    except http.client.HTTPException as error:
        raise OSError(f"no HTTP answer ({type(error).__name__})") from error
    finally:
        connection.close()
    seconds = time.monotonic() - began
    try:
        return seconds, email.utils.parsedate_to_datetime(date).timestamp() if date else None
    except ValueError:
        return seconds, None


def _probe_name() -> str:
    return f"{ROOT}/doctor/{os.urandom(8).hex()}"


def _timed(call: Callable[[], object]) -> float:
    began = time.monotonic()
    call()
    return max(1e-9, time.monotonic() - began)
