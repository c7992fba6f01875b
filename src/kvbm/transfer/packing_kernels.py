"""Kernels that pack blocks and unpack them, in Triton: the format of :mod:`~kvbm.transfer.packing`, byte for byte.

Both take any number of segments of any number of blocks in one launch, as :mod:`~kvbm.transfer.kernels` does. A program
takes a piece, which is a segment of a block, and goes through its tiles. A tile is two halves of rows of 128 values: a
row is a group, so its bases and the order of its escapes are found without other rows. Tiles have their own
escapes, so no program waits for another, and the packed bytes do not depend on how many programs there are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvbm.transfer import packing

_GROUP = tl.constexpr(packing.GROUP)
_NEAR = tl.constexpr(packing.NEAR)
_ABOVE_MEAN = tl.constexpr(packing.ABOVE_MEAN)
_ESCAPE = tl.constexpr(packing.ESCAPE)
_ZERO = tl.constexpr(packing.ZERO)
_OVERFLOW = tl.constexpr(packing.OVERFLOW)


@triton.jit(do_not_specialize=["slots_at", "blocks_at", "host", "slot_bytes", "first", "segments", "count"])
def unpack_pieces(
    table,  # int64[segments, 4]: device address of block 0, bytes between blocks, offset in a slot, layer
    pairs,  # int64[]: slots and blocks
    arrived,  # int32[layers]: how many pieces of each layer have ever arrived
    slots_at,  # where in pairs the slots of this launch begin
    blocks_at,  # and the blocks
    host,  # device-visible address of slot 0
    slot_bytes,
    first,  # first segment of this launch
    segments,  # how many
    count,  # pieces a segment
    TILES: tl.constexpr,  # of a piece
    VALUES: tl.constexpr,  # of a tile
    TILE_BYTES: tl.constexpr,  # packed
    ALIGNMENT: tl.constexpr,  # of packed tiles
    SIGNAL: tl.constexpr,
):
    for piece in range(tl.program_id(0), segments * count, tl.num_programs(0)):
        # Pieces of one segment are neighbours in the order of work, so the first segments complete first.
        segment = first + piece // count
        pair = piece % count
        address = tl.load(table + segment * 4) + tl.load(pairs + blocks_at + pair) * tl.load(table + segment * 4 + 1)
        place = host + tl.load(pairs + slots_at + pair) * slot_bytes + tl.load(table + segment * 4 + 2)
        for tile in range(TILES):
            values = tl.multiple_of((address + tile * (2 * VALUES)).to(tl.pointer_type(tl.int16)), 16)
            packed = tl.multiple_of((place + tile * TILE_BYTES).to(tl.pointer_type(tl.uint8)), ALIGNMENT)
            _unpack_tile(packed, values, VALUES, TILE_BYTES)
        if SIGNAL:
            # The barrier waits for the writes of all threads; the release makes them visible to the whole GPU.
            tl.debug_barrier()
            tl.atomic_add(arrived + tl.load(table + segment * 4 + 3), 1, sem="release", scope="gpu")


@triton.jit(do_not_specialize=["slots_at", "blocks_at", "rows", "row_bytes", "flags", "first", "segments", "count"])
def pack_pieces(
    table,
    pairs,
    slots_at,
    blocks_at,
    rows,  # address of the packed block of the first pair; the next ones follow row by row
    row_bytes,
    flags,  # device-visible address of an int32 for every slot: set to 1 where a block does not fit
    first,
    segments,
    count,
    TILES: tl.constexpr,
    VALUES: tl.constexpr,
    TILE_BYTES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    for piece in range(tl.program_id(0), segments * count, tl.num_programs(0)):
        segment = first + piece // count
        pair = piece % count
        address = tl.load(table + segment * 4) + tl.load(pairs + blocks_at + pair) * tl.load(table + segment * 4 + 1)
        place = rows + tl.cast(pair, tl.int64) * row_bytes + tl.load(table + segment * 4 + 2)
        flag = (flags + tl.load(pairs + slots_at + pair) * 4).to(tl.pointer_type(tl.int32))
        for tile in range(TILES):
            values = tl.multiple_of((address + tile * (2 * VALUES)).to(tl.pointer_type(tl.int16)), 16)
            packed = tl.multiple_of((place + tile * TILE_BYTES).to(tl.pointer_type(tl.uint8)), ALIGNMENT)
            _pack_tile(values, packed, flag, VALUES, TILE_BYTES)


@triton.jit
def _unpack_tile(packed, values, VALUES: tl.constexpr, TILE_BYTES: tl.constexpr):
    HALF: tl.constexpr = VALUES // 2
    ROWS: tl.constexpr = HALF // _GROUP
    BASES: tl.constexpr = VALUES + HALF
    COUNT: tl.constexpr = BASES + 4 * ROWS
    ROOM: tl.constexpr = TILE_BYTES - COUNT - 1
    row = tl.arange(0, ROWS)
    at = row[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    low_signs = tl.load(packed + at)
    high_signs = tl.load(packed + HALF + at)
    codes = tl.load(packed + VALUES + at)
    low_bases = tl.load(packed + BASES + row).to(tl.int32)
    high_bases = tl.load(packed + BASES + ROWS + row).to(tl.int32)
    low_seconds = tl.load(packed + BASES + 2 * ROWS + row).to(tl.int32)
    high_seconds = tl.load(packed + BASES + 3 * ROWS + row).to(tl.int32)
    escapes = tl.load(packed + COUNT)
    low_codes = (codes & 15).to(tl.int32)
    high_codes = (codes >> 4).to(tl.int32)
    low = _exponents(low_codes, low_bases, low_seconds)
    high = _exponents(high_codes, high_bases, high_seconds)
    if escapes > 0:
        # Both halves are counted at once, in 16 bits each.
        counts = tl.sum((low_codes == _ESCAPE).to(tl.int32) | ((high_codes == _ESCAPE).to(tl.int32) << 16), 1)
        before = tl.cumsum(counts, 0) - counts
        low_at = before & 0xFFFF
        high_at = (before >> 16) + (tl.sum(counts, 0) & 0xFFFF)
        # Each turn serves the first escape that is left in every row. Rows rarely have more than one or two.
        columns = _GROUP - tl.arange(0, _GROUP)[None, :]
        low_left = tl.where(low_codes == _ESCAPE, columns, 0)
        high_left = tl.where(high_codes == _ESCAPE, columns, 0)
        area = packed + COUNT + 1
        for turn in range(tl.max(tl.maximum(counts & 0xFFFF, counts >> 16), 0)):
            # The bound keeps damaged bytes from making this read beyond the tile.
            low_exponents = tl.load(area + low_at + turn, mask=low_at + turn < ROOM, other=0).to(tl.int32)
            high_exponents = tl.load(area + high_at + turn, mask=high_at + turn < ROOM, other=0).to(tl.int32)
            is_low = (low_left == tl.max(low_left, 1)[:, None]) & (low_left > 0)
            is_high = (high_left == tl.max(high_left, 1)[:, None]) & (high_left > 0)
            low = tl.where(is_low, low_exponents[:, None], low)
            high = tl.where(is_high, high_exponents[:, None], high)
            low_left = tl.where(is_low, 0, low_left)
            high_left = tl.where(is_high, 0, high_left)
    tl.store(values + at, _joined(low_signs, low))
    tl.store(values + HALF + at, _joined(high_signs, high))


@triton.jit
def _pack_tile(values, packed, flag, VALUES: tl.constexpr, TILE_BYTES: tl.constexpr):
    HALF: tl.constexpr = VALUES // 2
    ROWS: tl.constexpr = HALF // _GROUP
    BASES: tl.constexpr = VALUES + HALF
    COUNT: tl.constexpr = BASES + 4 * ROWS
    ROOM: tl.constexpr = TILE_BYTES - COUNT - 1
    row = tl.arange(0, ROWS)
    at = row[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    low = tl.load(values + at).to(tl.int32)
    high = tl.load(values + HALF + at).to(tl.int32)
    low_exponents = (low >> 7) & 0xFF
    high_exponents = (high >> 7) & 0xFF
    low_bases = tl.max(low_exponents, 1)
    high_bases = tl.max(high_exponents, 1)
    low_seconds = _second_bases(low_exponents, low_bases)
    high_seconds = _second_bases(high_exponents, high_bases)
    low_codes = _codes(low_exponents, low_bases, low_seconds)
    high_codes = _codes(high_exponents, high_bases, high_seconds)
    tl.store(packed + at, (((low >> 8) & 0x80) | (low & 0x7F)).to(tl.uint8))
    tl.store(packed + HALF + at, (((high >> 8) & 0x80) | (high & 0x7F)).to(tl.uint8))
    tl.store(packed + VALUES + at, (low_codes | (high_codes << 4)).to(tl.uint8))
    both = tl.join(row, row + ROWS)
    tl.store(packed + BASES + both, tl.join(low_bases, high_bases).to(tl.uint8))
    tl.store(packed + BASES + 2 * ROWS + both, tl.join(low_seconds, high_seconds).to(tl.uint8))
    # Both halves are counted at once, in 16 bits each.
    counts = tl.sum((low_codes == _ESCAPE).to(tl.int32) | ((high_codes == _ESCAPE).to(tl.int32) << 16), 1)
    total = tl.sum(counts, 0)
    low_total = total & 0xFFFF
    escapes = low_total + (total >> 16)
    fits = escapes <= ROOM
    area = packed + COUNT + 1
    tl.store(packed + COUNT, tl.where(fits, escapes, _OVERFLOW).to(tl.uint8))
    unused = tl.arange(0, 128)
    zeros = tl.zeros_like(unused).to(tl.uint8)
    tl.store(area + unused, zeros, mask=(unused >= tl.where(fits, escapes, 0)) & (unused < ROOM))
    if escapes > 0:
        if fits:
            # Each turn takes the first escape that is left in every row. Rows rarely have more than one or two.
            before = tl.cumsum(counts, 0) - counts
            places = area + tl.join(before & 0xFFFF, (before >> 16) + low_total)
            columns = (_GROUP - tl.arange(0, _GROUP)[None, :]) << 8
            low_left = tl.where(low_codes == _ESCAPE, columns | low_exponents, 0)
            high_left = tl.where(high_codes == _ESCAPE, columns | high_exponents, 0)
            for turn in range(tl.max(tl.maximum(counts & 0xFFFF, counts >> 16), 0)):
                low_first = tl.max(low_left, 1)
                high_first = tl.max(high_left, 1)
                firsts = tl.join(low_first, high_first)
                tl.store(places + turn, (firsts & 0xFF).to(tl.uint8), mask=firsts > 0)
                low_left = tl.where(low_left == low_first[:, None], 0, low_left)
                high_left = tl.where(high_left == high_first[:, None], 0, high_left)
        else:
            tl.store(flag, 1)


@triton.jit
def _second_bases(exponents, bases):
    # The sum of the exponents, and above it how many are not 0.
    sums = tl.sum(exponents | ((exponents > 0).to(tl.int32) << 16), 1)
    means = (sums & 0xFFFF) // tl.maximum(sums >> 16, 1)
    rest = tl.max(tl.where(bases[:, None] - exponents < _NEAR, 0, exponents), 1)
    return tl.minimum(rest, means + _ABOVE_MEAN)


@triton.jit
def _codes(exponents, bases, second_bases):
    distances = bases[:, None] - exponents
    others = second_bases[:, None] - exponents + _NEAR
    others = tl.where((others < _NEAR) | (others > _ESCAPE), _ESCAPE, others)
    return tl.where(exponents == 0, _ZERO, tl.where(distances < _NEAR, distances, others))


@triton.jit
def _exponents(codes, bases, second_bases):
    others = second_bases[:, None] + _NEAR - codes
    return tl.where(codes == _ZERO, 0, tl.where(codes < _NEAR, bases[:, None] - codes, others))


@triton.jit
def _joined(signs, exponents):
    signs = signs.to(tl.int32)
    return (((signs & 0x80) << 8) | ((exponents & 0xFF) << 7) | (signs & 0x7F)).to(tl.int16)
