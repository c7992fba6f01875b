"""How bytes move between the engine's cache and the tiers of one rank."""

from __future__ import annotations

from kvbm.storage.host import HostSlab
from kvbm.storage.layout import BlockLayout
from kvbm.transfer.base import Copier
from kvbm.transfer.faults import COPY_KINDS, FaultyCopier, parse


def open_copier(
    device: str,
    layout: BlockLayout,
    slab: HostSlab,
    rank: int,
    faults: str = "",
    staging: int = 0,
    stores: str = "auto",
) -> Copier:
    """The copier for an engine whose cache lies on ``device`` ("cpu", "cuda:0", ...)."""
    kind = device.split(":")[0]
    copier: Copier
    if kind == "cpu":
        from kvbm.transfer.cpu import CpuCopier

        copier = CpuCopier(layout, slab)
    elif kind == "cuda":
        import torch

        from kvbm.transfer.cuda import CudaCopier

        copier = CudaCopier(layout, slab, torch.device(device), staging, stores)
    else:
        raise ValueError(f"no copier for KV caches on {device!r}; supported: cpu, cuda")
    rules = [rule for rule in parse(faults) if rule.kind in COPY_KINDS]
    return FaultyCopier(copier, rules, rank) if rules else copier
