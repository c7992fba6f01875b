"""The settings: one field of `Config` declares one setting, with its type, its default and everything users read.

To add a setting, add a field to `Config`. The loader, `kvbm config`, its TOML template and docs/configuration.md (made
by `make docs`) take the setting from there.
"""

import ipaddress
import os
from pathlib import Path
from typing import Annotated, Literal

from msgspec.structs import replace

from kvbm.config.fleet import FleetSettings
from kvbm.config.kinds import Backends, Choice, FilePath, Host, Number, Shares, Switch, Text
from kvbm.config.setting import (
    BACKENDS,
    CONTROL,
    DISK,
    EVENTS,
    GENERAL,
    GROUPS,
    HOST,
    LEADER,
    METRICS,
    MOVING,
    Setting,
    settings_of,
)

SYSTEM_FILE = Path("/opt/dynamo/etc/kvbm.toml")
BACKEND_PREFIX = "DYN_KVBM_NIXL_BACKEND_"
CONSOLIDATOR_PORT_OFFSET = 1000
DEFAULT = "default"  # the source of a setting that no file, variable or JSON sets

_SWITCH = Switch()
_PRESENCE = Switch(presence=True)
_TEXT = Text()
_POLICY = Choice(words=("auto", "lru", "session", "arc", "s3fifo"))
_ON_OFF = (("1", "on"), ("true", "on"), ("yes", "on"), ("0", "off"), ("false", "off"), ("no", "off"))
_GIGABYTES = Number(unit="gigabytes (1 GB = 1e9 bytes)", whole=False, example="20 or 0.5")
_BLOCKS = Number(unit="blocks", high=2**31 - 1, example="10000")  # slot numbers fit in 31 bits
_SECONDS = Number(unit="seconds", low=1, high=1_000_000, example="60")  # longer waits overflow the system's clocks


def _port(example: int) -> Number:
    return Number(low=1, high=65535, example=str(example))


