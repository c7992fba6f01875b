"""A trial of packing on a GPU at start: do the kernels give back every byte, and are they faster than the bus?

Takes a second or two, most of it for Triton, which compiles the kernels that the copier uses later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from kvbm.transfer.kernel_copies import LOCAL_UNPACK_PROGRAMS, UNPACK_WARPS, tile_constants
from kvbm.transfer.kernels import Launcher
from kvbm.transfer.layout import BlockLayout
from kvbm.transfer.packed_stores import BUFFER_BYTES, PACK_WARPS
from kvbm.transfer.packing_kernels import pack_pieces, unpack_pieces

_TRIAL_BYTES = 16 << 20  # four times as much of the GPU's memory in all
_COMPARED = 64  # parts that are compared one by one: each takes memory for its result
_ALIGNMENT = 512
_REPEATS = 4  # of a measurement, so that the time of a launch matters less
# An H200 behind PCIe 5 unpacks eight times as fast as the bus brings packed bytes. Ranks must come to one answer, so
# the bound is far from that.
_MIN_FACTOR = 2.5


class Trial(NamedTuple):
    is_exact: bool
    bus: float  # bytes a second, from pinned memory to the device
    unpacked: float  # raw bytes a second

    def wins(self, layout: BlockLayout) -> bool:
        return self.unpacked * layout.block_bytes >= _MIN_FACTOR * self.bus * layout.raw_bytes


def try_packing(layout: BlockLayout, device: torch.device) -> Trial:
    """Pack and unpack values on the device, in pieces like those of the packed ``layout``."""
    segment = layout.segments[0]
    blocks = max(1, _TRIAL_BYTES // segment.size)
    with torch.cuda.device(device):
        values, back, rows, on_device = _carve(
            device, blocks * segment.size, blocks * segment.size, blocks * segment.packed, _TRIAL_BYTES
        )
        values, back = (part.view(torch.bfloat16).view(blocks, -1) for part in (values, back))
        chance = torch.Generator(device).manual_seed(0)  # the engine's own generator stays as it is
        values.normal_(generator=chance)
        values[:, ::500] *= 2.0**-30
        values[:, 7:128:16] *= 32  # most of these groups get the second base below the first
        back.zero_()
        flags = torch.zeros(blocks, dtype=torch.int32, pin_memory=True)
        host = torch.zeros(_TRIAL_BYTES, dtype=torch.uint8, pin_memory=True)
        pairs = torch.arange(blocks, device=device).repeat(2)
        arrived = torch.zeros(1, dtype=torch.int32, device=device)
        source, target = (
            torch.tensor([[tensor.data_ptr(), segment.size, 0, 0]], device=device) for tensor in (values, back)
        )
        constants = tile_constants(segment, layout.tile_values)
        row = rows.data_ptr(), segment.packed
        packer, unpacker = Launcher(pack_pieces, PACK_WARPS), Launcher(unpack_pieces, UNPACK_WARPS)
        packer.start(blocks, (source, pairs), (0, blocks, *row, flags.data_ptr(), 0, 1, blocks), constants)

        def unpack() -> None:
            programs = min(LOCAL_UNPACK_PROGRAMS, blocks)  # as for a long load
            unpacker.start(programs, (target, pairs, arrived), (0, blocks, *row, 0, 1, blocks), (*constants, False))

        unpacked = values.nbytes / _seconds(unpack)
        bus = host.nbytes / _seconds(lambda: on_device.copy_(host, non_blocking=True))
        pairs_of_bits = zip(*(part.view(torch.int16).chunk(_COMPARED) for part in (values, back)), strict=True)
        is_exact = all(torch.equal(*bits) for bits in pairs_of_bits) and not flags.any()
    return Trial(bool(is_exact), bus, unpacked)


def _carve(device: torch.device, *sizes: int) -> list[torch.Tensor]:
    """Parts of one allocation of the GPU's memory. torch keeps it, and gives it to the buffer of packed stores, which
    is of that size (:mod:`~kvbm.transfer.packed_stores`), or to the engine."""
    aligned = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    memory = torch.empty(max(sum(aligned), BUFFER_BYTES), dtype=torch.uint8, device=device)
    return [part[:size] for part, size in zip(memory[: sum(aligned)].split(aligned), sizes, strict=True)]


def _seconds(work: Callable[[], object]) -> float:
    """By the GPU's clock, the best of five measurements."""
    took = []
    for _ in range(6):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        for _ in range(_REPEATS):
            work()
        ended.record()
        ended.synchronize()
        took.append(float(began.elapsed_time(ended)) / 1e3 / _REPEATS)
    return min(took[1:])
