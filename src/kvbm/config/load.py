"""Loading: files, environment and connector JSON become one validated `Config`.

A setting takes its value from the highest of these sources that sets it:

    built-in default < /opt/dynamo/etc/kvbm.toml < TOML at KVBM_CONFIG_PATH < environment < kv_connector_extra_config

The leader and each worker call `load` once, at start. It neither logs nor prints: warnings are in `Config.warnings`. An
invalid value raises `ConfigError`, which lists all problems and not only the first.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvbm.config import router_hints, table
from kvbm.config.kinds import Backends, ConfigError, FilePath, RejectedError, Switch, closest
from kvbm.config.setting import Setting
from kvbm.config.table import BACKEND_PREFIX, BY_KEY, CONSOLIDATOR_PORT_OFFSET, DEFAULT, SETTINGS, Config, tcp_url

ENVIRONMENT = "environment"
EXTRA_CONFIG = "kv_connector_extra_config"

_ENV_NAMES = {name: row for row in SETTINGS for name in (row.env, *row.old_names)}
_ALL_NAMES = BY_KEY | _ENV_NAMES
_BACKEND_SWITCH = Switch(blank_is_off=False)


def load(
    extra: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    files: Sequence[Path] | None = None,
) -> Config:
    """Return the settings in force, or raise `ConfigError`.

    `extra` is the engine's kv_connector_extra_config; keys that belong to other connectors are ignored. `environ`
    replaces the environment of the process. `files` replaces the system-wide file; that file may be missing, but each
    of `files` must exist. The file at KVBM_CONFIG_PATH is read after them. `load({...}, environ={}, files=())` depends
    on nothing outside its arguments.
    """
    extra = {} if extra is None else extra
    environ = os.environ if environ is None else environ
    if files is None:
        files = [table.SYSTEM_FILE] if os.path.exists(table.SYSTEM_FILE) else []
    reading = _Reading()
    for path in files:
        reading.add_file(path)
    reading.add_named_file(extra, environ)
    reading.add(environ, ENVIRONMENT)
    reading.add(extra, EXTRA_CONFIG)
    found = reading.add_router_hints(extra)
    config = reading.finish()
    return msgspec.structs.replace(config, warnings=(*config.warnings, *router_hints.warnings_about(config, found)))


class _Given(msgspec.Struct, frozen=True):
    """A value as the user wrote it, with the name and the source."""

    name: str
    raw: object
    source: str

    def label(self, secret: bool = False) -> str:
        return f"{self.name}={'(hidden)' if secret else repr(self.raw)} ({self.source})"


class _Reading:
    """Collects the sources from the lowest to the highest; each overrides the values of those before it.

    Values are parsed at the end, so an invalid value that a higher source overrides is no error.
    """

    def __init__(self) -> None:
        self.given: dict[str, _Given] = {}  # by key
        self.backends: dict[str, _Given] = {}  # by name of the NIXL backend
        self.warnings: list[str] = []
        self.misspelt: list[str] = []  # those of the warnings about a name that resembles a setting
        self.problems: list[str] = []

    def add_named_file(self, extra: Mapping[str, object], environ: Mapping[str, str]) -> None:
        """Add the file at KVBM_CONFIG_PATH. It ranks below the source that names it, so its path is looked up first."""
        candidates = [(extra, EXTRA_CONFIG, name) for name in ("config_path", "KVBM_CONFIG_PATH")]
        for values, source, name in [*candidates, (environ, ENVIRONMENT, "KVBM_CONFIG_PATH")]:
            if raw := values.get(name):
                try:
                    path = FilePath().parse(raw)
                except RejectedError:
                    return  # `finish` reports it like any other invalid value
                self.add_file(path, f" (named by {name}, {source})")
                return

    def add_file(self, path: Path, named_by: str = "") -> None:
        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            reason = error.strerror or error
            self.problems.append(f"{path}{named_by}: {reason}; correct the path or make the file readable")
        except ValueError as error:  # not TOML, or not UTF-8
            self.problems.append(f"{path}{named_by}: not a TOML file: {error}; `kvbm config --toml` prints a valid one")
        else:
            self.add(values, str(path))

    def add(self, values: Mapping[str, object], source: str) -> None:
        # Files and JSON may use the keys. In the environment a lower-case name belongs to another program.
        names = _ENV_NAMES if source == ENVIRONMENT else _ALL_NAMES
        here: dict[str, _Given] = {}
        for name, raw in values.items():
            given = _Given(name, raw, source)
            if raw is None:  # `null` in JSON means "not set"
                continue
            if name.startswith(BACKEND_PREFIX):
                self._add_backend(name.removeprefix(BACKEND_PREFIX), given)
            elif (setting := names.get(name)) is None:
                self._warn_if_unknown(given)
            elif setting.retired:
                self.warnings.append(f"{name} ({source}) has no effect: {setting.retired}; remove it")
            elif setting.key == "config_path" and source not in (ENVIRONMENT, EXTRA_CONFIG):
                self.warnings.append(f"{name} ({source}) is ignored: a settings file cannot name another file")
            elif isinstance(setting.kind, Backends):
                for backend, switch in (self._parse(setting, given) or {}).items():
                    self._add_backend(backend, _Given(f"{name}.{backend}", switch, source))
            elif not _is_empty_variable(setting, given):
                here[setting.key] = self._resolve_names(setting, here.get(setting.key), given)
        self.given |= here

    def _add_backend(self, backend: str, given: _Given) -> None:
        if "_" in backend:
            self.problems.append(
                f"{given.label()}: custom params not supported; expected {BACKEND_PREFIX} and a backend name without "
                f"underscores, for example {BACKEND_PREFIX}UCX=1"
            )
        elif not re.fullmatch(r"[A-Za-z0-9]+", backend):
            self.problems.append(f"{given.label()}: expected the name of a backend, for example {BACKEND_PREFIX}UCX=1")
        else:
            self.backends[backend.upper()] = given

    def _resolve_names(self, setting: Setting, other: _Given | None, given: _Given) -> _Given:
        """Choose between two names of a setting in one source: the current name wins over an old one."""
        is_old = given.name in setting.old_names
        if is_old:
            self.warnings.append(f"{given.name} ({given.source}) is the old name of {setting.env}; rename it")
        if other is None:
            return given
        kept, dropped = (other, given) if is_old else (given, other)
        self.warnings.append(f"{dropped.name} ({given.source}) is ignored: {kept.name} sets the same setting")
        return kept

    def _warn_if_unknown(self, given: _Given) -> None:
        """Warn about a name that resembles a setting, and about every unknown name that only KVBM can mean."""
        near, is_ours = _meant(given)
        inside = [name for name in given.raw if name in _ALL_NAMES] if isinstance(given.raw, Mapping) else []
        if not near and not is_ours:
            return
        hint = f"did you mean {near}?" if near else "`kvbm config --all` lists the settings"
        if inside:
            place = f"at the top of the file, outside of [{given.name}]"
            if given.source == EXTRA_CONFIG:
                place = f'beside "{given.name}", not in it'
            hint = f"put {', '.join(inside)} {place}"
        self.warnings.append(f"{given.name} ({given.source}) is not a setting and is ignored; {hint}")
        if near or inside:
            self.misspelt.append(self.warnings[-1])

    def add_router_hints(self, extra: Mapping[str, object]) -> router_hints.Advertised | None:
        try:
            return router_hints.advertised(extra)
        except ConfigError as error:
            self.problems += error.problems
            return None

    def finish(self) -> Config:
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        for row in SETTINGS:
            if not row.retired:
                given = self.given.get(row.key)
                values[row.key] = row.default if given is None else self._parse(row, given)
                sources[row.key] = DEFAULT if given is None else given.source
        backends = BY_KEY["nixl_backends"]
        switch = msgspec.structs.replace(backends, kind=_BACKEND_SWITCH)
        values[backends.key] = {name: self._parse(switch, given) for name, given in sorted(self.backends.items())}
        sources[backends.key] = ", ".join(sorted({given.source for given in self.backends.values()})) or DEFAULT
        if not self.problems:
            self._check_ports(values)
            self._check_directories(values)
        if self.problems:
            raise ConfigError(*self.problems)
        unused = {given.name: BY_KEY[key].unused for key, given in self.given.items() if BY_KEY[key].unused}
        unused |= {given.name: backends.unused for given in self.backends.values()}
        return Config(
            **values,
            sources=sources,
            warnings=tuple(self.warnings),
            misspelt=tuple(self.misspelt),
            unused_because=dict(sorted(unused.items())),
        )

    def _parse(self, setting: Setting, given: _Given) -> Any:
        try:
            return setting.kind.parse(given.raw)
        except RejectedError as rejected:
            example = f", for example {setting.kind.example}" if setting.kind.example else ""
            hint = f"; {rejected}" if str(rejected) else ""
            self.problems.append(f"{given.label(setting.secret)}: expected {setting.kind.accepts()}{example}{hint}")
            return None

    def _label(self, key: str, values: Mapping[str, Any]) -> str:
        return self.given.get(key, _Given(BY_KEY[key].env, values[key], DEFAULT)).label()

    def _check_directories(self, values: Mapping[str, Any]) -> None:
        """Both tiers name a model's directory the same, so in one parent directory their files would collide."""
        host, disk = "host_persist_dir", "disk_cache_dir"
        if not values["host_persist"] or not (values["disk_cache_gb"] or values["disk_cache_override_num_blocks"]):
            return
        if os.path.realpath(values[host]) == os.path.realpath(values[disk]):
            self.problems.append(
                f"{self._label(host, values)} and {self._label(disk, values)}: the host tier and the disk tier cannot "
                "use the same directory; set KVBM_HOST_PERSIST_DIR to a directory on a memory filesystem, for example "
                "/dev/shm, and DYN_KVBM_DISK_CACHE_DIR to a directory on disk"
            )

    def _check_ports(self, values: Mapping[str, Any]) -> None:
        def label(key: str) -> str:
            return self._label(key, values)

        pub, ack = "leader_zmq_pub_port", "leader_zmq_ack_port"
        if values[pub] == values[ack]:
            url = tcp_url(values["leader_zmq_host"], values[pub])
            self.problems.append(
                f"{label(pub)} and {label(ack)}: both are {url}, but the leader needs two addresses; "
                "choose two different ports, for example 56001 and 56002"
            )
        consolidator = values[pub] + CONSOLIDATOR_PORT_OFFSET
        if values["kv_events_enable_consolidator"] != "off":
            if consolidator > 65535:
                self.problems.append(
                    f"{label(pub)}: the consolidator publishes events on this port + {CONSOLIDATOR_PORT_OFFSET}, and "
                    f"{consolidator} is above 65535; choose a port up to {65535 - CONSOLIDATOR_PORT_OFFSET}, or set "
                    "DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR=0"
                )
            if consolidator == values[ack]:
                self.warnings.append(
                    f"{label(ack)}: the consolidator publishes events on the same port ({label(pub)} + "
                    f"{CONSOLIDATOR_PORT_OFFSET}); choose another port for one of them"
                )
        for key in (pub, ack, "metrics_port"):
            if values[key] < 1024:
                self.warnings.append(f"{label(key)}: ports below 1024 usually need root; choose 1024 or above")


