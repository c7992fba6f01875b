"""Every setting of KVBM, once: environment, TOML files and connector JSON become one validated `Config`.

`SETTINGS` is the table: a name, what it accepts, its default and one sentence of documentation a row. The loader, the
`kvbm config` command and docs/configuration.md are all made from it. To add a setting, add a row there and a field of
the same name to `Config`.

A value is taken from the highest of these places that has one:

    built-in default < /opt/dynamo/etc/kvbm.toml < TOML at KVBM_CONFIG_PATH < environment < kv_connector_extra_config

`load` is called once, when the leader or a worker starts. It neither logs nor prints: what deserves a warning is in
`Config.warnings`, and a wrong value raises `ConfigError`, which lists everything that is wrong and not only the first.
"""

import ipaddress
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

SYSTEM_FILE = Path("/opt/dynamo/etc/kvbm.toml")
BACKEND_PREFIX = "DYN_KVBM_NIXL_BACKEND_"
CONSOLIDATOR_PORT_OFFSET = 1000

DEFAULT = "default"
ENVIRONMENT = "environment"
EXTRA_CONFIG = "kv_connector_extra_config"


class ConfigError(ValueError):
    """One or more settings cannot be used. `problems` has one sentence for each; the message is all of them."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        many = f"{len(problems)} settings cannot be used:\n  " if len(problems) > 1 else ""
        super().__init__(many + "\n  ".join(problems))


# ---------------------------------------------------------------------------------------------------------------------
# What a setting accepts


class _RejectedError(Exception):
    """Raised by `Kind.parse`; the text, if any, is a hint that follows what is accepted."""


class Kind(msgspec.Struct, frozen=True):
    """How a raw value (text of the environment, or a TOML or JSON value) becomes a typed one."""

    example: str = ""

    def accepts(self) -> str:
        """What is accepted, as the end of a sentence that begins with "expected"."""
        raise NotImplementedError

    def parse(self, raw: object) -> Any:
        """The typed value, or `_RejectedError`."""
        raise NotImplementedError


# Larger numbers would overflow further on: a quadrillion of anything here is a mistake.
_TOO_LARGE = 10**15


class Number(Kind, frozen=True):
    """A number within limits. Strict: no sign, no underscores, no unit, neither NaN nor infinity."""

    unit: str = ""
    low: int = 0
    high: int = 0  # 0: no limit but good sense
    whole: bool = True
    above: bool = False  # `low` itself is excluded

    def accepts(self) -> str:
        what = "a whole number" if self.whole else "a number"
        if self.unit:
            what += f" of {self.unit}"
        if self.above:
            return f"{what} > {self.low}" + (f" and <= {self.high}" if self.high else "")
        return f"{what} from {self.low} to {self.high}" if self.high else f"{what} >= {self.low}"

    def parse(self, raw: object) -> int | float:
        value = self._read(raw)
        if not value >= self.low or (self.above and value == self.low) or (self.high and value > self.high):  # or NaN
            raise _RejectedError
        if value > _TOO_LARGE:
            raise _RejectedError("this is more than any machine has")
        return value

    def _read(self, raw: object) -> int | float:
        if isinstance(raw, str):
            text = raw.strip()
            pattern = r"[0-9]{1,30}" if self.whole else r"([0-9]{1,30}\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?"
            if not re.fullmatch(pattern, text):
                raise _RejectedError
            return int(text) if self.whole else float(text)
        # True is an int in Python, and 1 is not what whoever wrote `true` meant.
        if isinstance(raw, bool) or not isinstance(raw, int if self.whole else (int, float)):
            raise _RejectedError
        return raw if self.whole or raw > _TOO_LARGE else float(raw)


class Switch(Kind, frozen=True):
    """On or off. With `presence`, any other word means on too: such variables used to count as on by being set."""

    presence: bool = False
    blank_is_off: bool = True

    def accepts(self) -> str:
        return "1, true, on or yes to turn it on, 0, false, off or no to turn it off"

    def parse(self, raw: object) -> bool:
        if isinstance(raw, bool):
            return raw
        if isinstance(raw, int) and raw in (0, 1):
            return raw == 1
        if isinstance(raw, str):
            word = raw.strip().lower()
            if word in ("1", "true", "on", "yes"):
                return True
            if word in ("0", "false", "off", "no") or (self.blank_is_off and not word):
                return False
            if self.presence:
                return True
        raise _RejectedError


class Choice(Kind, frozen=True):
    """One word of a few. `synonyms` are other spellings that are understood."""

    words: tuple[str, ...] = ()
    synonyms: tuple[tuple[str, str], ...] = ()

    def accepts(self) -> str:
        also = "".join(f", {other} (= {word})" for other, word in self.synonyms)
        return f"one of {', '.join(self.words)}{also}"

    def parse(self, raw: object) -> str:
        if isinstance(raw, bool) and "on" in self.words:
            return "on" if raw else "off"
        if not isinstance(raw, str):
            raise _RejectedError
        word = raw.strip().lower()
        word = dict(self.synonyms).get(word, word)
        if word in self.words:
            return word
        near = _closest(word, self.words)
        raise _RejectedError(f"did you mean {near}?" if near else "")


class Text(Kind, frozen=True):
    """A string. `pattern` is what the whole of it must look like when it is not empty, `what` says so in words."""

    what: str = "text"
    pattern: str = ".*"

    def accepts(self) -> str:
        return self.what

    def parse(self, raw: object) -> str:
        if not isinstance(raw, str):
            raise _RejectedError
        text = raw.strip()
        if text and not re.fullmatch(self.pattern, text, re.DOTALL):
            raise _RejectedError
        return text


class Host(Kind, frozen=True):
    """A name or an address that workers can connect to, so neither a URL nor a wildcard."""

    def accepts(self) -> str:
        return "a host name or IP address without scheme or port"

    def parse(self, raw: object) -> str:
        host = raw.strip().removeprefix("[").removesuffix("]") if isinstance(raw, str) else ""
        # The second form is IPv6: at least two colons, which a "host:port" has not.
        if not re.fullmatch(r"[A-Za-z0-9._-]+|[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9]+)?", host):
            raise _RejectedError
        return host


class FilePath(Kind, frozen=True):
    """A path; `~` is the home directory. Whether it exists is for whoever opens it to find out."""

    def accepts(self) -> str:
        return "a path"

    def parse(self, raw: object) -> Path:
        if isinstance(raw, Path):
            return raw.expanduser()
        if not isinstance(raw, str) or not raw.strip() or "\0" in raw:
            raise _RejectedError
        return Path(raw.strip()).expanduser()


class Backends(Kind, frozen=True):
    """Switches by name: a variable for each in the environment, a table of them in TOML and JSON."""

    def accepts(self) -> str:
        return "a table of switches by backend name"

    def parse(self, raw: object) -> Mapping[str, object]:
        if not isinstance(raw, Mapping):
            raise _RejectedError
        return raw  # `_Reading` takes them one by one, because places add to each other here


class Setting(msgspec.Struct, frozen=True):
    """A row of the table. `key` is the name in TOML, in JSON and in `Config`; `env` the name in the environment."""

    key: str
    env: str
    kind: Kind
    default: Any
    group: str
    doc: str
    used: bool = False  # False: parsed and validated, but nothing acts on it yet
    secret: bool = False  # never shown
    old_names: tuple[str, ...] = ()  # still understood, with a warning
    retired: str = ""  # not empty: accepted and ignored, and this is what the user is told; no field in `Config`

    def show(self, value: object) -> str:
        """`value` as text for people, with what is secret left out."""
        if self.secret and value:
            return "(hidden)"
        if isinstance(value, bool):
            return "on" if value else "off"
        if isinstance(value, Mapping):
            return ", ".join(f"{name} {'on' if on else 'off'}" for name, on in sorted(value.items())) or "(none)"
        if isinstance(value, float) and value.is_integer():
            return str(int(value))
        return "(not set)" if value is None or value == "" else str(value)


# ---------------------------------------------------------------------------------------------------------------------
# The table

GROUPS = (
    GENERAL := "General",
    TIERS := "Cache tiers",
    MOVING := "Offloading and onboarding",
    LEADER := "Leader and workers",
    HOST := "Host memory",
    DISK := "Disk tier",
    OBJECTS := "Object storage",
    METRICS := "Metrics and records",
    EVENTS := "Events and Dynamo",
    BACKENDS := "NIXL and NCCL",
)

_SWITCH = Switch()
_TEXT = Text()
_BACKEND_SWITCH = Switch(blank_is_off=False)
_ON_OFF = (("1", "on"), ("true", "on"), ("yes", "on"), ("0", "off"), ("false", "off"), ("no", "off"))
# Slot numbers fit in 31 bits, and a wait of more than some weeks overflows the clocks underneath.
_GIGABYTES = Number(unit="gigabytes (1 GB = 1e9 bytes)", whole=False, example="20 or 0.5")
_BLOCKS = Number(unit="blocks", high=2**31 - 1, example="10000")
_SECONDS = Number(unit="seconds", low=1, high=1_000_000, example="60")


def _port(example: int) -> Number:
    return Number(low=1, high=65535, example=str(example))


# One row a setting: names, kind, default, group, and a sentence for its documentation.
# fmt: off
SETTINGS: tuple[Setting, ...] = (
    Setting("config_path", "KVBM_CONFIG_PATH", FilePath(example="/etc/kvbm.toml"), None, GENERAL,
            "TOML file with settings, read after the system-wide one.", used=True),
    Setting("inject_faults", "KVBM_INJECT_FAULTS", _TEXT, "", GENERAL,
            "Faults to provoke on purpose; for tests only, never in production.", used=True),
    Setting("enable_kvbm", "DYN_KVBM_ENABLE", _TEXT, None, GENERAL,
            "Never did anything.", retired="KVBM is enabled by naming its connector in the engine's configuration"),

    Setting("cpu_cache_gb", "DYN_KVBM_CPU_CACHE_GB", _GIGABYTES, 0.0, TIERS,
            "Size of the host tier, all ranks of the engine together; 0 means no host tier.", used=True),
    Setting("cpu_cache_override_num_blocks", "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS", _BLOCKS, 0, TIERS,
            "Size of the host tier in blocks; wins over the size in GB when it is not 0.", used=True),
    Setting("disk_cache_gb", "DYN_KVBM_DISK_CACHE_GB", _GIGABYTES, 0.0, TIERS,
            "Size of the disk tier, all ranks of the engine together; 0 means no disk tier.", used=True),
    Setting("disk_cache_override_num_blocks", "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS", _BLOCKS, 0, TIERS,
            "Size of the disk tier in blocks; wins over the size in GB when it is not 0.", used=True),

    Setting("onboard", "KVBM_ONBOARD",
            Choice(words=("auto", "sync", "async"), synonyms=(("intra", "sync"), ("inter", "async"))), "auto", MOVING,
            "How blocks are brought back: inside the step (sync), while other requests decode (async), or whichever "
            "suits the request (auto).", used=True),
    Setting("load", "KVBM_LOAD", Choice(words=("auto", "always", "never")), "auto", MOVING,
            "Whether blocks that are found are brought back: when that is expected to be faster than computing them "
            "(auto), whatever it takes (always), or not at all (never).", used=True),
    Setting("offload_decode", "KVBM_OFFLOAD_DECODE", _SWITCH, True, MOVING,
            "Keep the blocks that decoding fills, and not only those of the prompt.", used=True),
    Setting("max_pending_offloads", "KVBM_MAX_PENDING_OFFLOADS",
            Number(unit="blocks", low=1, example="4096"), 4096, MOVING,
            "Blocks that may wait to be offloaded; beyond it new ones are skipped rather than queued.", used=True),
    Setting("staging_mb", "KVBM_STAGING_MB",
            Number(unit="MiB", high=65536, example="512"), 2048, MOVING,
            "GPU memory for bringing blocks near while the engine is still making room for them; no more than a quarter"
            " of what the engine leaves free, and 0 does without.", used=True),
    Setting("stores", "KVBM_STORES", Choice(words=("auto", "kernel", "engine")), "auto", MOVING,
            "How blocks are copied out of a GPU: by a kernel, by the copy engine, or as a measurement at start finds "
            "best.", used=True),
    Setting("fast_prompts", "KVBM_FAST_PROMPTS", _SWITCH, True, MOVING,
            "vLLM: go through a long prompt's blocks and tokens in shorter loops than its own, with the same results: "
            "hashing, taking and naming blocks, bringing tokens to the GPU.", used=True),
    Setting("host_offload_prefix_min_priority", "DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY",
            Number(high=100, example="35"), 0, MOVING,
            "Retention priority a block needs to be offloaded; the first block of a request below it ends offloading "
            "for that request. Only TensorRT-LLM gives priorities, 35 unless a request says otherwise; no other "
            "engine's blocks are held back.", used=True),
    Setting("max_concurrent_transfers", "DYN_KVBM_MAX_CONCURRENT_TRANSFERS",
            Number(unit="batches", low=1, example="4"), 4, MOVING,
            "Batches of blocks on their way at a time where one rank loads for all (DYN_KVBM_NCCL_MLA_MODE); every "
            "other copy keeps its bus full without a limit.", used=True),
    Setting("max_transfer_batch_size", "DYN_KVBM_MAX_TRANSFER_BATCH_SIZE",
            Number(unit="blocks", low=1, example="16"), 16, MOVING,
            "Blocks in one such batch.", used=True),
    Setting("transfer_batch_size", "DYN_KVBM_TRANSFER_BATCH_SIZE", _TEXT, None, MOVING,
            "Never did anything.", retired="the size of a batch is DYN_KVBM_MAX_TRANSFER_BATCH_SIZE"),

    Setting("leader_zmq_host", "DYN_KVBM_LEADER_ZMQ_HOST", Host(example="127.0.0.1"), "127.0.0.1", LEADER,
            "Where the leader listens and the workers connect. On the loopback interface they meet through files in "
            "`$TMPDIR/kvbm-<uid>` (else `/tmp`), named after the ports, that no other user can reach; any other "
            "address opens the ports, unauthenticated, to its network.", used=True),
    Setting("leader_zmq_pub_port", "DYN_KVBM_LEADER_ZMQ_PUB_PORT", _port(56001), 56001, LEADER,
            "Port on which the leader talks to its workers; every engine on a host needs its own.", used=True),
    Setting("leader_zmq_ack_port", "DYN_KVBM_LEADER_ZMQ_ACK_PORT", _port(56002), 56002, LEADER,
            "Port on which the leader hears from its workers; every engine on a host needs its own.", used=True),
    Setting("leader_worker_init_timeout_secs", "DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS", _SECONDS, 1800, LEADER,
            "How long the leader waits at start until every worker has its memory.", used=True),

    Setting("disable_write_combined", "DYN_KVBM_DISABLE_WRITE_COMBINED", _SWITCH, False, HOST,
            "Never use write-combined host memory. It is not used either way: the GPU gains nothing from it, and the "
            "CPU reads it at a crawl.", used=True),
    Setting("disable_numa", "DYN_MEMORY_DISABLE_NUMA", _SWITCH, False, HOST,
            "Take host memory from anywhere instead of from the NUMA node next to the GPU.", used=True),
    Setting("host_persist", "KVBM_HOST_PERSIST", _SWITCH, False, HOST,
            "Keep the host tier in shared memory, where the next engine finds it again. The memory stays taken when "
            "the engine ends, until `kvbm cache clear` gives it back.", used=True),
    Setting("host_persist_dir", "KVBM_HOST_PERSIST_DIR", FilePath(example="/dev/shm"), Path("/dev/shm"), HOST,
            "Where it is kept: a filesystem in memory, with room for the host tier.", used=True),
    Setting("enable_numa", "DYN_KVBM_ENABLE_NUMA", _TEXT, None, HOST,
            "Asked for host memory near the GPU.",
            retired="it is deprecated, as memory near the GPU needs no switch; DYN_MEMORY_DISABLE_NUMA=1 forgoes it"),

    Setting("disk_cache_dir", "DYN_KVBM_DISK_CACHE_DIR", FilePath(example="/mnt/nvme/kvbm"), Path("/tmp"), DISK,
            "Directory of the disk tier; it is created when missing.", used=True),
    Setting("disk_allocator_type", "DYN_KVBM_DISK_ALLOCATOR_TYPE",
            Choice(words=("default", "open-direct")), "default", DISK,
            "When O_DIRECT is asked for: after opening the file (default), or at open, which some parallel "
            "filesystems need (open-direct).", used=True),
    Setting("disk_disable_o_direct", "DYN_KVBM_DISK_DISABLE_O_DIRECT", Switch(presence=True), False, DISK,
            "Go through the page cache, for filesystems without O_DIRECT; any word but those for off turns it on.",
            used=True),
    Setting("disk_zerofill_fallback", "DYN_KVBM_DISK_ZEROFILL_FALLBACK", Switch(presence=True), False, DISK,
            "Where a file cannot be preallocated, write zeros instead of leaving it sparse; any word but those for "
            "off turns it on.", used=True),
    Setting("disable_disk_offload_filter", "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER", _SWITCH, False, DISK,
            "Spill every block from host to disk, and not only those that were used often enough.", used=True),
    Setting("disk_filter_threshold", "KVBM_DISK_FILTER_THRESHOLD",
            Number(low=1, high=256, example="2"), 2, DISK,
            "Frequency a block needs to be spilled to disk; it starts at 1 and doubles whenever the block is found.",
            used=True),
    Setting("disk_filter_decay_secs", "KVBM_DISK_FILTER_DECAY_SECS", _SECONDS, 600, DISK,
            "Every block's frequency goes down by 1 this often.", used=True),
    Setting("disk_filter_max_entries", "KVBM_DISK_FILTER_MAX_ENTRIES",
            Number(unit="blocks", low=1, high=100_000_000, example="1000000"), 1_000_000, DISK,
            "Blocks whose frequency is known; when there are more, all go down by 1 early. A million take up to "
            "180 MB.", used=True),
    Setting("disk_threads", "KVBM_DISK_THREADS", Number(unit="threads", low=1, high=64, example="8"), 8, DISK,
            "Threads of a rank that read from disk, and as many again that write.", used=True),
    Setting("max_pending_spills", "KVBM_MAX_PENDING_SPILLS",
            Number(unit="blocks", low=1, example="1024"), 1024, DISK,
            "Blocks that may wait to be written to disk; beyond it they are skipped rather than queued.", used=True),
    Setting("disk_bounce_mb", "KVBM_DISK_BOUNCE_MB", Number(unit="MiB", low=1, high=65536, example="256"), 256, DISK,
            "Host memory of a rank through which blocks pass on their way to and from disk when there is no host "
            "tier.", used=True),
    Setting("disk_load_timeout_secs", "KVBM_DISK_LOAD_TIMEOUT_SECS",
            Number(unit="seconds", low=0, high=3600, whole=False, above=True, example="3"), 3.0, DISK,
            "A load from disk is given up when nothing came for so long, and what is missing is computed.", used=True),

    Setting("object_enabled", "DYN_KVBM_OBJECT_ENABLED", _SWITCH, False, OBJECTS,
            "Keep blocks in an object store."),
    Setting("object_bucket", "DYN_KVBM_OBJECT_BUCKET",
            Text(what="a bucket name without blanks or slashes", pattern=r"[^\s/]+", example="kvbm-{worker_id}"),
            "", OBJECTS,
            "Bucket; `{worker_id}` in it stands for the worker."),
    Setting("object_endpoint", "DYN_KVBM_OBJECT_ENDPOINT",
            Text(what="a URL of http or https", pattern=r"https?://[^\s/]+(/\S*)?", example="http://127.0.0.1:9000"),
            "", OBJECTS,
            "Address of the object store."),
    Setting("object_region", "DYN_KVBM_OBJECT_REGION",
            Text(what="a region name", pattern=r"[A-Za-z0-9_-]+", example="us-east-1"), "", OBJECTS,
            "Region of the bucket."),
    Setting("object_access_key", "DYN_KVBM_OBJECT_ACCESS_KEY", _TEXT, "", OBJECTS,
            "Access key; never shown.", secret=True),
    Setting("object_secret_key", "DYN_KVBM_OBJECT_SECRET_KEY", _TEXT, "", OBJECTS,
            "Secret key; never shown.", secret=True),
    Setting("object_num_blocks", "DYN_KVBM_OBJECT_NUM_BLOCKS", _BLOCKS, 0, OBJECTS,
            "Blocks the object store may hold; 0 means no limit."),

    Setting("metrics", "DYN_KVBM_METRICS", _SWITCH, False, METRICS,
            "Serve Prometheus metrics and a web page over HTTP from the leader.", used=True),
    Setting("metrics_port", "DYN_KVBM_METRICS_PORT", _port(6880), 6880, METRICS,
            "Port of the metrics; every engine on a host needs its own. With data parallelism, rank n takes this + n.",
            used=True),
    Setting("metrics_host", "KVBM_METRICS_HOST", Host(example="0.0.0.0"), "127.0.0.1", METRICS,
            "Address that metrics are served on: this machine only by default. 0.0.0.0 or :: opens them to the "
            "network, and there is no password.", used=True),
    Setting("cache_stats_max_requests", "DYN_KVBM_CACHE_STATS_MAX_REQUESTS",
            Number(unit="requests", low=1, example="1000"), 1000, METRICS,
            "Hit rates are over this many of the latest requests.", used=True),
    Setting("cache_stats_log_interval_secs", "DYN_KVBM_CACHE_STATS_LOG_INTERVAL_SECS", _SECONDS, 5, METRICS,
            "Hit rates are logged this often, when they have changed.", used=True),
    Setting("enable_record", "DYN_KVBM_ENABLE_RECORD", _SWITCH, False, METRICS,
            "Record what the leader decides, as JSON lines.", used=True, old_names=("ENABLE_KVBM_RECORD",)),
    Setting("record_dir", "KVBM_RECORD_DIR", FilePath(example="/var/log/kvbm"), Path("kvbm-records"), METRICS,
            "Directory of the records, created when missing; relative to where the engine was started. Every engine "
            "writes a file of its own.", used=True),
    Setting("record_max_mb", "KVBM_RECORD_MAX_MB", Number(unit="MiB", low=1, high=1_000_000, example="1024"), 1024,
            METRICS, "A record ends when it is this large.", used=True),
    Setting("nvtx", "KVBM_NVTX",
            Choice(words=("auto", "on", "off"), synonyms=(("1", "on"), ("0", "off"))), "auto", METRICS,
            "Ranges on a profiler's timeline: when a profiler has started the engine (auto), always (on) or never "
            "(off).", used=True),

    Setting("kv_events_enable_consolidator", "DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR",
            Choice(words=("auto", "on", "off"), synonyms=_ON_OFF), "auto", EVENTS,
            "Merge the engine's block events with those of the tiers below it, in a process of its own, and publish "
            f"them on the leader's pub port + {CONSOLIDATOR_PORT_OFFSET} (with data parallelism, rank n takes that + "
            "n). auto: only for an engine that cannot publish them itself, so not with vLLM.", used=True),
    Setting("kv_events_consolidator_mode", "DYN_KVBM_KV_EVENTS_CONSOLIDATOR_MODE",
            Choice(words=("dedup", "passthrough")), "dedup", EVENTS,
            "What the consolidator publishes: a block once while any tier holds it, as if it were on the GPU (dedup), "
            "or every event with its tier (passthrough).", used=True),
    Setting("trtllm_zmq_port", "DYN_KVBM_TRTLLM_ZMQ_PORT", _port(20081), None, EVENTS,
            "Port on which TensorRT-LLM's own block events are published; a consolidator then merges ours with them.",
            used=True),
    Setting("control", "KVBM_CONTROL", _SWITCH, True, EVENTS,
            "Take orders from `kvbm control` (look at the tiers, empty them), of the same user on the same machine.",
            used=True),
    Setting("runtime_enabled", "DYN_RUNTIME_ENABLED_KVBM", _SWITCH, False, EVENTS,
            "Register leader and workers where Dynamo's parts find each other, and take orders through Dynamo; without "
            "it neither etcd nor NATS is needed.", used=True),
    Setting("control_dynamo", "KVBM_CONTROL_DYNAMO", _SWITCH, True, EVENTS,
            "Take these orders through Dynamo, of anybody who reaches its request plane, which checks nobody. Off: "
            "`kvbm control` alone gives orders.", used=True),
    # Dynamo's own variables, which it checks itself: whatever is in them, no engine ends for it.
    Setting("discovery_backend", "DYN_DISCOVERY_BACKEND", _TEXT, "etcd", EVENTS,
            "Where that is, as Dynamo reads it: etcd, or file for files on this machine. With anything else KVBM is "
            "not registered.", used=True),
    Setting("etcd_endpoints", "ETCD_ENDPOINTS", _TEXT, "http://localhost:2379", EVENTS,
            "Addresses of etcd, separated by commas, as Dynamo reads them.", used=True),
    Setting("discovery_dir", "DYN_FILE_KV", _TEXT, "", EVENTS,
            "Directory of the files, as Dynamo reads it; by default dynamo_store_kv among the temporary files.",
            used=True),
    Setting("dynamo_namespace", "DYN_NAMESPACE", _TEXT, "dynamo", EVENTS,
            "Namespace of the deployment, as Dynamo reads it.", used=True),
    Setting("dyn_connector", "DYN_CONNECTOR", _TEXT, "", EVENTS,
            "Connector that Dynamo's own launcher is asked for."),

    Setting("nixl_backends", BACKEND_PREFIX + "<NAME>", Backends(example="{UCX = true}"), {}, BACKENDS,
            "Switches a NIXL backend on or off, one variable for each; an empty value is an error."),
    Setting("nccl_mla_mode", "DYN_KVBM_NCCL_MLA_MODE", _SWITCH, False, BACKENDS,
            "Where every rank has the same KV (MLA), let the first one alone have a host tier and broadcast what it "
            "loads; without it the ranks of one machine share one host tier.", used=True),
    Setting("nccl_max_ctas", "DYN_KVBM_NCCL_MAX_CTAS",
            Number(unit="CTAs", low=1, high=2**31 - 1, example="8"), 8, BACKENDS,
            "Most CTAs (multiprocessors) that NCCL may take for a broadcast.", used=True),
)
# fmt: on

_ENV_NAMES = {name: setting for setting in SETTINGS for name in (setting.env, *setting.old_names)}
_ALL_NAMES = {setting.key: setting for setting in SETTINGS} | _ENV_NAMES
_BY_KEY = {setting.key: setting for setting in SETTINGS}


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The settings in force, one field for a row of `SETTINGS` that is not retired. Made by `load`."""

    config_path: Path | None
    inject_faults: str

    cpu_cache_gb: float
    cpu_cache_override_num_blocks: int
    disk_cache_gb: float
    disk_cache_override_num_blocks: int

    onboard: Literal["auto", "sync", "async"]
    load: Literal["auto", "always", "never"]
    offload_decode: bool
    max_pending_offloads: int
    staging_mb: int
    stores: Literal["auto", "kernel", "engine"]
    fast_prompts: bool
    host_offload_prefix_min_priority: int
    max_concurrent_transfers: int
    max_transfer_batch_size: int

    leader_zmq_host: str
    leader_zmq_pub_port: int
    leader_zmq_ack_port: int
    leader_worker_init_timeout_secs: int

    disable_write_combined: bool
    disable_numa: bool
    host_persist: bool
    host_persist_dir: Path

    disk_cache_dir: Path
    disk_allocator_type: Literal["default", "open-direct"]
    disk_disable_o_direct: bool
    disk_zerofill_fallback: bool
    disable_disk_offload_filter: bool
    disk_filter_threshold: int
    disk_filter_decay_secs: int
    disk_filter_max_entries: int
    disk_threads: int
    max_pending_spills: int
    disk_bounce_mb: int
    disk_load_timeout_secs: float

    object_enabled: bool
    object_bucket: str
    object_endpoint: str
    object_region: str
    object_access_key: str
    object_secret_key: str
    object_num_blocks: int

    metrics: bool
    metrics_port: int
    metrics_host: str
    cache_stats_max_requests: int
    cache_stats_log_interval_secs: int
    enable_record: bool
    record_dir: Path
    record_max_mb: int
    nvtx: Literal["auto", "on", "off"]

    kv_events_enable_consolidator: Literal["auto", "on", "off"]
    kv_events_consolidator_mode: Literal["dedup", "passthrough"]
    trtllm_zmq_port: int | None
    control: bool
    runtime_enabled: bool
    control_dynamo: bool
    discovery_backend: str
    etcd_endpoints: str
    discovery_dir: str
    dynamo_namespace: str
    dyn_connector: str

    nixl_backends: dict[str, bool]
    nccl_mla_mode: bool
    nccl_max_ctas: int

    # About the settings rather than of them.
    sources: dict[str, str]  # key -> "default", the path of a file, "environment" or "kv_connector_extra_config"
    warnings: tuple[str, ...]  # a sentence each, for the leader to log
    unused: tuple[str, ...]  # set by the user, as they wrote it, but nothing acts on it yet

    @property
    def has_host_tier(self) -> bool:
        return self.cpu_cache_gb > 0 or self.cpu_cache_override_num_blocks > 0

    @property
    def has_disk_tier(self) -> bool:
        return self.disk_cache_gb > 0 or self.disk_cache_override_num_blocks > 0

    @property
    def outlives_engine(self) -> bool:
        """Whether blocks of this engine may be found by the next one."""
        return self.has_disk_tier or (self.host_persist and self.has_host_tier)

    @property
    def leader_pub_url(self) -> str:
        return _leader_url(self.leader_zmq_host, self.leader_zmq_pub_port)

    @property
    def leader_ack_url(self) -> str:
        return _leader_url(self.leader_zmq_host, self.leader_zmq_ack_port)

    @property
    def consolidator_port(self) -> int:
        return self.leader_zmq_pub_port + CONSOLIDATOR_PORT_OFFSET

    def __repr__(self) -> str:
        # Only what was set, so that it fits a log line; through `show`, so that no secret gets into one.
        given = (_BY_KEY[key] for key, source in self.sources.items() if source != DEFAULT)
        return f"Config({', '.join(f'{s.key}={s.show(getattr(self, s.key))}' for s in given)})"


