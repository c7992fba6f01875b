"""``KvbmStorage``: the class SGLang is pointed at. It only translates, guards and counts.

::

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config "$(python -m kvbm.engines.sglang)"

SGLang's keys are hashes of tokens alone. What else makes the bytes of a page what they are is added here: model, pool,
weights, layout, dtype, and the rank, unless all ranks have the same bytes.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import sglang
import torch
from sglang.srt.mem_cache import hicache_storage
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

import kvbm
from kvbm import config as settings
from kvbm import tracing as nvtx
from kvbm.control.presence import Presence
from kvbm.control.socket import Controller
from kvbm.core.keys import Key
from kvbm.engines import weights
from kvbm.engines.guard import Faults, guarded
from kvbm.engines.sglang.adapters import refuse_adapters
from kvbm.engines.sglang.pages import Page, page_bytes, pages_of, shape_of
from kvbm.engines.sglang.prefill import watch_prefill
from kvbm.engines.sglang.settings import is_given, read_hidden_size, read_prefetch, warn_of_unused
from kvbm.engines.sglang.store import PageStore
from kvbm.observe.observer import Observer, settings_given
from kvbm.observe.snapshot import Identity
from kvbm.tiers import registry
from kvbm.tiers.base import Access, Fingerprint, RankContext
from kvbm.transfer.layout import SLOT_ALIGNMENT

logger = logging.getLogger("kvbm")

KV = "kv"
MAMBA = "mamba"  # every rank has a part of the state, also where all have the same KV

# No request waits for a write, so a write has more time than a read has (KVBM_DISK_LOAD_TIMEOUT_SECS).
PUT_SECONDS = 30.0


class KvbmStorage(HiCacheStorage):
    """KVBM under HiCache, on one rank. Made by SGLang with its storage configuration and a dict that is empty today."""

    def __init__(self, storage_config: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        # The stores have locks of their own: a lookup never waits for a slow write.
        self._faults = Faults(engine_lock=nullcontext())
        self._adapter: KvbmStorage | None = self  # what :func:`guarded` asks
        self._said = storage_config
        # No call says which pages are one request's, from which the policy for conversations would learn.
        self._config = settings.load(extra=storage_config.extra_config or {}).with_policy("lru")
        settings.require_tier(self._config)
        refuse_adapters()
        nvtx.switch(self._config.nvtx)
        for warning in self._config.warnings:
            logger.warning("%s", warning)
        warn_of_unused(self._config)
        # A speed that is given is taken as it is.
        self._prefill = None if is_given(self._config, "prefill_tokens_per_second") else watch_prefill()
        # Where all ranks have the same bytes, one writes for all.
        shares = storage_config.is_mla_model and storage_config.tp_size > 1
        writes = getattr(storage_config, "is_storage_writer", not shares or storage_config.tp_rank == 0)
        self._access: Access = "reader" if not writes else "writer" if shares else "own"
        persistent = any(tier.outlives_engine(self._config) for tier in registry.wanted(self._config))
        if self._access == "writer" and not persistent:
            logger.warning(
                "every rank has the same KV, which one rank keeps for all on disk; a host tier alone is of no use to "
                "the others. Set DYN_KVBM_DISK_CACHE_GB."
            )
        self._weights = ""
        if persistent:  # the scheduler's process makes this backend, and has loaded the model by then
            self._weights = weights.fingerprint_or_warn(weights.digest_of_process, weights.gather_in_world)
        if not self._weights and (not writes or not registry.NEAR.is_wanted(self._config)):
            if writes:  # a rank that only reads has nothing to read then, and the rank that writes has said why
                logger.warning(
                    "KVBM is off: the disk tier needs a fingerprint of the weights (see above), and there is no host "
                    "tier. Set DYN_KVBM_CPU_CACHE_GB to cache in host memory."
                )
            self._adapter = None
        self._pools: dict[str, Any] = {}
        self._stores: dict[str, PageStore] = {}
        self._sized_bytes = 0  # a page of all pools
        self._opening = threading.Lock()
        self._stats = _Stats()
        self._observer = Observer(self._config, self._faults.counts)
        self._presence: Presence | None = None

    # -- start --------------------------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._pools[KV] = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._pools[str(host_pool_name)] = host_pool

    def on_host_pools_registered(self) -> None:
        """All pools are known: a store that cannot be opened fails the engine's start."""
        for name in self._pools if self._adapter is not None else ():
            self._store(name)

    def _store(self, name: str) -> PageStore:
        """The store of a pool. Opened at the latest when it is first used: older engines do not say when all pools are
        there."""
        pool = self._pools[name]
        return self._stores.get(name) or self._open_once(name, lambda: (shape_of(pool), page_bytes(pool)))

    def _open_once(self, name: str, describe: Callable[[], tuple[str, int]]) -> PageStore:
        """``describe``: returns the shape and the bytes of a page."""
        with self._opening:
            if name not in self._stores:
                self._stores[name] = self._open(name, *describe())
            return self._stores[name]

    def _open(self, name: str, shape: str, size: int) -> PageStore:
        if self._adapter is None:
            raise RuntimeError("the backend is closed")
        # Once: all pools have as many slots, so that a page is kept in all of them or none.
        self._sized_bytes = self._sized_bytes or sum(map(self._kept_bytes, self._pools)) or size
        is_kv = name == KV
        store = PageStore(
            self._context(name, shape, size),
            page_tokens=int(self._pools[KV].page_size) if is_kv else 0,
            prefetch=read_prefetch(),
            hidden_size=read_hidden_size(),
            log=self._observer.log if is_kv else None,
            note=self._faults.note,
            prefill=self._prefill if is_kv else None,
        )
        logger.info(
            "KVBM is ready on rank %d: pages of %d bytes of pool %s, %s", self._said.tp_rank, size, name,
            store.describe(),
        )  # fmt: skip
        if is_kv:
            try:
                self._show(store)
            except Exception as error:
                self._faults.record("starting metrics and control", error)
        return store

    def _show(self, store: PageStore) -> None:
        """Start the metrics, the record, the log line and the control socket of this rank."""
        said, config = self._said, self._config
        identity = Identity(
            kvbm=kvbm.__version__,
            engine="sglang",
            engine_version=str(getattr(sglang, "__version__", "")),
            model=str(said.model_name or ""),
            ranks=1,
            block_tokens=int(self._pools[KV].page_size),
            block_bytes=store.page_bytes,
            engine_blocks=0,  # SGLang's own caches lie above this one, and hold other pages
            settings=settings_given(config),
        )
        rank = said.pp_rank * said.tp_size + said.tp_rank
        self._observer.start(identity, lambda: store.leader, store.cost, who=f"SGLang rank {rank}", replica=rank)
        about = {"engine": f"sglang-{rank}", "rank": rank, "model": identity.model, "kvbm": kvbm.__version__}
        server = self._observer.server
        about |= {"pid": os.getpid(), "metrics": server.port if server is not None else None}
        controller = Controller(store.lock, lambda: store.leader, about, announce=lambda: False)
        self._presence = Presence(config, controller, f"sglang-{rank}", identity.model, 1)

    def _is_whole(self, name: str) -> bool:
        """Whether every rank has the same bytes of a pool."""
        return bool(self._said.is_mla_model) and name != MAMBA

    def _kept_bytes(self, name: str) -> int:
        """Of a page of a pool, on all ranks that keep a part of it where all have the same KV."""
        parts = self._said.tp_size if self._said.is_mla_model and not self._is_whole(name) else 1
        return page_bytes(self._pools[name]) * parts

    def _context(self, name: str, shape: str, size: int) -> RankContext:
        said, is_whole = self._said, self._is_whole(name)
        ranks = said.pp_size * said.attn_cp_size * (1 if said.is_mla_model else said.tp_size)
        return RankContext(
            self._config,
            0 if is_whole else said.tp_rank,
            ranks,
            size,
            -(-size // SLOT_ALIGNMENT) * SLOT_ALIGNMENT,
            self._describe(name, shape, size) if self._weights else None,
            access=self._access if is_whole else "own",
            sized_bytes=self._sized_bytes,
        )

    def _describe(self, name: str, shape: str, size: int) -> Fingerprint:
        said = self._said
        own = "all" if self._is_whole(name) else f"{said.tp_rank} of {said.tp_size}"
        return {
            "engine": "sglang",
            "model": str(said.model_name or ""),
            "weights": self._weights,
            "pool": name,
            "layout": shape,
            "block_bytes": size,
            "rank": own,
            "stage": f"{said.pp_rank} of {said.pp_size}",
            "context": f"{said.attn_cp_rank} of {said.attn_cp_size}",
            "replica": int(getattr(said, "dp_rank", 0)),
            "keys": "hicache-1",
        }

    def _keys(self, keys: Sequence[str]) -> list[Key]:
        return [hashlib.sha256(key.encode()).digest() for key in keys]

    # -- pages where they lie -----------------------------------------------------------------------------------------

    @guarded(0)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return self._store(KV).count(self._keys(keys))

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self._get(KV, keys, host_indices) or [False] * len(keys)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self._set(KV, keys, host_indices) or [False] * len(keys)

    @guarded(None)
    def _get(self, name: str, keys: list[str], host_indices: torch.Tensor) -> list[bool]:
        store, pages = self._store(name), pages_of(self._pools[name], host_indices, len(keys))
        return self._bring(store, self._keys(keys), pages)

    @guarded(None)
    def _set(self, name: str, keys: list[str], host_indices: torch.Tensor) -> list[bool]:
        store, pages = self._store(name), pages_of(self._pools[name], host_indices, len(keys))
        return self._keep(store, self._keys(keys), pages)

    def _bring(self, store: PageStore, keys: list[Key], pages: Sequence[Page]) -> list[bool]:
        began = time.monotonic()
        came = store.get(keys, pages, self._config.disk_load_timeout_secs)
        arrived = came.index(False) if False in came else len(came)
        self._stats.add(_PREFETCHED, arrived, arrived * store.page_bytes, time.monotonic() - began)
        return came

    def _keep(self, store: PageStore, keys: list[Key], pages: Sequence[Page]) -> list[bool]:
        began = time.monotonic()
        kept = store.put(keys, pages, began + PUT_SECONDS)
        self._stats.add(_BACKED_UP, sum(kept), sum(kept) * store.page_bytes, time.monotonic() - began)
        return kept

    # -- several pools ------------------------------------------------------------------------------------------------

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """The longest prefix whose pages are there in every pool that needs them."""
        return self._count_v2(keys, pool_transfers or ()) or hicache_storage.PoolTransferResult(0, {})

    @guarded(None)
    def _count_v2(self, keys: list[str], transfers: Sequence[Any]) -> Any:
        names = self._keys(keys)
        pages = self._store(KV).count(names, sum(self._bytes_a_page(transfer, len(keys)) for transfer in transfers))
        hits: dict[str, int] = {KV: pages} if pages else {}
        usable = list(range(1, pages + 1))
        for transfer in transfers:
            if not usable:
                break
            has = self._store(str(transfer.name)).has(names[:pages])
            if transfer.hit_policy == hicache_storage.PoolHitPolicy.TRAILING_PAGES:
                last = max(1, len(transfer.keys or ()) or 1)
                fine = [end for end in range(1, pages + 1) if all(has[max(0, end - last) : end])]
            elif transfer.hit_policy == hicache_storage.PoolHitPolicy.ALL_PAGES:
                fine = list(range(1, (has.index(False) if False in has else pages) + 1))
            else:
                raise ValueError(f"pool {transfer.name}: hit policy {transfer.hit_policy} is not known here")
            if fine:
                hits[str(transfer.name)] = fine[-1]
            usable = [end for end in usable if end in set(fine)]
        result = hicache_storage.PoolTransferResult(usable[-1] if usable else 0, hits)
        if hasattr(result, "restorable_prefix_pages"):
            result.restorable_prefix_pages = usable
        return result

    def _bytes_a_page(self, transfer: Any, pages: int) -> int:
        """Of a pool, that are loaded with so many pages of KV, divided by them."""
        size = self._store(str(transfer.name)).page_bytes
        if transfer.hit_policy == hicache_storage.PoolHitPolicy.ALL_PAGES:
            return size
        return size * min(pages, max(1, len(transfer.keys or ()))) // max(1, pages)

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        return {transfer.name: self._transfer(self._get, transfer) for transfer in transfers}

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        return {transfer.name: self._transfer(self._set, transfer) for transfer in transfers}

    def _transfer(self, move: Any, transfer: Any) -> list[bool]:
        keys = list(transfer.keys or ())
        if not keys or transfer.host_indices is None:
            return [False] * len(keys)
        return move(str(transfer.name), keys, transfer.host_indices) or [False] * len(keys)

    # -- pages as tensors ---------------------------------------------------------------------------------------------

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        if target_locations is None:
            target_locations = [torch.empty(self._store(KV).page_bytes, dtype=torch.uint8) for _ in keys]
        return self._get_tensors(keys, target_locations) or [None] * len(keys)

    @guarded(None)
    def _get_tensors(self, keys: list[str], targets: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        # Targets that cannot be written to as they are get a copy of what comes.
        flat = [target if target.is_contiguous() else torch.empty_like(target).contiguous() for target in targets]
        came = self._bring(self._tensor_store(flat[0]), self._keys(keys), [_page(tensor) for tensor in flat])
        for target, tensor, good in zip(targets, flat, came, strict=True):
            if good and tensor is not target:
                target.copy_(tensor)
        return [target if good else None for target, good in zip(targets, came, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return bool(self._set_tensors(keys, values))

    @guarded(False)
    def _set_tensors(self, keys: list[str], values: Sequence[torch.Tensor]) -> bool:
        flat = [value.contiguous() for value in values]
        return all(self._keep(self._tensor_store(flat[0]), self._keys(keys), [_page(tensor) for tensor in flat]))

    @guarded(False)
    def exists(self, key: str) -> bool:
        names = self._keys([key])
        stores = [self._store(KV), *self._stores.values()] if KV in self._pools else list(self._stores.values())
        return any(store.has(names)[0] for store in stores)

    def _tensor_store(self, tensor: torch.Tensor) -> PageStore:
        """Tensors come without the name of a pool. Of the size of a page they are pages; others, of a draft model say,
        have a store for their size."""
        size = tensor.nbytes
        if KV in self._pools and (store := self._store(KV)).page_bytes == size:
            return store
        return self._open_once(f"tensors of {size} bytes", lambda: (str(tensor.dtype), size))

    # -- the rest -----------------------------------------------------------------------------------------------------

    @guarded(False)
    def clear(self) -> bool:
        for store in list(self._stores.values()):
            store.clear()
        return True

    @guarded(None)
    def get_stats(self) -> Any:
        """Since the last call, for SGLang's own metrics."""
        return self._stats.take()

    def counts(self) -> dict[str, Any]:
        """What has happened since the start, by pool."""
        return {name: store.counts for name, store in self._stores.items()}

    @guarded(None)
    def close(self) -> None:
        self._observer.close()
        if self._presence is not None:
            self._presence.close()
            self._presence = None
        with self._opening:
            self._adapter = None  # a call that is under way opens no store any more
            stores = list(self._stores.values())
            self._stores.clear()
        for store in stores:
            store.close()


def _page(tensor: torch.Tensor) -> Page:
    return [(tensor.data_ptr(), tensor.nbytes)]


_PREFETCHED, _BACKED_UP = 0, 1


class _Stats:
    """Pages and bandwidths of each call, as SGLang counts them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fresh = ([], [], [], [])

    def add(self, kind: int, pages: int, size: int, seconds: float) -> None:
        if pages:
            with self._lock:
                self._fresh[kind].append(pages)
                self._fresh[kind + 2].append(size / max(seconds, 1e-9) / 1e9)

    def take(self) -> Any:
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            fresh, self._fresh = self._fresh, ([], [], [], [])
        return StorageMetrics(*fresh)
