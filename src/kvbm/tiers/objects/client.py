"""Requests to an S3-compatible store, bounded in time, number and memory.

Every call blocks its thread, so only threads of the tier make calls: the pools of :mod:`.store` and :mod:`.presence`,
and the tools. Threads with obstore's synchronous calls are as fast as an event loop here and take no more CPU
(benchmarks/objects.py), and each of them verifies its own object while the others wait for the network.

A circuit breaker stands in front of all calls. It opens after a few failures in a row. From then on every call raises
:class:`SuspendedError` at once, and a thread of the client's own lists one object from time to time: only when that
succeeds do calls go through again. An object that is not there, or that is there already, is no failure. A block that
could not be read leaves the store in doubt (:meth:`Client.doubt`): the probe also reads back an object that it writes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from kvbm.core.breaker import Breaker
from kvbm.tiers.objects.format import Buffer
from kvbm.tiers.objects.settings import ObjectSettings

logger = logging.getLogger("kvbm")

T = TypeVar("T")
_CONNECT_SECONDS = 2.0
_MAX_REASON = 300  # characters
_LIST_PAGE = 1000
_PROBE_BYTES = 4096


class ObjectStoreError(Exception):
    """A request failed because of the store, the network or the settings. The text says why, without secrets."""


class SuspendedError(ObjectStoreError):
    """The circuit breaker is open: no request was made."""


class MissingError(ObjectStoreError):
    """There is no object of that name."""


class Listed(NamedTuple):
    name: str
    bytes: int
    modified: float  # seconds since 1970, by the store's clock


class Memory:
    """Bytes that the objects under way may take. A thread of the tier waits here, never one of the engine."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._changed = threading.Condition()

    def take(self, size: int) -> int:
        """An object larger than the limit gets through alone."""
        with self._changed:
            self._changed.wait_for(lambda: not self._used or self._used + size <= self._limit)
            self._used += size
        return size

    def give(self, size: int) -> None:
        with self._changed:
            self._used -= size
            self._changed.notify_all()

    @property
    def used(self) -> int:
        return self._used


