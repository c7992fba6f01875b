"""The packed format of bf16 KV: 12 bits a value and a few bytes, without loss.

A bf16 value has a sign, 8 bits of exponent and 7 bits of mantissa. The exponents of KV lie close together, but for a
few channels whose values are far larger than all others. So the format keeps sign and mantissa as a byte, and four bits
for the exponent: its distance from the largest of a *group* of 128 neighbouring values, or from a second base just
above most of them. A *tile* of values is packed by itself::

    sign and mantissa   one byte a value
    codes               four bits a value: 0 to 2 the distance from the first base, 3 to 13 that from the second base,
                        14 an escape, 15 an exponent of 0 (zeros, denormals). Value i has the low half of byte i, value
                        i + half a tile the high half.
    first bases         the largest exponent of each group, a byte each
    second bases        the largest exponent that is more than 2 below, or 4 above the mean of all that are not 0 if
                        that is less, a byte each
    count               of escapes; 255: more than there is room for
    escapes             exponents of the values with code 14, a byte each in the order of the values; zeros after them,
                        or if there is no room for all

benchmarks/packing.py has the escapes of real KV and of KV with outlier channels. Every tile has the same room for them,
and so every slot the same size: at most 0.768 of the raw bytes. A block with a tile that does not fit is not kept.

Equal blocks have equal packed bytes, on a CPU and on a GPU (:mod:`~kvbm.transfer.packing_kernels`). The checksums of
the tiers cover the packed bytes, and nothing but a copier unpacks them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvbm.transfer.layout import BlockLayout, Segment

VERSION = 2
GROUP = 128
NEAR = 3  # codes of distances from the first base
ABOVE_MEAN = 4
ESCAPE = 14
ZERO = 15
OVERFLOW = 255

_MAX_VALUES = 4096  # of a tile
_MIN_VALUES = 1024  # smaller tiles have room for too few escapes
_MAX_RATIO = 0.7685
_ALIGNMENT = 16  # of blocks in the engine's memory, for a GPU's widest loads and stores
_VALUE_BYTES = 2
_TILES_AT_A_TIME = 64  # what numpy makes of them stays in a core's cache

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]


class DamagedBlockError(ValueError):
    """Packed bytes that no block has."""


@dataclass(frozen=True)
class Tile:
    """Where the parts of a packed tile begin."""

    values: int

    @property
    def raw_size(self) -> int:
        return self.values * _VALUE_BYTES

    @property
    def bases(self) -> int:
        return self.values + self.values // 2

    @property
    def second_bases(self) -> int:
        return self.bases + self.values // GROUP

    @property
    def count(self) -> int:
        return self.second_bases + self.values // GROUP

    @property
    def escapes(self) -> int:
        return self.count + 1

    @property
    def room(self) -> int:
        """The most escapes that fit."""
        return self.size - self.escapes

    @property
    def size(self) -> int:
        return int(self.raw_size * _MAX_RATIO) // 8 * 8


def pack_layout(layout: BlockLayout) -> BlockLayout:
    """The layout with packed slots. Raises ValueError, with the reason, for a cache that cannot be packed."""
    if layout.dtype != "bfloat16":
        raise ValueError(f"its values are {layout.dtype or 'of several kinds'}, not bfloat16")
    sizes = {segment.size for segment in layout.segments}
    values = min((size & -size) // _VALUE_BYTES for size in sizes)
    if values < _MIN_VALUES:
        raise ValueError(
            f"its pieces of {min(sizes)} bytes are not multiples of {_MIN_VALUES * _VALUE_BYTES} bytes; "
            "larger blocks (--block-size) may be"
        )
    if any(number % _ALIGNMENT for segment in layout.segments for number in (segment.address, segment.stride)):
        raise ValueError(f"its blocks do not begin at multiples of {_ALIGNMENT} bytes")
    tile = Tile(min(values, _MAX_VALUES))
    segments: list[Segment] = []
    offset = 0
    for segment in layout.segments:
        packed = segment.size // tile.raw_size * tile.size
        segments.append(segment._replace(offset=offset, packed=packed))
        offset += packed
    return layout._replace(
        segments=tuple(segments),
        block_bytes=offset,
        description=f"{layout.description} packed {VERSION}:{tile.values}:{GROUP}:{tile.room}",
        tile_values=tile.values,
    )


def pack(values: Words, packed: Bytes) -> npt.NDArray[np.intp]:
    """Pack ``values[n, tile.values]`` into ``packed[n, tile.size]``. Returns the tiles that have too many escapes."""
    overflows = [
        start + _pack(values[start : start + _TILES_AT_A_TIME], packed[start : start + _TILES_AT_A_TIME])
        for start in range(0, len(values), _TILES_AT_A_TIME)
    ]
    return np.concatenate(overflows) if overflows else np.zeros(0, np.intp)


def _pack(values: Words, packed: Bytes) -> npt.NDArray[np.intp]:
    tile = Tile(values.shape[1])
    exponents = (values >> 7).astype(np.uint8)  # without the sign, which is beyond eight bits
    groups = exponents.reshape(len(values), -1, GROUP)
    bases = groups.max(axis=2)
    codes = bases[:, :, None] - groups
    is_near = codes < NEAR
    means = groups.sum(axis=2, dtype=np.uint16) // np.maximum(np.count_nonzero(groups, axis=2), 1)
    second_bases = np.minimum(np.where(is_near, 0, groups).max(axis=2), means + ABOVE_MEAN).astype(np.uint8)
    # Exponents above the second base are at most 244 above it, and so wrap around to an escape.
    others = np.minimum(second_bases[:, :, None] - groups, ESCAPE - NEAR) + NEAR
    codes = np.where(is_near, codes, others.astype(np.uint8))
    codes = codes.reshape(exponents.shape)
    codes[exponents == 0] = ZERO
    half = tile.values // 2
    packed[:, : tile.values] = (values >> 8) & 0x80 | values & 0x7F
    packed[:, tile.values : tile.bases] = codes[:, :half] | codes[:, half:] << 4
    packed[:, tile.bases : tile.second_bases] = bases
    packed[:, tile.second_bases : tile.count] = second_bases
    packed[:, tile.escapes :] = 0
    escaped = codes == ESCAPE
    counts = escaped.sum(axis=1)
    packed[:, tile.count] = np.where(counts > tile.room, OVERFLOW, counts)
    if counts.any():
        escaped[counts > tile.room] = False
        rows, columns = np.nonzero(escaped)
        packed[rows, tile.escapes + _ranks(escaped.sum(axis=1))] = exponents[rows, columns]
    return np.flatnonzero(counts > tile.room)


def unpack(packed: Bytes, values: Words) -> None:
    """Undo :func:`pack`. Raises DamagedBlockError where the number of escapes is not what the tile says."""
    for start in range(0, len(packed), _TILES_AT_A_TIME):
        _unpack(packed[start : start + _TILES_AT_A_TIME], values[start : start + _TILES_AT_A_TIME])


def _unpack(packed: Bytes, values: Words) -> None:
    tile = Tile(values.shape[1])
    halves = packed[:, tile.values : tile.bases]
    codes = np.concatenate((halves & 15, halves >> 4), axis=1)
    bases = packed[:, tile.bases : tile.second_bases, None]
    second_bases = packed[:, tile.second_bases : tile.count, None]
    groups = codes.reshape(len(packed), -1, GROUP)
    exponents = np.where(groups < NEAR, bases - groups, second_bases + NEAR - groups).reshape(codes.shape)
    exponents[codes == ZERO] = 0
    escaped = codes == ESCAPE
    counts = escaped.sum(axis=1)
    if (counts != packed[:, tile.count]).any():
        raise DamagedBlockError("a packed block is damaged: the number of its escapes does not match")
    if counts.any():
        rows, columns = np.nonzero(escaped)
        exponents[rows, columns] = packed[rows, tile.escapes + _ranks(counts)]
    signs = packed[:, : tile.values].astype(np.uint16)
    values[:] = (signs & 0x80) << 8 | exponents.astype(np.uint16) << 7 | signs & 0x7F


def _ranks(counts: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """Of every escape of all tiles: how many there are before it in its own tile."""
    firsts = np.cumsum(counts) - counts
    return np.arange(counts.sum()) - np.repeat(firsts, counts)
