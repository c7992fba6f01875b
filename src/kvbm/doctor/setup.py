"""Checks that measure nothing: versions, settings, packages, ports, sizes."""

from __future__ import annotations

import json
import platform
import re
import socket
import sys
from collections.abc import Iterator
from typing import Any

import kvbm
from kvbm.config import Config, ConfigError, require_tier
from kvbm.doctor.base import Examination, bad, good, installed_version, note
from kvbm.doctor.gpu import gpus
from kvbm.engines.supported import RELEASES
from kvbm.engines.vllm import shortcuts
from kvbm.engines.vllm.transfer_config import CLASS, EXAMPLE, MODULES, our_part
from kvbm.observe.format import size
from kvbm.observe.snapshot import Finding
from kvbm.runtime.channel import local


class Versions:
    """First, because every report of a fault needs them."""

    name = "versions"

    def run(self, case: Examination) -> Iterator[Finding]:
        packages = ("torch", *RELEASES)
        installed = [f"{name} {version}" for name in packages if (version := installed_version(name))]
        here = f"KVBM {kvbm.__version__}, Python {platform.python_version()}, {', '.join(installed) or 'no torch'}"
        running = ""
        if case.snapshot is not None:
            engine = case.snapshot.identity
            running = f" The running engine: {engine.engine} {engine.engine_version} with KVBM {engine.kvbm}."
        yield good("versions", f"{here} in {sys.prefix}.{running}")


class Settings:
    name = "settings"

    def run(self, case: Examination) -> Iterator[Finding]:
        if isinstance(case.settings, ConfigError):
            for problem in case.settings.problems:
                yield bad("setting-refused", problem, "The engine refuses to start with it; correct or remove it.")
            return
        config = case.settings
        for warning in config.warnings:
            yield note("setting-odd", warning)
        if config.unused:
            yield note("setting-unused", f"Accepted, not used: {', '.join(config.unused)}.")
        if case.snapshot is not None and not (config.has_host_tier or config.has_disk_tier):
            yield good("settings", "This shell sets no tier; the running engine has its own settings.")
            return
        try:
            require_tier(config)
        except ConfigError as error:
            yield bad("no-tier", str(error), "export DYN_KVBM_CPU_CACHE_GB=20 where the engine is started.")
            return
        given = [f"{key}={_shown(config, key)}" for key, source in config.sources.items() if source != "default"]
        yield good("settings", f"Settings are valid: {', '.join(given)}.")


def _shown(config: Config, key: str) -> str:
    from kvbm.config import SETTINGS

    return next(row.show(getattr(config, key)) for row in SETTINGS if row.key == key)


class Engine:
    name = "engine"

    def run(self, case: Examination) -> Iterator[Finding]:
        found = False
        for package, releases in RELEASES.items():
            if not (version := installed_version(package)):
                continue
            found = True
            release = re.match(r"\d+\.\d+", version)
            if release and release[0] in releases:
                yield good("engine", f"{package} {version} is installed, a release that KVBM supports.")
            else:
                yield note(
                    "engine-untested",
                    f"{package} {version} is installed; KVBM supports {releases[0]} to {releases[-1]}.",
                    "KVBM is not tested with this release. Prefer a supported one.",
                )
        if not found and case.snapshot is None:
            yield bad(
                "no-engine",
                f"None of {', '.join(RELEASES)} is installed in {sys.prefix}.",
                "Install kvbm into the engine's own environment, and run `kvbm doctor` with its Python.",
            )


class Shortcuts:
    """The loops of vLLM that KVBM replaces."""

    name = "shortcuts"

    def run(self, case: Examination) -> Iterator[Finding]:
        version = installed_version("vllm")
        found = shortcuts.describe(version) if version else ()
        if case.config is None or not found:
            return
        listed = "; ".join(f"{each.name} ({each.replaces}): {each.gain}" for each in found)
        if case.config.fast_prompts:
            yield good(
                "shortcuts",
                f"KVBM_FAST_PROMPTS replaces loops of vLLM {version}, for 32,768 tokens: {listed}. The engine's log "
                "names those that passed their self-test.",
            )
        else:
            yield note(
                "shortcuts-off",
                f"KVBM_FAST_PROMPTS=0: long prompts take vLLM {version}'s own loops. Not used: {listed}.",
                "Remove the setting, unless you look for a fault in these loops.",
            )