class Config(FleetSettings, frozen=True, kw_only=True):
    """The settings in force, made by `load`. Each field is a setting, except the three at the end."""

    # fmt: off
    # ---- General ----
    config_path: Annotated[Path | None, Setting(
        "KVBM_CONFIG_PATH", GENERAL, FilePath(example="/etc/kvbm.toml"),
        "Path of a TOML file with settings. Its values override those of the system-wide file.",
    )] = None
    inject_faults: Annotated[str, Setting(
        "KVBM_INJECT_FAULTS", GENERAL, _TEXT,
        "Faults that KVBM injects into its own transfers and disk I/O. For tests only, never for production.",
    )] = ""

    # ---- Host tier ----
    cpu_cache_gb: Annotated[float, Setting(
        "DYN_KVBM_CPU_CACHE_GB", HOST, _GIGABYTES,
        "Size of the host tier (CPU memory) in GB, summed over all ranks of the engine. 0 turns the host tier off.",
    )] = 0.0
    cpu_cache_override_num_blocks: Annotated[int, Setting(
        "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS", HOST, _BLOCKS,
        "Size of the host tier in blocks. When it is not 0, it overrides DYN_KVBM_CPU_CACHE_GB.",
    )] = 0
    host_persist: Annotated[bool, Setting(
        "KVBM_HOST_PERSIST", HOST, _SWITCH,
        "Keep the host tier in shared memory, so that it survives a restart of the engine. The memory stays allocated "
        "after the engine ends, until `kvbm cache clear` frees it.",
    )] = False
    host_persist_dir: Annotated[Path, Setting(
        "KVBM_HOST_PERSIST_DIR", HOST, FilePath(example="/dev/shm"),
        "Directory of the persistent host tier. It must be on a memory filesystem (tmpfs) with room for the host tier.",
    )] = Path("/dev/shm")
    host_policy: Annotated[Literal["auto", "lru", "session", "arc", "s3fifo"], Setting(
        "KVBM_HOST_POLICY", HOST, _POLICY,
        "Which block the host tier evicts when it is full. session learns when conversations go on. auto is session, "
        "but lru under SGLang and for models with sliding windows or states (docs/policies.md).",
    )] = "auto"
    tenant_shares: Annotated[str, Setting(
        "KVBM_TENANT_SHARES", HOST, Shares(example="acme=0.3,beta=0.2"),
        "Parts of the host tier, and of the disk tier, that belong to tenants. A tenant is the cache salt of its "
        "requests. In a full tier no other request evicts blocks within its share (docs/policies.md).",
    )] = ""
    disable_numa: Annotated[bool, Setting(
        "DYN_MEMORY_DISABLE_NUMA", HOST, _SWITCH,
        "Allocate host memory on any NUMA node instead of the node closest to the GPU.",
    )] = False
    disable_write_combined: Annotated[bool, Setting(
        "DYN_KVBM_DISABLE_WRITE_COMBINED", HOST, _SWITCH,
        "Do not allocate write-combined host memory.",
        unused="KVBM never allocates write-combined memory, because CPU reads from it are slow. Remove the setting.",
    )] = False

    # ---- Disk tier ----
    disk_cache_gb: Annotated[float, Setting(
        "DYN_KVBM_DISK_CACHE_GB", DISK, _GIGABYTES,
        "Size of the disk tier in GB, summed over all ranks of the engine. 0 turns the disk tier off.",
    )] = 0.0
    disk_cache_override_num_blocks: Annotated[int, Setting(
        "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS", DISK, _BLOCKS,
        "Size of the disk tier in blocks. When it is not 0, it overrides DYN_KVBM_DISK_CACHE_GB.",
    )] = 0
    disk_cache_dir: Annotated[Path, Setting(
        "DYN_KVBM_DISK_CACHE_DIR", DISK, FilePath(example="/mnt/nvme/kvbm"),
        "Directory of the disk tier. KVBM creates it if it does not exist.",
    )] = Path("/tmp")
    disk_allocator_type: Annotated[Literal["default", "open-direct"], Setting(
        "DYN_KVBM_DISK_ALLOCATOR_TYPE", DISK, Choice(words=("default", "open-direct")),
        "When KVBM requests O_DIRECT: after it has opened the file (default), or in the open call (open-direct), which "
        "some parallel filesystems need.",
    )] = "default"
    disk_disable_o_direct: Annotated[bool, Setting(
        "DYN_KVBM_DISK_DISABLE_O_DIRECT", DISK, _PRESENCE,
        "Read and write through the page cache instead of with O_DIRECT, for filesystems that do not support it. Any "
        "value except those that mean off turns it on.",
    )] = False
    disk_zerofill_fallback: Annotated[bool, Setting(
        "DYN_KVBM_DISK_ZEROFILL_FALLBACK", DISK, _PRESENCE,
        "On filesystems without fallocate, fill the file with zeros instead of leaving it sparse. Any value except "
        "those that mean off turns it on.",
    )] = False
    disk_policy: Annotated[Literal["auto", "lru", "session", "arc", "s3fifo"], Setting(
        "KVBM_DISK_POLICY", DISK, _POLICY,
        "Which block the disk tier evicts when it is full; see KVBM_HOST_POLICY.",
    )] = "auto"
    disable_disk_offload_filter: Annotated[bool, Setting(
        "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER", DISK, _SWITCH,
        "Write every block of the host tier to disk, without the frequency filter (KVBM_DISK_FILTER_THRESHOLD).",
    )] = False
    disk_filter: Annotated[Literal["frequency", "session"], Setting(
        "KVBM_DISK_FILTER", DISK, Choice(words=("frequency", "session")),
        "Which blocks count as hit for the filter: those that a request has found (frequency), or all blocks of a "
        "request that found at least half of them, because its conversation goes on (session). session writes more, "
        "and finds more on disk.",
    )] = "frequency"
    disk_filter_threshold: Annotated[int, Setting(
        "KVBM_DISK_FILTER_THRESHOLD", DISK, Number(low=1, high=256, example="2"),
        "Minimum frequency of a block that KVBM writes from host memory to disk. The frequency of a block starts at 1 "
        "and doubles with each cache hit.",
    )] = 2
    disk_filter_decay_secs: Annotated[int, Setting(
        "KVBM_DISK_FILTER_DECAY_SECS", DISK, _SECONDS,
        "Interval in seconds after which the frequency of every block decreases by 1.",
    )] = 600
    disk_filter_max_entries: Annotated[int, Setting(
        "KVBM_DISK_FILTER_MAX_ENTRIES", DISK, Number(unit="blocks", low=1, high=100_000_000, example="1000000"),
        "Maximum number of blocks whose frequency the filter tracks. When the table is full, all frequencies decrease "
        "by 1 early. One million entries take up to 180 MB of memory.",
    )] = 1_000_000
    disk_threads: Annotated[int, Setting(
        "KVBM_DISK_THREADS", DISK, Number(unit="threads", low=1, high=64, example="8"),
        "Number of threads with which a rank reads from disk. It writes with as many other threads.",
    )] = 8
    max_pending_spills: Annotated[int, Setting(
        "KVBM_MAX_PENDING_SPILLS", DISK, Number(unit="blocks", low=1, example="1024"),
        "Maximum number of blocks that wait to be written to disk. While the queue is full, KVBM skips new blocks.",
    )] = 1024
    disk_bounce_mb: Annotated[int, Setting(
        "KVBM_DISK_BOUNCE_MB", DISK, Number(unit="MiB", low=1, high=65536, example="256"),
        "Host memory of a rank, in MiB, for the bounce buffers between GPU and disk. Used only without a host tier.",
    )] = 256
    disk_load_timeout_secs: Annotated[float, Setting(
        "KVBM_DISK_LOAD_TIMEOUT_SECS", DISK,
        Number(unit="seconds", low=0, high=3600, whole=False, above=True, example="3"),
        "Time in seconds without progress after which KVBM cancels a load from disk. The engine then recomputes the "
        "missing blocks.",
    )] = 3.0

    # ---- Offloading and onboarding ----
    onboard: Annotated[Literal["auto", "sync", "async"], Setting(
        "KVBM_ONBOARD", MOVING,
        Choice(words=("auto", "sync", "async"), synonyms=(("intra", "sync"), ("inter", "async"))),
        "How KVBM loads blocks back into the engine: inside the engine's step (sync), outside it while other requests "
        "run (async), or as the cost model decides for each request (auto).",
    )] = "auto"
    load: Annotated[Literal["auto", "always", "never"], Setting(
        "KVBM_LOAD", MOVING, Choice(words=("auto", "always", "never")),
        "When KVBM loads a cache hit: only if the cost model expects loading to be faster than recomputing (auto), "
        "always, or never.",
    )] = "auto"
    prefill_tokens_per_second: Annotated[int, Setting(
        "KVBM_PREFILL_TOKENS_PER_SECOND", MOVING, Number(unit="tokens per second", low=1, example="20000"),
        "SGLang only: speed of prefill, against which the cost model compares a load. Without it KVBM begins with this "
        "default and measures the batches of SGLang's scheduler. The other engines are always measured.",
    )] = 10_000
    offload_decode: Annotated[bool, Setting(
        "KVBM_OFFLOAD_DECODE", MOVING, _SWITCH,
        "Offload the blocks of generated tokens as well as those of the prompt.",
    )] = True
    max_pending_offloads: Annotated[int, Setting(
        "KVBM_MAX_PENDING_OFFLOADS", MOVING, Number(unit="blocks", low=1, example="4096"),
        "Maximum number of blocks that wait to be offloaded. While the queue is full, KVBM skips new blocks.",
    )] = 4096
    staging_mb: Annotated[int, Setting(
        "KVBM_STAGING_MB", MOVING, Number(unit="MiB", high=65536, example="512"),
        "GPU memory in MiB for the staging buffers, into which KVBM prefetches blocks before the engine has allocated "
        "room for them. KVBM takes at most a quarter of the GPU memory that the engine leaves free. 0 turns staging "
        "off.",
    )] = 2048
    stores: Annotated[Literal["auto", "kernel", "engine"], Setting(
        "KVBM_STORES", MOVING, Choice(words=("auto", "kernel", "engine")),
        "How KVBM copies blocks from the GPU to host memory: with a kernel (kernel), with the GPU's copy engine "
        "(engine), or with the better of the two in a measurement at start (auto).",
    )] = "auto"
    pack: Annotated[Literal["auto", "on", "off"], Setting(
        "KVBM_PACK", MOVING, Choice(words=("auto", "on", "off"), synonyms=_ON_OFF),
        "Pack bfloat16 KV without loss: blocks take 23 % less memory, disk space and bus time. KVBM does not keep a "
        "block that does not fit, and leaves KV of other types as it is. auto packs on a GPU that unpacks much faster "
        "than its bus carries bytes, in a measurement at start on every rank. It does not pack if more than one in "
        "5,000 blocks of this model did not fit in an earlier run, if a disk or host cache of unpacked blocks exists, "
        "or if engines share blocks (object store, peers). Not for SGLang.",
    )] = "auto"
    fast_prompts: Annotated[bool, Setting(
        "KVBM_FAST_PROMPTS", MOVING, _SWITCH,
        "vLLM only: replace vLLM's loops that hash a long prompt, allocate and register its blocks and copy its tokens "
        "to the GPU with faster ones that give the same results.",
    )] = True
    host_offload_prefix_min_priority: Annotated[int, Setting(
        "DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY", MOVING, Number(high=100, example="35"),
        "Minimum retention priority of a block that KVBM offloads. The first block of a request below it ends "
        "offloading for that request. Only TensorRT-LLM sets priorities (35 by default); the setting has no effect "
        "with other engines.",
    )] = 0
    max_concurrent_transfers: Annotated[int, Setting(
        "DYN_KVBM_MAX_CONCURRENT_TRANSFERS", MOVING, Number(unit="batches", low=1, example="4"),
        "Maximum number of batches in flight when one rank loads for all (DYN_KVBM_NCCL_MLA_MODE). Other transfers "
        "have no such limit.",
    )] = 4
    max_transfer_batch_size: Annotated[int, Setting(
        "DYN_KVBM_MAX_TRANSFER_BATCH_SIZE", MOVING, Number(unit="blocks", low=1, example="16"),
        "Maximum number of blocks in a batch when one rank loads for all (DYN_KVBM_NCCL_MLA_MODE).",
    )] = 16

    # ---- Leader and workers ----
    leader_zmq_host: Annotated[str, Setting(
        "DYN_KVBM_LEADER_ZMQ_HOST", LEADER, Host(example="127.0.0.1"),
        "Address on which the leader listens and to which the workers connect. For a loopback address they use Unix "
        "sockets in `$TMPDIR/kvbm-<uid>` (by default in `/tmp`), which other users cannot open. For any other address "
        "they use TCP ports, which KVBM_PEER_SECRET_FILE authenticates and encrypts; without a secret they are open to "
        "that network.",
    )] = "127.0.0.1"
    leader_zmq_pub_port: Annotated[int, Setting(
        "DYN_KVBM_LEADER_ZMQ_PUB_PORT", LEADER, _port(56001),
        "Port on which the leader publishes messages to its workers. Each engine on a host needs its own.",
    )] = 56001
    leader_zmq_ack_port: Annotated[int, Setting(
        "DYN_KVBM_LEADER_ZMQ_ACK_PORT", LEADER, _port(56002),
        "Port on which the leader receives messages from its workers. Each engine on a host needs its own.",
    )] = 56002
    leader_worker_init_timeout_secs: Annotated[int, Setting(
        "DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS", LEADER, _SECONDS,
        "Time in seconds that the leader waits at start for all workers to allocate their memory.",
    )] = 1800

    # ---- Metrics and records ----
    metrics: Annotated[bool, Setting(
        "DYN_KVBM_METRICS", METRICS, _SWITCH,
        "Serve Prometheus metrics and a status page over HTTP from the leader.",
    )] = False
    metrics_port: Annotated[int, Setting(
        "DYN_KVBM_METRICS_PORT", METRICS, _port(6880),
        "Port of the metrics. Each engine on a host needs its own. With data parallelism, rank n uses this port + n.",
    )] = 6880
    metrics_host: Annotated[str, Setting(
        "KVBM_METRICS_HOST", METRICS, Host(example="0.0.0.0"),
        "Address on which KVBM serves the metrics. The default is reachable from this machine only. 0.0.0.0 or :: "
        "opens the port, without authentication, to the network.",
    )] = "127.0.0.1"
    cache_stats_max_requests: Annotated[int, Setting(
        "DYN_KVBM_CACHE_STATS_MAX_REQUESTS", METRICS, Number(unit="requests", low=1, example="1000"),
        "Number of recent requests over which KVBM computes hit rates.",
    )] = 1000
    cache_stats_log_interval_secs: Annotated[int, Setting(
        "DYN_KVBM_CACHE_STATS_LOG_INTERVAL_SECS", METRICS, _SECONDS,
        "Interval in seconds at which KVBM logs the hit rates, if they have changed.",
    )] = 5
    enable_record: Annotated[bool, Setting(
        "DYN_KVBM_ENABLE_RECORD", METRICS, _SWITCH,
        "Record the leader's decisions as JSON lines.", old_names=("ENABLE_KVBM_RECORD",),
    )] = False
    record_dir: Annotated[Path, Setting(
        "KVBM_RECORD_DIR", METRICS, FilePath(example="/var/log/kvbm"),
        "Directory of the records. A relative path starts at the engine's working directory. KVBM creates the "
        "directory if it does not exist, and each engine writes its own file.",
    )] = Path("kvbm-records")
    record_max_mb: Annotated[int, Setting(
        "KVBM_RECORD_MAX_MB", METRICS, Number(unit="MiB", low=1, high=1_000_000, example="1024"),
        "Maximum size of a record file in MiB. Recording ends when the file reaches it.",
    )] = 1024
    nvtx: Annotated[Literal["auto", "on", "off"], Setting(
        "KVBM_NVTX", METRICS, Choice(words=("auto", "on", "off"), synonyms=(("1", "on"), ("0", "off"))),
        "NVTX ranges for profilers such as Nsight Systems: only if a profiler has started the engine (auto), always "
        "(on) or never (off).",
    )] = "auto"

    # ---- Block events ----
    kv_events_enable_consolidator: Annotated[Literal["auto", "on", "off"], Setting(
        "DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR", EVENTS, Choice(words=("auto", "on", "off"), synonyms=_ON_OFF),
        "Run the consolidator: a separate process that merges the engine's block events with those of KVBM's tiers and "
        f"publishes them on DYN_KVBM_LEADER_ZMQ_PUB_PORT + {CONSOLIDATOR_PORT_OFFSET} (with data parallelism, rank n "
        "adds n). auto runs it only for engines that cannot publish KVBM's events themselves, so not for vLLM.",
    )] = "auto"
    kv_events_consolidator_mode: Annotated[Literal["dedup", "passthrough"], Setting(
        "DYN_KVBM_KV_EVENTS_CONSOLIDATOR_MODE", EVENTS, Choice(words=("dedup", "passthrough")),
        "Events that the consolidator publishes: one store event per block while any tier holds it, labelled as GPU "
        "(dedup), or every event with its own tier (passthrough).",
    )] = "dedup"
    trtllm_zmq_port: Annotated[int | None, Setting(
        "DYN_KVBM_TRTLLM_ZMQ_PORT", EVENTS, _port(20081),
        "Port on which TensorRT-LLM's own block events are published. If it is set, the consolidator merges KVBM's "
        "events with them.",
    )] = None

    # ---- Control and Dynamo ----
    control: Annotated[bool, Setting(
        "KVBM_CONTROL", CONTROL, _SWITCH,
        "Accept the commands of `kvbm control` (show and clear the tiers) from the same user on the same machine.",
    )] = True
    runtime_enabled: Annotated[bool, Setting(
        "DYN_RUNTIME_ENABLED_KVBM", CONTROL, _SWITCH,
        "Register the leader and the workers in Dynamo's service discovery, and accept control commands through "
        "Dynamo. While it is off, KVBM needs neither etcd nor NATS.",
    )] = False
    control_dynamo: Annotated[bool, Setting(
        "KVBM_CONTROL_DYNAMO", CONTROL, _SWITCH,
        "Accept control commands through Dynamo's request plane, which does not authenticate its clients. While it is "
        "off, KVBM accepts the commands of `kvbm control` only.",
    )] = True
    # Dynamo owns and validates the next four variables. KVBM accepts any text: they must not stop an engine.
    discovery_backend: Annotated[str, Setting(
        "DYN_DISCOVERY_BACKEND", CONTROL, _TEXT,
        "Dynamo's service discovery: etcd, or file for files on this machine. KVBM does not register with any other "
        "backend.",
    )] = "etcd"
    etcd_endpoints: Annotated[str, Setting(
        "ETCD_ENDPOINTS", CONTROL, _TEXT,
        "URLs of Dynamo's etcd servers, separated by commas.",
    )] = "http://localhost:2379"
    discovery_dir: Annotated[str, Setting(
        "DYN_FILE_KV", CONTROL, _TEXT,
        "Directory of Dynamo's service discovery with the file backend. The default is dynamo_store_kv in the system's "
        "temporary directory.",
    )] = ""
    dynamo_namespace: Annotated[str, Setting(
        "DYN_NAMESPACE", CONTROL, _TEXT,
        "Dynamo namespace of the deployment.",
    )] = "dynamo"
    dyn_connector: Annotated[str, Setting(
        "DYN_CONNECTOR", CONTROL, _TEXT,
        "Connector that Dynamo's launcher selects.",
        unused="Only Dynamo's launcher reads this setting. Name the connector in the engine's configuration instead, "
               "with vLLM in --kv-transfer-config.",
    )] = ""

    # ---- NIXL and NCCL ----
    nixl_backends: Annotated[dict[str, bool], Setting(
        BACKEND_PREFIX + "<NAME>", BACKENDS, Backends(example="{UCX = true}"),
        "Turn a NIXL backend on or off, with one variable for each backend. An empty value is an error.",
        unused="KVBM's tiers do not use NIXL, so there is no backend to choose. Remove the setting.",
    )] = {}  # noqa: RUF012 - msgspec copies it
    nccl_mla_mode: Annotated[bool, Setting(
        "DYN_KVBM_NCCL_MLA_MODE", BACKENDS, _SWITCH,
        "For models whose ranks all hold the same KV (MLA): only rank 0 has a host tier, loads blocks and broadcasts "
        "them to the other ranks. While it is off, the ranks of one machine share one host tier.",
    )] = False
    nccl_max_ctas: Annotated[int, Setting(
        "DYN_KVBM_NCCL_MAX_CTAS", BACKENDS, Number(unit="CTAs", low=1, high=2**31 - 1, example="8"),
        "Maximum number of CTAs (thread blocks) that NCCL uses for a broadcast.",
    )] = 8
    # fmt: on

    sources: dict[str, str]  # key -> "default", the path of a file, "environment" or "kv_connector_extra_config"
    warnings: tuple[str, ...]  # sentences for the leader to log
    misspelt: tuple[str, ...]  # those of the warnings about a name that resembles a setting
    unused_because: dict[str, str]  # name of a setting that is set but not used, as the user wrote it -> why

    def with_policy(self, name: Literal["lru", "session"]) -> "Config":
        """The same with this eviction policy where the user leaves the choice to KVBM."""
        host, disk = (name if asked == "auto" else asked for asked in (self.host_policy, self.disk_policy))
        return replace(self, host_policy=host, disk_policy=disk)

    @property
    def unused(self) -> tuple[str, ...]:
        """The names of settings that are set but not used, as the user wrote them."""
        return tuple(self.unused_because)

    @property
    def has_host_tier(self) -> bool:
        return self.cpu_cache_gb > 0 or self.cpu_cache_override_num_blocks > 0

    @property
    def has_disk_tier(self) -> bool:
        return self.disk_cache_gb > 0 or self.disk_cache_override_num_blocks > 0

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
        # Only settings that a source sets, to fit a log line. `show` hides secrets.
        given = (BY_KEY[key] for key, source in self.sources.items() if source != DEFAULT)
        return f"Config({', '.join(f'{s.key}={s.show(getattr(self, s.key))}' for s in given)})"


