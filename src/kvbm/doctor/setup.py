"""Checks that measure nothing: versions, settings, packages, ports, sizes."""

from __future__ import annotations

import errno
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import kvbm
from kvbm.config import DEFAULT, SETTINGS, Config, ConfigError, require_tier
from kvbm.doctor.base import Examination, installed_version, refusal
from kvbm.doctor.gpu import gpus
from kvbm.engines.supported import RELEASES, is_supported, is_too_old
from kvbm.engines.vllm import shortcuts
from kvbm.observe.findings import bad, good, note
from kvbm.observe.format import printable, size
from kvbm.observe.snapshot import Finding
from kvbm.runtime.channel import local

MIN_TIER = 5e6  # bytes
VLLM_PORT = 8000
NEWEST_PYTHON = (3, 13)


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
        found = {str(each.locate_file("")): each.version for each in metadata.distributions(name="kvbm")}
        if len(found) > 1:
            listed = ", ".join(f"{version} in {place}" for place, version in found.items())
            yield bad("installed-twice", f"kvbm is installed more than once: {listed}.", "Uninstall all, install one.")
        yield from _imported_from_elsewhere(case)
        odd = []
        if platform.machine() != "x86_64":
            odd.append(f"{platform.machine()} processors")
        if sys.version_info[:2] > NEWEST_PYTHON:
            odd.append(f"Python {platform.python_version()}")
        if "microsoft" in platform.release().lower():
            odd.append("WSL 2, which limits pinned memory")
        if odd:
            text = f"KVBM is not tested on {' and '.join(odd)}."
            yield note("platform-untested", text, "docs/support.md says what is. `make test` tests it here.")


def _imported_from_elsewhere(case: Examination) -> Iterator[Finding]:
    """PYTHONPATH comes before the installed package, whose release alone is shown everywhere."""
    code = Path(kvbm.__file__).resolve().parent.parent
    if code not in (Path(each).resolve() for each in case.environ.get("PYTHONPATH", "").split(":") if each):
        return
    for installed in metadata.distributions(name="kvbm"):
        place = Path(str(installed.locate_file(""))).resolve()
        editable = (installed.read_text("direct_url.json") or "").replace("file://", "")
        if place != code and f'"{code.parent}"' not in editable:
            yield note(
                "imported-from-elsewhere",
                f"kvbm is imported from {code}, which PYTHONPATH names, and not from the package in {place}.",
                "Unset PYTHONPATH where the engine is started, unless this is meant.",
            )


class Settings:
    name = "settings"

    def run(self, case: Examination) -> Iterator[Finding]:
        if isinstance(case.settings, ConfigError):
            for problem in case.settings.problems:
                yield bad("setting-refused", problem, "The engine refuses to start with it; correct or remove it.")
            return
        config = case.settings
        for warning in config.warnings:
            if warning in config.misspelt:
                yield bad("setting-misspelt", warning, "Correct the name, or remove it.")
            else:
                yield note("setting-odd", warning)
        yield from _doubtful(config)
        yield from _without_effect(config)
        if config.unused:
            yield note("setting-unused", f"Accepted, not used: {', '.join(config.unused)}.")
        other = "running engine" if case.snapshot is not None else "engine that starts" if case.starting else ""
        if other and not (config.has_host_tier or config.has_disk_tier):
            yield good("settings", f"This shell sets no tier; the {other} has its own settings.")
            return
        try:
            require_tier(config)
        except ConfigError as error:
            sizes = ("cpu_cache_gb", "disk_cache_gb")
            zeros = [f"{key} is 0 in {config.sources[key]}" for key in sizes if config.sources[key] != DEFAULT]
            cure = "export DYN_KVBM_CPU_CACHE_GB=20 where the engine is started."
            names = ("DYN_KVBM_CPU_CACHE_GB", "DYN_KVBM_DISK_CACHE_GB")
            if empty := [name for name in names if not case.environ.get(name, "unset").strip()]:
                cure = f"{' and '.join(empty)} is set, and empty: give it a number, for example 20."
            elif "SUDO_USER" in case.environ:
                cure += " sudo does not pass variables on: `sudo -E`, or `sudo DYN_KVBM_CPU_CACHE_GB=20 ...`."
            yield bad("no-tier", str(error), f"Correct it: {', '.join(zeros)}." if zeros else cure)
            return
        given = [f"{key}={_shown(config, key)}" for key, source in config.sources.items() if source != "default"]
        evicts = [f"host memory evicts by {_policy(config.host_policy)}"] if config.has_host_tier else []
        evicts += [f"disk by {_policy(config.disk_policy)}"] if config.has_disk_tier else []
        yield good("settings", f"Settings are valid: {', '.join(given)}. When full, {' and '.join(evicts)}.")