class Connector:
    """The JSON of vLLM's --kv-transfer-config."""

    name = "connector"

    def run(self, case: Examination) -> Iterator[Finding]:
        if case.transfer is None:
            return
        try:
            config: Any = json.loads(case.transfer)
        except ValueError as error:
            yield bad("transfer-json", f"--kv-transfer-config is not JSON: {error}.", f"For example '{EXAMPLE}'")
            return
        if not isinstance(config, dict):
            yield bad("transfer-json", "--kv-transfer-config is not a JSON object.", f"For example '{EXAMPLE}'")
            return
        wrong = False
        ours = our_part(config)
        named = [(ours, "kv_connector", (CLASS,)), (ours, "kv_connector_module_path", MODULES)]
        if ours is not config:  # a PdConnector, which is KVBM's too
            named.append((config, "kv_connector_module_path", MODULES))
        for part, key, accepted in named:
            if part.get(key) not in accepted:
                wrong = True
                where = "" if part is config else " of PdConnector's first connector"
                yield bad("connector-name", f'"{key}"{where} is {part.get(key)!r}.', f'Set "{key}": "{accepted[0]}".')
        if config.get("kv_role") != "kv_both":
            wrong = True
            yield bad("connector-role", f'"kv_role" is {config.get("kv_role")!r}.', 'Set "kv_role": "kv_both".')
        if config.get("kv_load_failure_policy") != "recompute":
            wrong = True
            yield note(
                "failure-policy",
                f'"kv_load_failure_policy" is {config.get("kv_load_failure_policy", "not set, which means fail")!r}: a '
                "failed load ends its request with an error.",
                'Set "kv_load_failure_policy": "recompute": the engine then recomputes the missing blocks.',
            )
        if not wrong:
            yield good("connector", "--kv-transfer-config names KVBM correctly.")


class Ports:
    name = "ports"

    def run(self, case: Examination) -> Iterator[Finding]:
        config = case.config
        if config is None:
            return
        if config.metrics:
            yield self._metrics(case, config)
        taken = [
            (env, port)
            for env, port, url in (
                ("DYN_KVBM_LEADER_ZMQ_PUB_PORT", config.leader_zmq_pub_port, config.leader_pub_url),
                ("DYN_KVBM_LEADER_ZMQ_ACK_PORT", config.leader_zmq_ack_port, config.leader_ack_url),
            )
            if not _leader_may_have(config.leader_zmq_host, port, url)
        ]
        for env, port in taken:
            yield note(
                "leader-port-taken",
                f"{env}={port} is taken on {config.leader_zmq_host}.",
                "vLLM does not use it. Every engine whose leader talks to its workers over ZeroMQ needs its own "
                "pair of ports.",
            )
        if not taken:
            yield good("leader-ports", "The leader's ports are free.")

    def _metrics(self, case: Examination, config: Config) -> Finding:
        if _is_free(config.metrics_host, config.metrics_port):
            return good("metrics-port", f"Port {config.metrics_port} for metrics is free.")
        if case.snapshot is not None and case.url.endswith(f":{config.metrics_port}"):
            model = case.snapshot.identity.model
            return good("metrics-port", f"KVBM of {model} answers on port {config.metrics_port}.")
        return bad(
            "metrics-port-taken",
            f"DYN_KVBM_METRICS_PORT={config.metrics_port} is taken on {config.metrics_host} by another program: the "
            "engine would start without metrics.",
            "Set DYN_KVBM_METRICS_PORT to a free port. Every engine on a host needs its own.",
        )


def _leader_may_have(host: str, port: int, url: str) -> bool:
    path = local.path_of(url)
    return _is_free(host, port) if path is None else not local.is_claimed(path)


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


class Sizes:
    """Each tier at least as large as the one above it: GPU, host, disk."""

    name = "sizes"

    def run(self, case: Examination) -> Iterator[Finding]:
        config = case.config
        if config is None or case.snapshot is not None:  # another check reports the sizes of a running engine
            return
        host, disk = _tier_bytes(config)
        if host and disk and disk < host:
            yield bad(
                "disk-smaller-than-host",
                f"The disk tier ({size(disk)}) is smaller than the host tier ({size(host)}): it holds nothing that the "
                "host does not.",
                f"Set DYN_KVBM_DISK_CACHE_GB to at least {host / 1e9:g}, better several times that.",
            )
        first, setting = (host, "DYN_KVBM_CPU_CACHE_GB") if host else (disk, "DYN_KVBM_DISK_CACHE_GB")
        if not first:
            return
        if case.device_gb is not None:
            if first < case.device_gb * 1e9:
                yield bad(
                    "host-smaller-than-device" if host else "disk-smaller-than-device",
                    f"{setting}={first / 1e9:g} is less than the engine's own cache ({case.device_gb:g} GB): the tier "
                    "evicts blocks before the engine does, and gives no hits.",
                    f"Set {setting} to at least {case.device_gb:g}, better several times that.",
                )
            else:
                yield good("sizes", "Each tier is at least as large as the one above it.")
        elif (cards := gpus()) and first < 0.5 * sum(card.memory for card in cards):
            yield note(
                "host-maybe-smaller-than-device",
                f"{setting}={first / 1e9:g}, and the GPUs here have {size(sum(card.memory for card in cards))}. An "
                "engine uses the memory beside its weights for its own cache.",
                "vLLM logs the size of its cache at start; the tier should be larger. `--gpu-cache-gb` compares them.",
            )


def _tier_bytes(config: Config) -> tuple[float, float]:
    """(host, disk) in bytes; 0 without the tier, and for a size in blocks, whose bytes only the engine knows."""
    host = 0.0 if config.cpu_cache_override_num_blocks else config.cpu_cache_gb * 1e9
    disk = 0.0 if config.disk_cache_override_num_blocks else config.disk_cache_gb * 1e9
    return host, disk
