"""One rank's share of the cache: the engine's tensors, the memory of the tiers, and the worker over both.

What every engine's worker half does at its start, in this order: :meth:`Rank.register` when the engine has made its KV
cache, :meth:`Rank.open` when it has warmed up. What happens after that is between the worker and the leader's plans.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from kvbm.config import Config, slots_for
from kvbm.core.rate import Rate
from kvbm.plans import Hello, TierHello
from kvbm.runtime.replicas import Offer, Replicas
from kvbm.runtime.worker import Share, Worker
from kvbm.tiers import disk as disk_tier
from kvbm.tiers.bounded import Call, DiskHangs, reason_of
from kvbm.tiers.directory import private_directory
from kvbm.tiers.disk import gds
from kvbm.tiers.disk.file import DiskFile, DiskSpaceError
from kvbm.tiers.disk.index import Fingerprint, cache_directory, fingerprint, slab_path
from kvbm.tiers.disk.open import measure, open_file, staging_slots
from kvbm.tiers.host import numa
from kvbm.tiers.host.persistent_slab import DIRECTORY_SETTING, PersistentSlab, Rows, held, rows_of
from kvbm.tiers.host.shared import SharingError
from kvbm.tiers.host.slab import HostMemoryError, HostSlab, available_memory
from kvbm.tiers.lock import PATIENCE_SECONDS
from kvbm.tiers.registry import NEAR
from kvbm.tiers.staged_read import StagedStore
from kvbm.transfer import open_copier
from kvbm.transfer.base import slots_tried
from kvbm.transfer.broadcast import Passing
from kvbm.transfer.layout import BlockLayout, LayoutError, TensorSpec, describe
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
    ) -> None:
        """``replicas``: the ranks that hold the very same KV as this one, which is among them. ``cache``: what makes
        the KV of this engine what it is, but for its layout; without it nothing can be kept on disk. It may be set
        later, until :meth:`register`. ``keeps_host``: the leader can make use of a host tier that outlives the
        engine."""
        self.rank = rank
        self.ranks = ranks
        self.layout: BlockLayout | None = None
        self.worker: Worker | None = None
        self._config = config
        self._device = ""
        self._slots = 0
        self._slab: HostSlab | None = None
        self._replicas = replicas
        self._wire: Wire | None = None
        self.cache = cache
        self._disk: Call[DiskFile | None] | None = None
        self._rate: Rate | None = None
        self._keeps_host = keeps_host
        self._kept = self._compared = b""
        self._rows: Rows = []  # of the persistent host tier's index

    def register(self, kv_caches: Mapping[str, Any], num_blocks: int) -> None:
        """Take the engine's tensors, one a layer, and ask for the host tier's memory. Raises when it cannot be had:
        better now than later. The memory is faulted in while the engine goes on with its own start."""
        tensors = [_spec(name, tensor) for name, tensor in kv_caches.items()]
        self.layout = layout = describe(tensors, num_blocks)
        self._device = str(next(iter(kv_caches.values())).device)
        node = self._node()
        self._open_disk(layout)
        if not self._join(layout):
            self._replicas = None
        if self._replicas is not None and self._wire is None:
            try:
                self._slots = self._budget(layout)
                self._slab = self._replicas.share_slab(self._slots * layout.slot_bytes, node)
                if self._config.host_persist:
                    self._tell("KVBM_HOST_PERSIST has no effect: the ranks share memory, which ends with them")
                return
            except SharingError as error:
                self._tell("every rank has the same KV and stores it for itself: %s", error)
                self._replicas = None
        self._slots = self._budget(layout)
        # Who gets all it loads from another rank needs no more of a tier than its copier's warm-up does.
        slots = 1 if self._wire is not None and not self._wire.sends else self._slots
        self._slab = self._kept_slab(layout, slots, node) or HostSlab(slots * layout.slot_bytes, node=node)

    def _kept_slab(self, layout: BlockLayout, slots: int, node: int | None) -> PersistentSlab | None:
        """The memory of the last engine, or some that the next one will find; None when it ends with this one."""
        config = self._config
        if not config.host_persist or not config.has_host_tier:
            return None
        if not self._keeps_host or self.cache is None or self._wire is not None:
            self._tell("KVBM_HOST_PERSIST has no effect here: with this engine the host tier ends with it")
            return None
        directory = cache_directory(config.host_persist_dir, fingerprint(self.cache, layout.description))
        try:
            opening = Call(
                lambda: self._open_kept(directory, slots, layout.slot_bytes, node), str(directory), PersistentSlab.close
            )
            return opening.result()
        except HostMemoryError:  # a setting that can never be met
            raise
        except Exception as error:
            logger.warning(
                "rank %d: this engine's host tier will not survive a restart: %s. Blocks saved by the previous engine "
                "are untouched",
                self.rank, reason_of(error),
            )  # fmt: skip
            return None

    def _open_kept(self, directory: Path, slots: int, slot_bytes: int, node: int | None) -> PersistentSlab:
        """Raises OSError when the slab or its index cannot be used now."""
        private_directory(directory, DIRECTORY_SETTING)
        slab = PersistentSlab(slab_path(directory, self.rank), slots, slot_bytes, node=node, patience=PATIENCE_SECONDS)
        try:
            self._rows = rows_of(directory)
        except OSError as error:
            # Stores of this engine would overwrite blocks that a later engine can find. Without room for a second slab
            # they have to: the memory is what this engine runs with.
            if slots * slot_bytes < available_memory() * 0.9:
                slab.close()
                raise
            logger.warning(
                "rank %d: blocks of the last engine are lost: %s, and there is no memory for a second host tier",
                self.rank, error.strerror or error,
            )  # fmt: skip
        except BaseException:
            slab.close()
            raise
        return slab

    def _join(self, layout: BlockLayout) -> bool:
        """Meet the ranks that hold the same KV. False when each is to keep it for itself, or there are none."""
        replicas, config = self._replicas, self._config
        if replicas is None or replicas.size == 1:
            if config.nccl_mla_mode:
                self._tell("DYN_KVBM_NCCL_MLA_MODE changes nothing here: no two ranks are known to have the same KV")
            return False
        if config.has_disk_tier:
            # Each rank brings blocks from disk in its own time, through host slots that it uses in turn.
            self._tell("every rank has the same KV and stores it for itself: that is how it must be with a disk tier")
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

    def _budget(self, layout: BlockLayout) -> int:
        """Slots for the memory that the user grants all ranks together."""
        config, kept = self._config, self.ranks // self._shared_by
        if self._disk is not None and not config.has_host_tier:
            return staging_slots(config, layout.slot_bytes)
        return self._slots_for(
            "DYN_KVBM_CPU_CACHE_GB",
            config.cpu_cache_gb,
            config.cpu_cache_override_num_blocks,
            layout.block_bytes * kept,
        )

    def _slots_for(self, setting: str, gigabytes: float, override: int, block_bytes: int) -> int:
        """Slots of a tier; ``block_bytes`` are those of all ranks together. Raises when there is not even one."""
        slots = slots_for(gigabytes, override, block_bytes)
        if slots < 1:
            raise ValueError(
                f"{setting}={gigabytes:g} holds no block: one block takes {block_bytes / 1e9:.6f} GB over all "
                f"{self.ranks} ranks. Set it to more than that."
            )
        return slots

    def _open_disk(self, layout: BlockLayout) -> None:
        """Ask for this rank's file. It is made while the engine goes on with its own start, like the host tier."""
        config = self._config
        if not config.has_disk_tier:
            return
        if self.cache is None:
            if not config.has_host_tier:
                raise ValueError("there is no disk tier for this engine yet: set DYN_KVBM_CPU_CACHE_GB")
            self._tell("there is no disk tier for this engine yet: DYN_KVBM_DISK_CACHE_GB has no effect")
            return
        block_bytes = layout.block_bytes * self.ranks
        slots = self._slots_for(
            "DYN_KVBM_DISK_CACHE_GB", config.disk_cache_gb, config.disk_cache_override_num_blocks, block_bytes
        )
        directory = cache_directory(config.disk_cache_dir, fingerprint(self.cache, layout.description))
        self._disk = Call(lambda: self._make_file(directory, slots, layout.slot_bytes), str(directory), _close)

    def _make_file(self, directory: Path, slots: int, slot_bytes: int) -> DiskFile | None:
        """None when the disk cannot be used now. Raises when it can never hold what was asked for."""
        config = self._config
        try:
            private_directory(directory)
            return open_file(config, slab_path(directory, self.rank), slots, slot_bytes, self.rank, PATIENCE_SECONDS)
        except (DiskSpaceError, DiskHangs):  # the second has been logged: this call was given up
            raise
        except Exception as error:
            self._go_without_disk(error)
            return None

    def _go_without_disk(self, error: Exception) -> None:
        logger.warning(
            "rank %d goes on without a disk tier: %s. Blocks on disk are kept for the next start",
            self.rank, reason_of(error),
        )  # fmt: skip

    def _speed(self) -> str:
        return "" if self._rate is None else f", read at {self._rate.bytes_per_second / 1e9:.2f} GB/s"

    def _file(self) -> DiskFile | None:
        """Waits until the file is there, or the disk has been silent for too long."""
        if self._disk is None:
            return None
        try:
            return self._disk.result()
        except DiskHangs as error:
            self._disk = None
            self._go_without_disk(error)
            return None

    @property
    def _shared_by(self) -> int:
        return 1 if self._replicas is None else self._replicas.size

    def _tell(self, text: str, *details: object) -> None:
        if self.rank == 0:
            logger.warning(text, *details)

    def hello(self) -> Hello | None:
        """What the leader must know of this rank; None when there is no cache to serve."""
        if self.layout is None or self._slab is None:
            return None
        tiers = [TierHello(NEAR.name, self._slots, intact=self._kept, index=self._compared)]
        if (file := self._file()) is not None:
            tiers.append(TierHello(disk_tier.TIER.name, file.slots, self._rate, file.path.parent.name))
        weights = "" if self.cache is None else str(self.cache.get("weights", ""))
        return Hello(self.rank, self.layout.block_bytes, self.layout.description, tiers, self._shared_by, weights)

    def open(self) -> Hello | None:
        """Finish the start: the engine has warmed up and captured its graphs, so this is the time for CUDA calls of our
        own. Waits for the memory. Returns what :meth:`hello` does."""
        layout, slab = self.layout, self._slab
        if layout is not None and slab is not None and self.worker is None:
            self.worker = self._open(layout, slab)
            slab = self._slab or slab
            logger.info(
                "rank %d: %d layers, %d bytes a block in pieces of %d, %d host slots, %s copies%s", self.rank,
                len(layout.layers), layout.block_bytes, layout.merged()[0].size, slab.slots, self.worker.copies,
                "" if (file := self._file()) is None else f", {file.slots} slots on disk at {file.path}{self._speed()}",
            )  # fmt: skip
            if self._file() is not None and self._device.startswith("cuda") and self.rank == 0:
                logger.info("GPUDirect Storage: %s", gds.statement())
        return self.hello()

    def _open(self, layout: BlockLayout, slab: HostSlab) -> Worker:
        """Other ranks may map the slab too, and a copier writes to it when it warms up. So none is used before all are
        open, and a failure of one is a failure of all."""
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

    def _make_worker(self, layout: BlockLayout, slab: HostSlab) -> Worker:
        config, replicas, passing = self._config, self._replicas, None
        share = Share() if replicas is None else Share(replicas.place, replicas.size)
        if self._wire is not None:
            share = share._replace(writers=1)
            passing = Passing(self._wire, config.max_transfer_batch_size, config.max_concurrent_transfers)
        slab = self._carve(layout, slab)
        kept = slab if isinstance(slab, PersistentSlab) else None
        tried = slots_tried(layout.block_bytes, layout.num_blocks, slab.slots)
        with nullcontext() if kept is None else kept.spared(tried):
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
        file = self._file()
        stores = []
        if file is not None:
            stall = config.disk_load_timeout_secs
            stores.append(StagedStore(disk_tier.TIER.name, file, slab.address, layout.slot_bytes, stall))
            # Injected faults count the disk's calls, and must hit those of a test.
            if not config.inject_faults:
                self._rate = measure(file)
        if kept is not None:
            self._kept, self._compared = held(kept, self._slots, self._rows)
        return Worker(self.rank, copier, NEAR.name, self._slots, layout.num_blocks, share, stores, kept)

    def _carve(self, layout: BlockLayout, slab: HostSlab) -> HostSlab:
        """The slab in slots. Another one, which ends with this engine, where it cannot be kept after all: each rank has
        found room for its own share, and there may not be room for all of them."""
        slots = slab.size // layout.slot_bytes
        try:
            return slab.carve(slots, layout.slot_bytes)
        except OSError as error:
            if not isinstance(slab, PersistentSlab):
                raise
            logger.warning(
                "rank %d: this engine's host tier will not survive a restart: %s", self.rank, error.strerror or error
            )
            self._slab = None
            slab.give_up()
        self._slab = HostSlab(slots * layout.slot_bytes, node=self._node())
        return self._slab.carve(slots, layout.slot_bytes)

    def _node(self) -> int | None:
        return None if self._config.disable_numa else _numa_node(self._device)

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()
            self.worker = None
        else:
            if self._disk is not None:
                self._disk.abandon()
            if self._slab is not None:
                self._slab.close()
        self._slab = None


def _close(file: DiskFile | None) -> None:
    if file is not None:
        file.close()


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


def _numa_node(device: str) -> int | None:
    """The NUMA node of this rank's own GPU."""
    if not device.startswith("cuda"):
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    try:
        bus_id = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError:
        return None
    return numa.node_of_pci(bus_id)