def _policy(name: str) -> str:
    return "session (lru under SGLang and with sliding windows or states)" if name == "auto" else name


def _doubtful(config: Config) -> Iterator[Finding]:
    """Valid settings that no user of a cache wants."""
    if config.inject_faults:
        yield bad(
            "faults-injected",
            f"KVBM_INJECT_FAULTS={config.inject_faults}: KVBM makes its own transfers fail.",
            "Remove it: it is for tests only.",
        )
    if config.load == "never":
        yield bad(
            "never-load", "KVBM_LOAD=never: KVBM stores blocks and loads none.", "Remove KVBM_LOAD, or set it to auto."
        )
    if config.has_disk_tier and not config.has_host_tier and not installed_version("sglang"):  # it has host memory
        yield note(
            "disk-without-host",
            "There is a disk tier and no host tier, which is experimental: every load waits for the disk.",
            "Set DYN_KVBM_CPU_CACHE_GB too.",
        )
    if config.metrics and config.metrics_host in ("0.0.0.0", "::"):
        yield note(
            "metrics-open",
            f"KVBM_METRICS_HOST={config.metrics_host} opens the metrics port to the network, without authentication.",
            "Let only your Prometheus reach it: a firewall, a NetworkPolicy.",
        )


def _without_effect(config: Config) -> Iterator[Finding]:
    """Settings whose switch, or whose tier, is off."""
    switches = [
        (config.has_disk_tier, "DYN_KVBM_DISK_CACHE_GB", ("disk_cache_dir",)),
        (config.has_host_tier, "DYN_KVBM_CPU_CACHE_GB", ("host_persist",)),
        (config.host_persist, "KVBM_HOST_PERSIST", ("host_persist_dir",)),
        (config.metrics, "DYN_KVBM_METRICS", ("metrics_port", "metrics_host")),
        (config.enable_record, "DYN_KVBM_ENABLE_RECORD", ("record_dir",)),
        (config.object_enabled, "DYN_KVBM_OBJECT_ENABLED", ("object_bucket", "object_endpoint")),
        (config.peers_enabled, "KVBM_PEERS_ENABLED", ("peers", "peer_listen")),
    ]
    for is_on, needed, keys in switches:
        given = [row.env for row in SETTINGS if row.key in keys and config.sources[row.key] != DEFAULT]
        if given and not is_on:
            text = f"{' and '.join(given)} without effect: {needed} is not set."
            yield note("setting-without-effect", text, f"Set {needed}, or remove it.")
    if config.disk_cache_override_num_blocks and config.disk_cache_gb:
        yield note(
            "setting-without-effect",
            f"DYN_KVBM_DISK_CACHE_GB={config.disk_cache_gb:g} without effect: "
            f"DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS={config.disk_cache_override_num_blocks} sets the size in blocks.",
            "Remove one of them.",
        )


def _shown(config: Config, key: str) -> str:
    return next(row.show(getattr(config, key)) for row in SETTINGS if row.key == key)


class Engine:
    name = "engine"

    def run(self, case: Examination) -> Iterator[Finding]:
        found = False
        for package, releases in RELEASES.items():
            if not (version := installed_version(package)):
                continue
            found = True
            span = releases[0] if len(releases) == 1 else f"{releases[0]} to {releases[-1]}"
            if is_supported(package, version):
                yield good("engine", f"{package} {version} is installed, a release that KVBM supports.")
            elif is_too_old(package, version):
                yield bad(
                    "engine-too-old",
                    f"{package} {version} is installed, which is too old for the connector: KVBM supports {span}.",
                    f"Install a supported release: pip install '{package}=={releases[-1]}.*'",
                )
            else:
                yield note(
                    "engine-untested",
                    f"{package} {version} is installed; KVBM supports {span}.",
                    "KVBM is not tested with this release. Prefer a supported one.",
                )
        if found and not installed_version("torch"):
            yield bad(
                "no-torch",
                f"torch is not installed in {sys.prefix}, and the engine does not start without it.",
                "Install the engine again: it brings the torch that it is built for.",
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
                f"KVBM_FAST_PROMPTS replaces loops of vLLM {version}. For 32,768 tokens on a core of an AMD EPYC: "
                f"{listed}. The engine's log names those that passed their self-test.",
            )
        else:
            yield note(
                "shortcuts-off",
                f"KVBM_FAST_PROMPTS=0: long prompts take vLLM {version}'s own loops. Not used: {listed}.",
                "Remove the setting, unless you look for a fault in these loops.",
            )