class Client:
    """One bucket. Any thread may call it; each call takes at most ``timeout_seconds`` for each of its attempts."""

    def __init__(self, settings: ObjectSettings, what: str = "object store") -> None:
        """Raises ObjectStoreError when obstore is not installed or refuses the settings. Makes no request."""
        self.settings = settings
        self._what = what
        self._store = _open(settings)
        self._breaker = Breaker()
        self._lock = threading.Lock()
        self._suspended = ""  # why; empty while calls go through
        self.is_doubted = False  # suspended, and the first probe is under way
        self._closed = threading.Event()
        self.memory = Memory(settings.memory_bytes)

    # -- requests -----------------------------------------------------------------------------------------------------

    def get(self, name: str) -> Any:
        """The bytes of an object, as a buffer. Raises :class:`MissingError`."""
        return self._call(lambda: self._store.get(name).bytes(), name)

    def put(self, name: str, pieces: Sequence[Buffer]) -> bool:
        """Create an object. False when there is one of that name already: it is left as it is."""
        return self._call(lambda: self._create(name, pieces), name)

    def _create(self, name: str, pieces: Sequence[Buffer]) -> bool:
        from obstore.exceptions import AlreadyExistsError

        try:
            self._store.put(name, list(pieces), mode="create", use_multipart=False)
        except (AlreadyExistsError, FileExistsError):
            return False
        return True

    def replace(self, name: str, data: bytes) -> str:
        """Write an object over the one of that name; returns its tag, which changes with every write."""
        return self._call(lambda: str(self._store.put(name, data, use_multipart=False)["e_tag"]), name)

    def exists(self, name: str) -> bool:
        try:
            self.head(name)
        except MissingError:
            return False
        return True

    def head(self, name: str) -> tuple[Listed, str]:
        """(what a listing says, tag). Raises :class:`MissingError`."""
        found = self._call(lambda: self._store.head(name), name)
        return Listed(name, found["size"], found["last_modified"].timestamp()), str(found["e_tag"])

    def list(self, prefix: str) -> Iterator[Listed]:
        """All objects whose names begin with ``prefix``, which ends with a slash. Each page is a request."""
        pages = self._call(lambda: iter(self._store.list(prefix, chunk_size=_LIST_PAGE)), prefix)
        while (page := self._call(lambda: next(pages, None), prefix)) is not None:
            for found in page:
                yield Listed(found["path"], found["size"], found["last_modified"].timestamp())

    def folders(self, prefix: str) -> Sequence[str]:
        """The names below ``prefix``, up to the next slash."""
        found = self._call(lambda: self._store.list_with_delimiter(prefix), prefix)
        return [name.rstrip("/") for name in found["common_prefixes"]]

    def delete(self, names: Sequence[str]) -> None:
        """Objects that are not there are no error."""
        if names:
            self._call(lambda: self._delete(names), names[0])

    def _delete(self, names: Sequence[str]) -> None:
        try:
            self._store.delete(list(names))
        except FileNotFoundError:
            # Some stores report a missing object, and stop there.
            for name in names if len(names) > 1 else ():
                self._delete([name])

    def check(self) -> None:
        """One request that needs the network, the credentials and the bucket. Passes the breaker by; raises."""
        try:
            next(iter(self._store.list(chunk_size=1)), None)
        except Exception as error:
            raise ObjectStoreError(reason_of(error)) from None

    # -- the breaker --------------------------------------------------------------------------------------------------

    @property
    def suspended(self) -> str:
        """Why no request is made now; empty while requests go through."""
        return self._suspended

    def suspend(self, reason: str) -> None:
        """Open the breaker now, for example because a first check has failed."""
        with self._lock:
            self._open_breaker(reason, force=True)

    def doubt(self, reason: str, probe_name: str) -> None:
        """Blocks of this store could not be read. Make no request until a probe, at once and on a thread of its own,
        has read back an object of this name that it has written: a store that damages what it sends answers all else.
        """
        with self._lock:
            if self._suspended or self._closed.is_set():
                return
            self._suspended, self.is_doubted = reason, True
            self._start_probe(probe_name)

    def close(self) -> None:
        self._closed.set()

    def _call(self, request: Callable[[], T], name: str) -> T:
        if self._suspended:
            raise SuspendedError(f"no request is made while the store is suspended: {self._suspended}")
        try:
            answer = request()
        except FileNotFoundError:
            # Neither good nor bad: a bucket that is missing answers the same.
            raise MissingError(f"{name} is not in bucket {self.settings.bucket}") from None
        except Exception as error:
            reason = reason_of(error)
            if not reason.startswith(_DENIED):  # credentials that may only read are no reason to stop reading
                with self._lock:
                    self._open_breaker(reason)
            raise ObjectStoreError(reason) from None
        with self._lock:
            if not self._suspended:
                self._breaker.succeeded()
        return answer

    def _open_breaker(self, reason: str, force: bool = False) -> None:
        """The caller holds the lock."""
        if self._suspended or self._closed.is_set():
            return
        now = time.monotonic()
        self._breaker.failed(now)
        if force:
            self._force_breaker(now)
        if self._breaker.is_open(now):
            self._suspended = reason
            logger.warning("%s: suspended until it answers again: %s", self._what, reason)
            self._start_probe()

    def _force_breaker(self, now: float) -> None:
        while not self._breaker.is_open(now):
            self._breaker.failed(now)

    def _start_probe(self, name: str = "") -> None:
        threading.Thread(target=self._probe, args=[name], name="kvbm-object-probe", daemon=True).start()

    def _probe(self, name: str) -> None:
        """``name``: of an object to be written and read back as well."""
        is_told = not name  # a store that is only doubted is worth no line in the log
        while not self._closed.is_set():
            while self._breaker.is_open(time.monotonic()):
                if self._closed.wait(0.05):
                    return
            try:
                self.check()
                if name:
                    self._check_data(name)
            except ObjectStoreError as error:
                with self._lock:
                    self._suspended, self.is_doubted = str(error), False
                    self._force_breaker(time.monotonic())
                if not is_told:
                    logger.warning("%s: suspended until it answers again: %s", self._what, error)
                    is_told = True
                continue
            with self._lock:
                self._suspended, self.is_doubted = "", False
                self._breaker.succeeded()
            if is_told:
                logger.info("%s: answers again", self._what)
            return

    def _check_data(self, name: str) -> None:
        """Write an object and read it back. Passes the breaker by; raises."""
        data = os.urandom(_PROBE_BYTES)
        try:
            self._store.put(name, data, use_multipart=False)
            found = self._store.get(name).bytes()
        except Exception as error:
            reason = reason_of(error)
            if reason.startswith(_DENIED):
                return  # credentials that may only read
            raise ObjectStoreError(reason) from None
        finally:
            with contextlib.suppress(Exception):
                self._store.delete([name])
        if bytes(found) != data:
            raise ObjectStoreError("an object was read back with other bytes than were written")