def _url(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _leader_url(host: str, port: int) -> str:
    """On one machine a socket that only this user can reach, instead of a port that everybody can."""
    if not _is_loopback(host):
        return _url(host, port)
    return f"ipc://{os.environ.get('TMPDIR') or '/tmp'}/kvbm-{os.geteuid()}/leader-{port}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# ---------------------------------------------------------------------------------------------------------------------
# Loading


def load(
    extra: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    files: Sequence[Path] | None = None,
) -> Config:
    """The settings in force, or `ConfigError`.

    `extra` is the engine's kv_connector_extra_config; keys of others in it are left alone. `environ` stands for the
    environment of the process. `files` stands for the system-wide file, which may be missing while these may not; the
    file at KVBM_CONFIG_PATH is read after them. `load({...}, environ={}, files=())` depends on nothing outside.
    """
    extra = {} if extra is None else extra
    environ = os.environ if environ is None else environ
    if files is None:
        files = [SYSTEM_FILE] if os.path.exists(SYSTEM_FILE) else []
    reading = _Reading()
    for path in files:
        reading.add_file(path)
    reading.add_named_file(extra, environ)
    reading.add(environ, ENVIRONMENT)
    reading.add(extra, EXTRA_CONFIG)
    return reading.finish()


def require_tier(config: Config) -> None:
    """Raise `ConfigError` when there is no tier to keep anything in. The leader calls it at start."""
    if not config.has_host_tier and not config.has_disk_tier:
        raise ConfigError(
            "At least one cache tier must be configured, and both have size 0: set DYN_KVBM_CPU_CACHE_GB or "
            "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS for host memory, DYN_KVBM_DISK_CACHE_GB or "
            "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS for disk, for example DYN_KVBM_CPU_CACHE_GB=20"
        )


def slots_for(gb: float, override: int, bytes_per_block_all_ranks: int) -> int:
    """Slots of a tier of `gb` (1e9 bytes each), or `override` when it is not 0.

    A slot has the same number on every rank, so a block costs what all ranks together keep of it.
    """
    if override > 0:
        return override
    if bytes_per_block_all_ranks <= 0:
        raise ValueError(f"a block has at least one byte, not {bytes_per_block_all_ranks}")
    return int(gb * 1e9 / bytes_per_block_all_ranks)


class _Given(msgspec.Struct, frozen=True):
    """A value as the user wrote it: under which name, and where."""

    name: str
    raw: object
    source: str


class _Reading:
    """The places of settings, added from the lowest to the highest; each replaces what those before it gave.

    A value that a higher place replaces is not looked at, so a wrong one in a file can be put right from above.
    """

    def __init__(self) -> None:
        self.given: dict[str, _Given] = {}  # by key
        self.backends: dict[str, _Given] = {}  # by name of the NIXL backend
        self.warnings: list[str] = []
        self.problems: list[str] = []

    def add_named_file(self, extra: Mapping[str, object], environ: Mapping[str, str]) -> None:
        """The file at KVBM_CONFIG_PATH: named by a higher place but ranking below, so its name is looked up ahead."""
        candidates = [(extra, EXTRA_CONFIG, name) for name in ("config_path", "KVBM_CONFIG_PATH")]
        for values, source, name in [*candidates, (environ, ENVIRONMENT, "KVBM_CONFIG_PATH")]:
            if raw := values.get(name):
                try:
                    path = FilePath().parse(raw)
                except _RejectedError:
                    return  # `finish` says so, as of any other value
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
        # A lower-case name is a key in a file or in JSON, but some other program's variable in the environment.
        names = _ENV_NAMES if source == ENVIRONMENT else _ALL_NAMES
        here: dict[str, _Given] = {}
        for name, raw in values.items():
            given = _Given(name, raw, source)
            if raw is None:  # JSON's way to leave something out
                continue
            if name.startswith(BACKEND_PREFIX):
                self._add_backend(name.removeprefix(BACKEND_PREFIX), given)
            elif (setting := names.get(name)) is None:
                self._warn_if_meant_for_us(name, source)
            elif setting.retired:
                self.warnings.append(f"{name} ({source}) has no effect: {setting.retired}; remove it")
            elif setting.key == "config_path" and source not in (ENVIRONMENT, EXTRA_CONFIG):
                self.warnings.append(f"{name} ({source}) is ignored: a file does not name another")
            elif isinstance(setting.kind, Backends):
                for backend, switch in (self._parse(setting, given) or {}).items():
                    self._add_backend(backend, _Given(f"{name}.{backend}", switch, source))
            elif not _is_empty_variable(setting, given):
                here[setting.key] = self._one_of_two_names(setting, here.get(setting.key), given)
        self.given |= here

    def _add_backend(self, backend: str, given: _Given) -> None:
        if "_" in backend:
            self.problems.append(
                f"{_label(given)}: custom params not supported; the name after {BACKEND_PREFIX} "
                "is that of a backend and has no underscore, for example UCX"
            )
        elif not re.fullmatch(r"[A-Za-z0-9]+", backend):
            self.problems.append(f"{_label(given)}: expected the name of a backend, for example {BACKEND_PREFIX}UCX=1")
        else:
            self.backends[backend.upper()] = given

    def _one_of_two_names(self, setting: Setting, other: _Given | None, given: _Given) -> _Given:
        """Which counts when one place has a setting under two names: the current one before an old one."""
        is_old = given.name in setting.old_names
        if is_old:
            self.warnings.append(f"{given.name} ({given.source}) is the old name of {setting.env}; rename it")
        if other is None:
            return given
        kept, dropped = (other, given) if is_old else (given, other)
        self.warnings.append(f"{dropped.name} ({given.source}) is ignored: {kept.name} sets the same thing there")
        return kept

    def _warn_if_meant_for_us(self, name: str, source: str) -> None:
        """The environment and the engine's JSON hold the names of others as well; a file holds only ours."""
        prefixed = name.lower().startswith(("dyn_kvbm", "kvbm"))
        if source == ENVIRONMENT:
            ours = name.startswith("DYN_KVBM_")
            may_be_ours = name.startswith("KVBM_")  # programs around us use this prefix too
        else:
            ours = source != EXTRA_CONFIG or prefixed
            may_be_ours = True
        # Without the prefix, or everything that has it would look alike.
        stem = name.lower().removeprefix("dyn_").removeprefix("kvbm_")
        keys = [row.key for row in SETTINGS if not row.retired]
        if ours or (may_be_ours and _closest(stem, keys, cutoff=0.85)):
            hint = "`kvbm config --all` lists the settings"
            if near := _closest(stem, keys):
                hint = f"did you mean {_BY_KEY[near].env if prefixed else near}?"
            self.warnings.append(f"{name} ({source}) is not a setting and is ignored; {hint}")

    def finish(self) -> Config:
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        for setting in SETTINGS:
            if not setting.retired:
                given = self.given.get(setting.key)
                values[setting.key] = setting.default if given is None else self._parse(setting, given)
                sources[setting.key] = DEFAULT if given is None else given.source
        row = msgspec.structs.replace(_BY_KEY["nixl_backends"], kind=_BACKEND_SWITCH)
        values[row.key] = {name: self._parse(row, given) for name, given in sorted(self.backends.items())}
        sources[row.key] = ", ".join(sorted({given.source for given in self.backends.values()})) or DEFAULT
        if not self.problems:
            self._check_ports(values)
            self._check_directories(values)
        if self.problems:
            raise ConfigError(*self.problems)
        unused = [given.name for key, given in self.given.items() if not _BY_KEY[key].used]
        unused += [given.name for given in self.backends.values()]
        return Config(**values, sources=sources, warnings=tuple(self.warnings), unused=tuple(sorted(unused)))

    def _parse(self, setting: Setting, given: _Given) -> Any:
        try:
            return setting.kind.parse(given.raw)
        except _RejectedError as rejected:
            example = f", for example {setting.kind.example}" if setting.kind.example else ""
            hint = f"; {rejected}" if str(rejected) else ""
            label = _label(given, setting.secret)
            self.problems.append(f"{label}: expected {setting.kind.accepts()}{example}{hint}")
            return None

    def _label(self, key: str, values: Mapping[str, Any]) -> str:
        return _label(self.given.get(key, _Given(_BY_KEY[key].env, values[key], DEFAULT)))

    def _check_directories(self, values: Mapping[str, Any]) -> None:
        """One model has one directory in either place: in the same place, its two tiers would want the same files."""
        host, disk = "host_persist_dir", "disk_cache_dir"
        if not values["host_persist"] or not (values["disk_cache_gb"] or values["disk_cache_override_num_blocks"]):
            return
        if os.path.realpath(values[host]) == os.path.realpath(values[disk]):
            self.problems.append(
                f"{self._label(host, values)} and {self._label(disk, values)}: the host tier and the disk tier cannot "
                "be kept in the same directory; leave KVBM_HOST_PERSIST_DIR at /dev/shm, or choose another filesystem "
                "in memory, and a directory on disk for DYN_KVBM_DISK_CACHE_DIR"
            )

    def _check_ports(self, values: Mapping[str, Any]) -> None:
        def label(key: str) -> str:
            return self._label(key, values)

        pub, ack = "leader_zmq_pub_port", "leader_zmq_ack_port"
        if values[pub] == values[ack]:
            url = _url(values["leader_zmq_host"], values[pub])
            self.problems.append(
                f"{label(pub)} and {label(ack)}: both are {url}, but the leader needs two; "
                "choose two different ports, for example 56001 and 56002"
            )
        consolidator = values[pub] + CONSOLIDATOR_PORT_OFFSET
        if values["kv_events_enable_consolidator"] != "off":
            if consolidator > 65535:
                self.problems.append(
                    f"{label(pub)}: events are published on this port + {CONSOLIDATOR_PORT_OFFSET}, and "
                    f"{consolidator} is above 65535; choose a port up to {65535 - CONSOLIDATOR_PORT_OFFSET}, or set "
                    "DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR=0"
                )
            if consolidator == values[ack]:
                self.warnings.append(
                    f"{label(ack)} is also where events are published ({label(pub)} + {CONSOLIDATOR_PORT_OFFSET}); "
                    "choose another port for one of them"
                )
        for key in (pub, ack, "metrics_port"):
            if values[key] < 1024:
                self.warnings.append(f"{label(key)}: ports below 1024 usually need root; 1024 and above do not")


def _is_empty_variable(setting: Setting, given: _Given) -> bool:
    """Compose files and charts cannot leave a variable out, only empty. For a switch, empty is a value: off."""
    return given.source == ENVIRONMENT and not isinstance(setting.kind, Switch) and not str(given.raw).strip()


def _label(given: _Given, secret: bool = False) -> str:
    return f"{given.name}={'(hidden)' if secret else repr(given.raw)} ({given.source})"


def _closest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """The one of `names` most like `name`, or nothing."""
    import difflib  # only needed when something is wrong

    return next(iter(difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)), "")