class Ports:
    name = "ports"

    def run(self, case: Examination) -> Iterator[Finding]:
        config = case.config
        if config is None:
            return
        if config.metrics:
            yield self._metrics(case, config)
            yield from self._shared(config)
        yield from self._leader(config)

    def _shared(self, config: Config) -> Iterator[Finding]:
        """Ports that two parts of one engine want. All are free as long as the engine does not run."""
        others = [
            (config.leader_zmq_pub_port, "DYN_KVBM_LEADER_ZMQ_PUB_PORT"),
            (config.leader_zmq_ack_port, "DYN_KVBM_LEADER_ZMQ_ACK_PORT"),
            (VLLM_PORT, "the default port of `vllm serve`"),
        ]
        for port, name in others:
            if port == config.metrics_port:
                yield note(
                    "metrics-port-shared",
                    f"DYN_KVBM_METRICS_PORT={port} is also {name}: one of the two cannot listen.",
                    "Set DYN_KVBM_METRICS_PORT to a port of its own, or give the other one another.",
                )

    def _leader(self, config: Config) -> Iterator[Finding]:
        host = config.leader_zmq_host
        refused = None if local.path_of(config.leader_pub_url) else refusal(host, 0)
        if refused is not None:
            yield note(
                "leader-elsewhere",
                f"DYN_KVBM_LEADER_ZMQ_HOST={host} is not an address of this machine ({refused.strerror or refused}).",
                "vLLM does not use it. For other engines, only workers can start here, with their leader there.",
            )
            return
        taken = [
            (env, port)
            for env, port, url in (
                ("DYN_KVBM_LEADER_ZMQ_PUB_PORT", config.leader_zmq_pub_port, config.leader_pub_url),
                ("DYN_KVBM_LEADER_ZMQ_ACK_PORT", config.leader_zmq_ack_port, config.leader_ack_url),
            )
            if not _leader_may_have(host, port, url)
        ]
        for env, port in taken:
            yield note(
                "leader-port-taken",
                f"{env}={port} is taken on {host}.",
                "vLLM does not use it. Every engine whose leader talks to its workers over ZeroMQ needs its own "
                "pair of ports.",
            )
        if not taken:
            yield good("leader-ports", "The ports of a leader over ZeroMQ are free; vLLM does not use them.")

    def _metrics(self, case: Examination, config: Config) -> Finding:
        refused = refusal(config.metrics_host, config.metrics_port)
        if refused and refused.errno != errno.EADDRINUSE:
            return bad(
                "metrics-host",
                f"KVBM_METRICS_HOST={config.metrics_host}, DYN_KVBM_METRICS_PORT={config.metrics_port}: this machine "
                f"cannot listen there ({refused.strerror or refused}). The engine would start without metrics.",
                "Use 127.0.0.1, an address of this machine or 0.0.0.0, and a port of 1024 or above.",
            )
        if refused is None:
            return good("metrics-port", f"Port {config.metrics_port} for metrics is free.")
        if case.snapshot is not None and case.url.endswith(f":{config.metrics_port}"):
            model, port = printable(case.snapshot.identity.model), config.metrics_port
            return note(
                "metrics-port",
                f"KVBM of {model} answers on port {port}: an engine runs here already.",
                "A second engine on this host needs its own DYN_KVBM_METRICS_PORT, or it runs without metrics.",
            )
        return bad(
            "metrics-port-taken",
            f"DYN_KVBM_METRICS_PORT={config.metrics_port} is taken on {config.metrics_host} by another engine or "
            "program: the engine would start without metrics.",
            "Set DYN_KVBM_METRICS_PORT to a free port: every engine on a host needs its own. Or set "
            "DYN_KVBM_METRICS=0 (kvbm serve --no-metrics).",
        )


def _leader_may_have(host: str, port: int, url: str) -> bool:
    path = local.path_of(url)
    return refusal(host, port) is None if path is None else not local.is_claimed(path)


class Sizes:
    """Each tier at least as large as the one above it: GPU, host, disk."""

    name = "sizes"

    def run(self, case: Examination) -> Iterator[Finding]:
        config = case.config
        if config is None or case.snapshot is not None:  # another check reports the sizes of a running engine
            return
        host, disk = _tier_bytes(config)
        for amount, name in ((host, "DYN_KVBM_CPU_CACHE_GB"), (disk, "DYN_KVBM_DISK_CACHE_GB")):
            if 0 < amount < MIN_TIER:
                yield bad(
                    "tier-tiny",
                    f"{name}={amount / 1e9:g} asks for {size(amount)}: most models have blocks of 0.5 to 5 MB.",
                    "Set it to the GB that the cache may take, for example 20. `kvbm size MODEL` helps to choose.",
                )
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
