"""One rank's share of the cache: the engine's tensors, the memory of the tiers, and the worker over both.

The start of a worker, the same for every engine, in this order: :meth:`Rank.register` when the engine has made its KV
cache, :meth:`Rank.open` when it has warmed up. After that the worker follows the leader's plans.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kvbm.config import Config
from kvbm.core.rate import Rate
from kvbm.plans import Hello, TierHello, TierName
from kvbm.runtime.escapes import EscapeSample
from kvbm.runtime.packing_notes import find_note, note_name
from kvbm.runtime.replicas import Offer, Replicas, SharingError
from kvbm.runtime.stores import Share
from kvbm.runtime.worker import Worker
from kvbm.tiers import registry
from kvbm.tiers.base import Fingerprint, RankContext, Store, fingerprint
from kvbm.tiers.bounded import Call, DiskHangs, reason_of
from kvbm.tiers.registry import NEAR
from kvbm.tiers.staged_read import StagedStore
from kvbm.transfer import open_copier, pack_slots
from kvbm.transfer.base import slots_tried
from kvbm.transfer.broadcast import Passing
from kvbm.transfer.layout import BlockLayout, LayoutError, TensorSpec, describe
from kvbm.transfer.packing import pack_layout
from kvbm.transfer.wire import Wire

logger = logging.getLogger("kvbm")


class Rank:
    """Called from the engine's worker thread."""

    def __init__(
        self,
        config: Config,
        rank: int,
        ranks: int,
        replicas: Replicas | None = None,
        cache: Fingerprint | None = None,
        keeps_host: bool = False,
        model: str = "",
        gather: Callable[[str], Sequence[str]] | None = None,
    ) -> None:
        """``replicas``: the ranks that hold the very same KV as this one, which is among them. ``cache``:
        the fingerprint of this engine's KV, without the layout; without it no tier can outlive the engine. It may be
        set later, until :meth:`register`. ``keeps_host``: the leader can use a host tier that outlives the engine.
        ``model``: its name, for a note that its blocks do not suit packing. ``gather``: gives every rank the texts of
        all, and is called by all of them; without it several ranks cannot agree on what each has measured."""
        self.rank = rank
        self.ranks = ranks
        self.layout: BlockLayout | None = None
        self.worker: Worker | None = None
        self._config = config
        self._device = ""
        self._slots = 0
        self._slab: Any = None  # the near tier's memory
        self._replicas = replicas
        self._wire: Wire | None = None
        self.cache = cache
        self._opening: dict[TierName, Call[Store | None]] = {}
        self._rates: dict[TierName, Rate | None] = {}
        self._keeps_host = keeps_host
        self._model = model
        self._gather = gather
        self._packing_note = ""
        self._has_packed_cache = False  # and none of raw blocks: that packing won once is enough
        self._intact = b"", b""

    def register(self, kv_caches: Mapping[str, Any], num_blocks: int) -> None:
        """Take the engine's tensors, one a layer, and ask for the host tier's memory. Raises when it cannot be had:
        better now than later. The memory is faulted in while the engine goes on with its own start."""
        tensors = [_spec(name, tensor) for name, tensor in kv_caches.items()]
        self._device = str(next(iter(kv_caches.values())).device)
        self.layout = layout = self._pack(describe(tensors, num_blocks))
        context = self._context(layout)
        for tier in registry.wanted(self._config):
            if (opening := tier.open_store(context)) is not None:
                self._opening[tier.name] = opening
        if not self._join(layout):
            self._replicas = None
        if self._replicas is not None and self._wire is None:
            try:
                self._slots = self._near_slots(context)
                self._slab = self._replicas.share_slab(self._slots * layout.slot_bytes, NEAR.node(context))
                if NEAR.outlives_engine(self._config):
                    self._tell("KVBM_HOST_PERSIST has no effect: the ranks share memory, which ends with them")
                return
            except SharingError as error:
                self._tell("every rank has the same KV and stores it for itself: %s", error)
                self._replicas = None
        self._slots = self._near_slots(context)
        # A rank that receives all loads by broadcast needs only the slot of its copier's warm-up.
        slots = 1 if self._wire is not None and not self._wire.sends else self._slots
        self._slab = NEAR.open_slab(context, slots, self._keeps_host and self._wire is None)

    def _pack(self, layout: BlockLayout) -> BlockLayout:
        """The layout with packed slots, where that is asked for and possible."""
        mode = self._config.pack
        if mode == "off":
            return layout
        packed, measured, reason = layout, "", ""
        try:
            packed, measured = self._try_to_pack(layout)
        except ValueError as error:
            reason = str(error)
        except Exception as error:  # packing is the default, and raw blocks always work
            reason = reason_of(error)
        if mode == "auto" and self.ranks > 1 and not self._is_on_cpu:
            reason = self._agree_on_packing(reason)
        if not reason:
            logger.info("blocks are packed to %.0f %%%s", 100 * packed.block_bytes / packed.raw_bytes, measured)
            return packed
        self._packing_note = ""
        if self.rank == 0:
            level = logging.INFO if mode == "auto" else logging.WARNING
            logger.log(level, "KVBM_PACK=%s: blocks of this KV cache are not packed: %s", mode, reason)
        return layout

    @property
    def _is_on_cpu(self) -> bool:
        return self._device.startswith("cpu")

    def _try_to_pack(self, layout: BlockLayout) -> tuple[BlockLayout, str]:
        """As :func:`pack_slots`. Raises, with the reason, where the blocks of this rank are not to be packed."""
        mode = self._config.pack
        packed = pack_layout(layout)
        if self._replicas is not None and self._replicas.size > 1:
            raise ValueError("several ranks hold the same KV")
        self._packing_note = note_name(self._model, packed.description)
        found = Call(lambda: self._against_packing(layout), "the cache directory").result()
        if found and mode == "auto":
            raise ValueError(found)
        if found:
            self._tell("KVBM_PACK=on packs blocks, although %s", found)
        if mode == "auto" and self._is_on_cpu:
            raise ValueError("an engine on a CPU gains no time by it")
        return pack_slots(self._device, layout, if_it_wins=mode == "auto" and not self._has_packed_cache)

    def _agree_on_packing(self, reason: str) -> str:
        """Why some rank does not pack; empty if all do. Each has measured its own GPU and looked for notes and caches
        on its own machine, but a block must mean the same on all ranks."""
        if self._gather is None:
            return reason or "several ranks have no way to agree on it"
        try:
            reasons = self._gather(reason)
        except Exception as error:
            return reason or f"the ranks could not agree on it: {error}"
        return reason or next((f"of another rank: {each}" for each in reasons if each), "")

    def _against_packing(self, layout: BlockLayout) -> str:
        """Why KVBM_PACK=auto does not pack, as far as other engines decide it; empty where they do not."""
        config = self._config
        if (note := find_note(config, self._packing_note)) is not None:
            return f"too many of this model's blocks did not fit packed slots before; remove {note} to forget that"
        if config.pack == "on":
            return ""
        if config.stores == "kernel":
            return "KVBM_STORES=kernel stores without the copy engine"
        if any(tier.shared for tier in registry.wanted(config)):
            return "engines that share blocks must all pack them, with KVBM_PACK=on, or none"
        if self.cache is not None:
            caches = (fingerprint(self.cache, each.description) for each in (layout, pack_layout(layout)))
            has_raw, has_packed = (registry.has_cache(config, cache) for cache in caches)
            if has_raw and not has_packed:
                return "a cache of unpacked blocks is there from before; KVBM_PACK=on starts another one"
            self._has_packed_cache = has_packed and not has_raw
        return ""

    def _context(self, layout: BlockLayout) -> RankContext:
        cache = None if self.cache is None else fingerprint(self.cache, layout.description)
        return RankContext(
            self._config, self.rank, self.ranks, layout.block_bytes, layout.slot_bytes, cache, self._device,
            shares_near_memory=registry.shares_near_memory(self._config),
        )  # fmt: skip

    def _join(self, layout: BlockLayout) -> bool:
        """Meet the ranks that hold the same KV. False when each is to keep it for itself, or there are none."""
        replicas, config = self._replicas, self._config
        if replicas is None or replicas.size == 1:
            if config.nccl_mla_mode:
                self._tell("DYN_KVBM_NCCL_MLA_MODE changes nothing here: no two ranks are known to have the same KV")
            return False
        if tiers := registry.wanted(config):
            # Each rank stages blocks in its own time, through near slots that it uses in turn.
            names = " and ".join(tier.name for tier in tiers)
            self._tell("every rank has the same KV and stores it for itself: a %s tier requires it", names)
            return False
        if not replicas.meet(Offer(layout.description, layout.block_bytes, layout.num_blocks, config.nccl_mla_mode)):
            self._tell("every rank has the same KV and stores it for itself: their caches or settings are not alike")
            return False
        if config.nccl_mla_mode:
            try:
                self._wire = replicas.open_wire(self._device, config.nccl_max_ctas)
            except RuntimeError as error:
                self._tell(
                    "DYN_KVBM_NCCL_MLA_MODE: there is no group to broadcast in, so each rank loads for itself: %s",
                    error,
                )
        return True

    def _near_slots(self, context: RankContext) -> int:
        """Slots of the near tier, or of the staging buffer where the user asks for no near tier."""
        if not NEAR.is_wanted(self._config):
            opening = (registry.TIERS[name] for name in self._opening)
            staging = max((tier.staging_slots(self._config, context.slot_bytes) for tier in opening), default=0)
            if staging:
                return staging
        return NEAR.slots(context, self.ranks // self._shared_by)

    def _stores(self) -> dict[TierName, Store]:
        """Waits until every store is open, or has been silent for too long."""
        stores = {}
        for name, opening in list(self._opening.items()):
            try:
                if (store := opening.result()) is not None:
                    stores[name] = store
            except DiskHangs as error:
                del self._opening[name]
                logger.warning(
                    "rank %d goes on without a %s tier: %s. Blocks on %s are kept for the next start",
                    self.rank, name, reason_of(error), name,
                )  # fmt: skip
        return stores

    @property
    def _shared_by(self) -> int:
        return 1 if self._replicas is None else self._replicas.size

    def _tell(self, text: str, *details: object) -> None:
        if self.rank == 0:
            logger.warning(text, *details)

    def hello(self) -> Hello | None:
        """This rank's description for the leader; None without a KV cache."""
        if self.layout is None or self._slab is None:
            return None
        tiers = [TierHello(NEAR.name, self._slots, None, "", *self._intact)]
        for name, store in self._stores().items():
            tiers.append(TierHello(name, store.slots, self._rates.get(name), store.identity))
        weights = "" if self.cache is None else str(self.cache.get("weights", ""))
        return Hello(
            self.rank, self.layout.block_bytes, self.layout.description, tiers, self._shared_by, weights,
            self.layout.raw_bytes, self._packing_note,
        )  # fmt: skip

    def open(self) -> Hello | None:
        """Finish the start: the engine has warmed up and captured its graphs, so KVBM can make its
        own CUDA calls. Waits for the memory. Returns what :meth:`hello` does."""
        layout = self.layout
        if layout is not None and self._slab is not None and self.worker is None:
            self.worker = self._open(layout, self._slab)
            logger.info(
                "rank %d: %d layers, %d bytes a block in pieces of %d, %d %s slots, %s copies%s", self.rank,
                len(layout.layers), layout.block_bytes, layout.merged()[0].size, self._slab.slots, NEAR.name,
                self.worker.copies, "".join(self._described(name, store) for name, store in self._stores().items()),
            )  # fmt: skip
        return self.hello()

    def _described(self, name: TierName, store: Store) -> str:
        rate = self._rates.get(name)
        return f", {store.describe()}" + ("" if rate is None else f", read at {rate.bytes_per_second / 1e9:.2f} GB/s")

    def _open(self, layout: BlockLayout, slab: Any) -> Worker:
        """Other ranks may map the slab too, and a copier writes to it during its warm-up. So no rank uses its copier
        before all are open, and a failure of one rank is a failure of all."""
        if self._replicas is None:
            return self._make_worker(layout, slab)
        worker, failure = None, None
        try:
            worker = self._make_worker(layout, slab)
        except Exception as error:
            failure = error
        problem = self._replicas.agree("" if failure is None else f"rank {self.rank}: {failure}"[:500])
        if failure is not None:
            raise failure
        assert worker is not None
        if problem:
            worker.close()
            self._slab = None
            raise RuntimeError(problem)
        return worker

    def _make_worker(self, layout: BlockLayout, slab: Any) -> Worker:
        config, replicas, passing = self._config, self._replicas, None
        share = Share() if replicas is None else Share(replicas.place, replicas.size)
        if self._wire is not None:
            share = share._replace(writers=1)
            passing = Passing(self._wire, config.max_transfer_batch_size, config.max_concurrent_transfers)
        slab = self._slab = NEAR.carve(self._context(layout), slab)
        with slab.spared(slots_tried(layout.block_bytes, layout.num_blocks, slab.slots)):
            copier = open_copier(
                self._device,
                layout,
                slab,
                self.rank,
                config.inject_faults,
                config.staging_mb << 20,
                config.stores,
                passing,
            )
        stores = []
        for name, store in self._stores().items():
            store.attach(slab)
            stores.append(StagedStore(name, store, slab.address, layout.slot_bytes))
            # Injected faults count the calls of a store, and must hit those of a test.
            if not config.inject_faults:
                self._rates[name] = store.measure()
        self._intact = slab.intact(self._slots)
        kept = slab if slab.outlives_engine else None
        sample = EscapeSample(layout, slab) if layout.tile_values else None
        return Worker(self.rank, copier, NEAR.name, self._slots, layout.num_blocks, share, stores, kept, sample)

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()
            self.worker = None
        else:
            for opening in self._opening.values():
                opening.abandon()
            if self._slab is not None:
                self._slab.close()
        self._slab = None


def _spec(name: str, tensor: Any) -> TensorSpec:
    if not isinstance(tensor, torch.Tensor):
        raise LayoutError(f"layer {name}: expected one KV tensor, got {type(tensor).__name__}")
    itemsize = tensor.element_size()
    return TensorSpec(
        name=name,
        address=tensor.data_ptr(),
        shape=tuple(tensor.shape),
        strides=tuple(stride * itemsize for stride in tensor.stride()),
        itemsize=itemsize,
        dtype=str(tensor.dtype).removeprefix("torch."),
    )
