"""The contract of a check, and the facts that checks share."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from importlib import metadata
from typing import Any, Protocol
from urllib.parse import urlsplit

from kvbm.config import Config, ConfigError, load
from kvbm.doctor.servers import Server, servers
from kvbm.engines.vllm.transfer_config import extra_config
from kvbm.observe.findings import bad
from kvbm.observe.remote import NotReachableError, fetch
from kvbm.observe.snapshot import Finding, Snapshot


class Check(Protocol):
    name: str

    def run(self, case: Examination) -> Iterable[Finding]: ...


class Examination:
    """The options of the command, and the facts that several checks need, each determined once.

    ``url``: of a running engine's metrics port; ``asked``: the user named it. ``quick``: skip the measurements.
    ``transfer``: the JSON of --kv-transfer-config. ``device_gb``: size of the engine's own cache, if the user gave it.
    """

    def __init__(
        self,
        url: str,
        asked: bool = False,
        quick: bool = False,
        transfer: str | None = None,
        device_gb: float | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.url = url
        self.asked = asked
        self.quick = quick
        self.transfer = transfer
        self.device_gb = device_gb
        self.environ = os.environ if environ is None else environ

    @cached_property
    def settings(self) -> Config | ConfigError:
        try:
            return load(self._extra_config(), environ=self.environ)
        except ConfigError as error:
            return error

    def _extra_config(self) -> dict[str, Any]:
        """The settings in --kv-transfer-config, which override all others. Another check reports its faults."""
        return extra_config(self.transfer or "{}")

    @property
    def config(self) -> Config | None:
        """None if the settings are invalid; another check reports why."""
        return self.settings if isinstance(self.settings, Config) else None

    @cached_property
    def engine(self) -> Snapshot | NotReachableError:
        """The running engine's state."""
        try:
            return fetch(self.url, requests=0)
        except NotReachableError as error:
            return error

    @property
    def snapshot(self) -> Snapshot | None:
        return self.engine if isinstance(self.engine, Snapshot) else None

    @cached_property
    def starting(self) -> list[Server]:
        """Engines that run on this machine while none answers: they still load, most likely."""
        return [] if self.snapshot is not None else servers()

    @property
    def host_tier_bytes(self) -> int:
        """The memory of this machine that the running engine's host tier takes; 0 without one."""
        is_here = urlsplit(self.url).hostname in ("127.0.0.1", "localhost", "::1")
        tiers = self.snapshot.tiers if is_here and self.snapshot is not None else []
        return sum(tier.slots * tier.block_bytes for tier in tiers if tier.tier == "host")


def installed_version(package: str) -> str:
    """The version of a package, without importing it; empty if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def refusal(host: str, port: int) -> OSError | None:
    """Why a program cannot listen there."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None


def examine(case: Examination, checks: Iterable[Check]) -> Iterator[tuple[str, Finding]]:
    """Run the checks. Yields (name of the check, finding)."""
    for check in checks:
        try:
            for finding in check.run(case):
                yield check.name, finding
        except Exception as error:
            text = f"The check itself failed: {type(error).__name__}: {error}"
            yield check.name, bad("check-failed", text, "Please report this as a bug, with this line.")
