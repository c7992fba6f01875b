"""Copies between the engine's cache and the host slab of one rank."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvbm.testing.fault_rules import COPY_KINDS, Fault, parse
from kvbm.transfer.base import Copier, Slab
from kvbm.transfer.layout import BlockLayout
from kvbm.transfer.packing import pack_layout

if TYPE_CHECKING:
    from kvbm.transfer.broadcast import Passing

_MIN_SLOT_BYTES = 16 << 10  # of packed blocks on a GPU: the copy engine takes a microsecond for each


def open_copier(
    device: str,
    layout: BlockLayout,
    slab: Slab,
    rank: int,
    faults: str = "",
    staging: int = 0,
    stores: str = "auto",
    passing: Passing | None = None,
) -> Copier:
    """The copier for an engine whose cache lies on ``device`` ("cpu", "cuda:0", ...).

    ``passing``: set where ranks hold the same KV and the first rank loads for all of them.
    """
    kind = device.split(":")[0]
    rules = [rule for rule in parse(faults) if rule.kind in COPY_KINDS]
    copier: Copier
    if kind == "cpu":
        from kvbm.transfer.cpu import CpuCopier

        copier = _faulty(CpuCopier(layout, slab), rules, rank)
        if passing is not None:
            from kvbm.transfer.broadcast import CpuBroadcastCopier

            copier = CpuBroadcastCopier(copier, passing, layout)
    elif kind == "cuda":
        import torch

        from kvbm.transfer.cuda import CudaCopier

        # A rank that receives its blocks from another rank needs no staging buffers.
        staging = staging if passing is None or passing.wire.sends else 0
        cuda = CudaCopier(layout, slab, torch.device(device), staging, stores)
        copier = _faulty(cuda, rules, rank)
        if passing is not None:
            from kvbm.transfer.cuda_broadcast import CudaBroadcastCopier

            copier = CudaBroadcastCopier(copier, cuda, passing, layout)
    else:
        raise ValueError(f"no copier for KV caches on {device!r}; supported: cpu, cuda")
    return copier


def pack_slots(device: str, layout: BlockLayout, if_it_wins: bool = False) -> tuple[BlockLayout, str]:
    """(the layout with packed slots, for the log: what a trial on the GPU has measured). Raises ValueError, with the
    reason, where blocks cannot be packed.

    ``if_it_wins``: raise as well where packing makes a GPU's loads no faster.
    """
    packed = pack_layout(layout)
    if device.split(":")[0] != "cuda":
        return packed, ""
    import torch

    from kvbm.transfer.cuda_calls import batch_function

    if packed.block_bytes < _MIN_SLOT_BYTES:
        raise ValueError(f"its blocks of {packed.block_bytes} bytes are too small for the GPU's copy engine")
    if batch_function() is None:
        raise ValueError("this CUDA runtime cannot copy in batches (cudaMemcpyBatchAsync)")
    began = time.monotonic()
    try:
        from kvbm.transfer.packing_trial import try_packing

        trial = try_packing(packed, torch.device(device))
    except Exception as error:
        raise ValueError(f"the trial on the GPU failed: {type(error).__name__}: {error}") from error
    if not trial.is_exact:
        raise ValueError("the GPU's kernels do not give back the same bytes")
    rates = f"the GPU unpacks {trial.unpacked / 1e9:.0f} GB/s, the bus carries {trial.bus / 1e9:.0f} GB/s"
    if if_it_wins and not trial.wins(packed):
        raise ValueError(rates)
    return packed, f": {rates}, found in {time.monotonic() - began:.1f} s"


def _faulty(copier: Copier, rules: list[Fault], rank: int) -> Copier:
    if not rules:
        return copier
    from kvbm.testing.copier_faults import FaultyCopier

    return FaultyCopier(copier, rules, rank)