# Upstream's variables without a function. A deployment may still set them, so KVBM accepts them with a warning.
_RETIRED = (
    Setting(
        "DYN_KVBM_ENABLE", GENERAL, _TEXT, "Has no effect.", key="enable_kvbm",
        retired="KVBM is enabled by naming its connector in the engine's configuration",
    ),
    Setting(
        "DYN_KVBM_TRANSFER_BATCH_SIZE", MOVING, _TEXT, "Has no effect.", key="transfer_batch_size",
        retired="the size of a batch is set by DYN_KVBM_MAX_TRANSFER_BATCH_SIZE",
    ),
    Setting(
        "DYN_KVBM_ENABLE_NUMA", HOST, _TEXT, "Has no effect.", key="enable_numa",
        retired="it is deprecated, because KVBM allocates host memory close to the GPU by default "
        "(DYN_MEMORY_DISABLE_NUMA=1 turns that off)",
    ),
)  # fmt: skip

# Users see the groups in their order, wherever the fields are declared.
SETTINGS: tuple[Setting, ...] = tuple(
    sorted((*settings_of(Config), *_RETIRED), key=lambda row: GROUPS.index(row.group))
)
BY_KEY = {row.key: row for row in SETTINGS}


def tcp_url(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _leader_url(host: str, port: int) -> str:
    """Return a Unix socket for a loopback address, because a TCP port is open to every user of the machine."""
    if not _is_loopback(host):
        return tcp_url(host, port)
    return f"ipc://{os.environ.get('TMPDIR') or '/tmp'}/kvbm-{os.geteuid()}/leader-{port}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
