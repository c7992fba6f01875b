"""How bytes move between the engine's cache and the tiers of one rank."""

from __future__ import annotations

from kvbm.storage.host import HostSlab
from kvbm.storage.layout import BlockLayout
from kvbm.transfer.base import Copier
from kvbm.transfer.faults import FaultyCopier, parse


def open_copier(device: str, layout: BlockLayout, slab: HostSlab, rank: int, faults: str = "") -> Copier:
    """The copier for an engine whose cache lies on ``device`` ("cpu", "cuda:0", ...)."""
    kind = device.split(":")[0]
    if kind != "cpu":
        raise ValueError(f"no copier for KV caches on {device!r}; supported: cpu")
    from kvbm.transfer.cpu import CpuCopier

    copier: Copier = CpuCopier(layout, slab)
    rules = parse(faults)
    return FaultyCopier(copier, rules, rank) if rules else copier