def _open(settings: ObjectSettings) -> Any:
    try:
        from obstore.store import S3Store
    except ImportError:
        raise ObjectStoreError(
            "the package obstore is not installed. Install KVBM with its extra: pip install 'kvbm[objects]'"
        ) from None
    if settings.encryption_secret:
        try:
            import cryptography  # noqa: F401
        except ImportError:
            raise ObjectStoreError(
                "KVBM_OBJECT_ENCRYPTION_SECRET is set, but the package cryptography is not installed. Install KVBM "
                "with its extra: pip install 'kvbm[objects]'"
            ) from None
    timeout = timedelta(seconds=settings.timeout_seconds)
    options: dict[str, Any] = {
        "region": settings.region,
        "unsigned_payload": settings.unsigned_payload,
        "virtual_hosted_style_request": False,
        "client_options": {
            "allow_http": True,
            "timeout": timeout,
            "connect_timeout": min(timeout, timedelta(seconds=_CONNECT_SECONDS)),
        },
        # obstore's own default, ten retries within three minutes, would hold a request's blocks for that long.
        "retry_config": {
            "max_retries": settings.max_retries,
            "retry_timeout": timeout,
            "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=1), "base": 2},
        },
    }
    if settings.endpoint:
        options["endpoint"] = settings.endpoint
    if settings.access_key:
        # Not as options: obstore would add a session token of the environment, which belongs to other credentials.
        found = {
            "access_key_id": settings.access_key,
            "secret_access_key": settings.secret_key,
            "token": settings.session_token or None,
            "expires_at": None,
        }
        options["credential_provider"] = lambda: found
    try:
        return S3Store(settings.bucket, **options)
    except Exception as error:
        raise ObjectStoreError(f"the settings of the object store are refused: {reason_of(error)}") from None


_DENIED = "access denied"
_ADVICE = {
    "NoSuchBucket": "the bucket does not exist (DYN_KVBM_OBJECT_BUCKET)",
    "InvalidBucketName": "the bucket does not exist, or its name is invalid (DYN_KVBM_OBJECT_BUCKET)",
    "SignatureDoesNotMatch": "the secret key is wrong (DYN_KVBM_OBJECT_SECRET_KEY)",
    "InvalidAccessKeyId": "the access key is unknown (DYN_KVBM_OBJECT_ACCESS_KEY)",
    "RequestTimeTooSkewed": "the clock of this machine differs from the store's: synchronise it (NTP)",
    "AccessDenied": f"{_DENIED}: the credentials do not allow the request",
}


def reason_of(error: BaseException) -> str:
    """One line for a log. obstore adds its debug output and the store's XML; S3's own error codes are explained."""
    text = str(error).partition("Debug source:")[0]
    code = re.search(r"<Code>(\w+)</Code>", text)
    if code and code[1] in _ADVICE:
        return f"{_ADVICE[code[1]]} ({code[1]})"
    text = " ".join(text.partition("<?xml")[0].split()) + (f" {code[1]}" if code else "")
    if "timed out" in str(error) or "TimedOut" in str(error):
        text = f"timed out (KVBM_OBJECT_TIMEOUT_SECS): {text}"
    return (text or type(error).__name__)[:_MAX_REASON]
