"""Opening the peer tier: a rank's store, and the leader's catalog with the server beside it."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from kvbm.config import Config
from kvbm.core.catalog import Catalog
from kvbm.tiers import peers
from kvbm.tiers.base import Fingerprint, LeaderContext, RankContext, Store
from kvbm.tiers.bounded import Call, reason_of
from kvbm.tiers.directory import private_directory
from kvbm.tiers.host.shared import SharedMemory, SharingError, machine
from kvbm.tiers.host.slab import available_memory
from kvbm.tiers.peers.catalog import PeerCatalog
from kvbm.tiers.peers.client import NIXL, SOCKET, Identity
from kvbm.tiers.peers.finders import make_finder
from kvbm.tiers.peers.finding.member_lists import SUFFIX
from kvbm.tiers.peers.finding.registration import registry_of
from kvbm.tiers.peers.launch import ServerProcess
from kvbm.tiers.peers.lookup import Lookup
from kvbm.tiers.peers.nixl_path import api, has_rdma
from kvbm.tiers.peers.server import Setup, dismiss_orphans
from kvbm.tiers.peers.sources import SourceTable
from kvbm.tiers.peers.store import Opened, PeerStore
from kvbm.tiers.peers.wire import VERSION, Who
from kvbm.tiers.secret import read_secret

logger = logging.getLogger("kvbm")

NICE = 10  # of an engine's server: the engine comes first
_MAX_PATH = 107  # of a Unix socket


def peer_directory(config: Config) -> Path:
    return config.peer_dir or Path(os.environ.get("TMPDIR") or "/tmp") / f"kvbm-{os.geteuid()}" / "peers"


def open_store(context: RankContext) -> Call[Store | None] | None:
    config = context.config
    problem = ""
    if context.cache is None:
        problem = "this engine has no fingerprint of its weights"
    elif not context.shares_near_memory or context.access != "own":
        problem = "only vLLM and TensorRT-LLM can use it. Turn KVBM_PEERS_ENABLED off for this engine"
    elif config.host_persist:
        problem = "KVBM_HOST_PERSIST keeps host memory in files that other engines cannot map. Turn one of the two off"
    if problem:
        if context.rank == 0:
            logger.warning("there is no peer tier: %s", problem)
        return None
    require_secret(config)
    return Call(
        lambda: _open_store(context), str(peer_directory(config)), lambda store: store.close() if store else None
    )


def require_secret(config: Config) -> str:
    """Raises ValueError if the secret is wrong, or if there is none and the tier reaches other machines."""
    secret = read_secret(config)
    if (config.peer_listen or config.peers) and not secret:
        raise ValueError(
            "KVBM_PEER_LISTEN and KVBM_PEERS need a secret that all engines share. Set KVBM_PEER_SECRET_FILE to a file "
            "with at least 16 characters, or KVBM_PEER_SECRET"
        )
    return secret


def _open_store(context: RankContext) -> Store | None:
    assert context.cache is not None
    config = context.config
    directory = peer_directory(config)
    try:
        private_directory(directory, "KVBM_PEER_DIR")
        _check_length(directory)
        if config.peer_listen or config.peers:
            import cryptography  # noqa: F401
    except ImportError:
        problem = "the package cryptography is missing: pip install 'kvbm[peers]'"
    except (OSError, ValueError) as error:
        problem = reason_of(error)
    else:
        if context.rank == 0 and available_memory() < 1.1e9 * config.cpu_cache_gb:
            dismiss_orphans(str(directory), "", "", any_engine=True)
        return PeerStore(_identity(config, context.cache, context.rank), context.slot_bytes)
    logger.warning("rank %d goes on without a peer tier: %s", context.rank, problem)
    return None


def _check_length(directory: Path) -> None:
    if len(str(directory)) > _MAX_PATH - 22:
        raise ValueError(f"KVBM_PEER_DIR={directory} is too long for Unix sockets: at most {_MAX_PATH - 22} characters")


def ways(config: Config) -> tuple[str, ...]:
    """The ways to other machines that may be used."""
    if config.peer_transport == "nixl":
        return (NIXL,)
    return (SOCKET, NIXL) if config.peer_transport == "auto" and has_rdma() and api() is not None else (SOCKET,)


def _identity(config: Config, cache: Fingerprint, rank: int, generation: str = "") -> Identity:
    who = Who(VERSION, dict(cache), generation)
    return Identity(who, machine(), read_secret(config), rank, config.peer_timeout_secs, ways(config))


def open_catalog(context: LeaderContext) -> Catalog | None:
    """None, with the reason in the log, when not all ranks can share their memory."""
    opened = context.opened(peers.TIER.name)
    if not opened or context.cache is None:
        return None  # the rank without a store has logged the reason
    if not all(tier.store for tier in opened):
        logger.warning("there is no peer tier: this engine's host memory cannot be shared")
        return None
    config, generation = context.config, os.urandom(8).hex()
    ranks = [msgspec.json.decode(tier.store, type=Opened) for tier in opened]
    slabs: list[SharedMemory] = []
    tables: list[SourceTable] = []
    try:
        for rank in ranks:
            slabs.append(SharedMemory.open(rank.slab))
            table = SharedMemory.open(rank.table)
            tables.append(SourceTable(table.file))
            table.close()
    except SharingError as error:
        for slab in slabs:
            slab.close()
        logger.warning("there is no peer tier: %s", error)
        return None
    directory = peer_directory(config)
    near = min(hello.tiers[0].slots for hello in context.hellos)
    me = _identity(config, context.cache, -1, generation)
    setup = Setup(
        engine=os.getpid(), control=-1, board=-1, leases=-1, slabs=[], slots=near,
        slot_bytes=[rank.slot_bytes for rank in ranks], fingerprint=dict(context.cache),
        member=config.peer_name or config.peer_advertise or config.peer_listen, machine=me.machine,
        generation=generation,
        directory=str(directory), listen=config.peer_listen, advertise=config.peer_advertise,
        registry=registry_of(config), secret=me.secret, seconds=config.peer_timeout_secs,
        orphan_seconds=config.peer_orphan_secs, bytes_per_second=config.peer_max_gbps * 1e9,
        nice=NICE, nixl=NIXL in ways(config),
    )  # fmt: skip
    finder = make_finder(config, me, directory)
    own = [config.peer_advertise or config.peer_listen, f"unix:{directory / (generation + SUFFIX)}"]
    lookup = Lookup(finder, me, tables, config.peer_lookup_secs, own)
    return PeerCatalog(lookup, ServerProcess(setup, slabs, finder))
