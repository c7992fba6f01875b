"""The contract of a check, and what checks know when they look."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, Literal, Protocol

from kvbm.config import Config, ConfigError, load
from kvbm.observe.remote import NotReachableError, fetch
from kvbm.observe.snapshot import Finding, Snapshot


class Check(Protocol):
    name: str

    def run(self, case: Examination) -> Iterable[Finding]: ...


class Examination:
    """What is asked for, and what several checks want to know; each thing is found out once.

    ``url``: of a running engine's metrics port; ``asked``: the user named it. ``quick``: measure nothing.
    ``transfer``: the JSON of --kv-transfer-config. ``device_gb``: size of the engine's own cache, if the user knows it.
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
        """Settings in --kv-transfer-config, which win over all others. What is wrong with it another check says."""
        with contextlib.suppress(ValueError):
            extra = our_part(json.loads(self.transfer or "{}")).get("kv_connector_extra_config")
            return extra if isinstance(extra, dict) else {}
        return {}

    @property
    def config(self) -> Config | None:
        """None when the settings cannot be used; another check says why."""
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


def our_part(transfer: object) -> dict[str, Any]:
    """KVBM's own part of --kv-transfer-config: all of it, or the first of a PdConnector's two, or nothing."""
    if not isinstance(transfer, dict):
        return {}
    if transfer.get("kv_connector") != "PdConnector":
        return transfer
    extra = transfer.get("kv_connector_extra_config")
    children = extra.get("connectors") if isinstance(extra, dict) else None
    return our_part(children[0]) if isinstance(children, list) and children else {}


def examine(case: Examination, checks: Iterable[Check]) -> Iterator[tuple[str, Finding]]:
    """(name of the check, finding), as they are found."""
    for check in checks:
        try:
            for finding in check.run(case):
                yield check.name, finding
        except Exception as error:
            text = f"The check itself failed: {type(error).__name__}: {error}"
            yield check.name, bad("check-failed", text, "Please report this, with the line above.")


def good(name: str, text: str) -> Finding:
    return _finding(name, "good", text, "")


def note(name: str, text: str, cure: str = "") -> Finding:
    return _finding(name, "note", text, cure)


def bad(name: str, text: str, cure: str) -> Finding:
    return _finding(name, "bad", text, cure)


def _finding(name: str, level: Literal["good", "note", "bad"], text: str, cure: str) -> Finding:
    return Finding(name=name, level=level, text=text, cure=cure)