def _meant(given: _Given) -> tuple[str, bool]:
    """(the setting that an unknown name resembles, or ""; whether only KVBM can be meant).

    The environment and the engine's JSON also hold names of other programs; a settings file holds KVBM's only.
    """
    name, is_variable = given.name, given.source == ENVIRONMENT
    # The shared prefix would make all names look similar, so the comparison leaves it out.
    stem = name.lower().removeprefix("dyn_").removeprefix("kvbm_")
    prefixed = name.lower().startswith(("dyn_kvbm", "kvbm"))
    keys = [row.key for row in SETTINGS if not row.retired]
    if is_variable and str(given.raw).startswith("tcp://"):
        return "", False  # Kubernetes sets KVBM_METRICS_PORT and the like for a service with this name
    if is_variable and not name.startswith(("DYN_KVBM_", "KVBM_")):
        is_similar = name.upper().startswith(("DYN", "KV"))  # the prefix itself is misspelt, or in lower case
        return closest(name.upper(), [row.env for row in SETTINGS], cutoff=0.9) if is_similar else "", False
    if is_variable:
        is_ours = name.startswith("DYN_KVBM_")  # other programs use KVBM_ too
    else:
        is_ours = given.source != EXTRA_CONFIG or prefixed
    near = closest(stem.replace("host_cache", "cpu_cache"), keys, cutoff=0.6 if is_ours else 0.85)
    return (BY_KEY[near].env if near and prefixed else near), is_ours


def _is_empty_variable(setting: Setting, given: _Given) -> bool:
    """Compose files and Helm charts often set a variable to nothing. That means "not set", and off for a switch."""
    return given.source == ENVIRONMENT and not isinstance(setting.kind, Switch) and not str(given.raw).strip()
