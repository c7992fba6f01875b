"""The layout of an engine's KV tensors, as byte ranges of blocks.

An engine registers one KV tensor for each layer. Engines differ in which axis counts blocks, whether K and V lie
together, whether heads come before tokens, and whether layers share a storage. A *segment* covers all of these: the
bytes of block *b* begin at ``address + b * stride`` and go to a fixed offset in the block's slot. A slot holds the
segments in layer order, so a load can go layer by layer. Segments that touch in both places are merged, so an engine
that keeps all layers of a block together needs one copy for each block.

A slot keeps the bytes in memory order, not in the tensor's logical order. The description of that order is part of the
namespace, so blocks of different layouts never mix.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import product
from typing import NamedTuple

# Slots begin on page boundaries, because the disk tier reads and writes them with O_DIRECT.
SLOT_ALIGNMENT = 4096


class LayoutError(ValueError):
    """The engine's tensors cannot be described as blocks; the message says why."""


class TensorSpec(NamedTuple):
    """One layer's KV tensor as plain numbers, so that layouts can be tested without an engine."""

    name: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes
    itemsize: int
    dtype: str


class Segment(NamedTuple):
    """A byte range of a block: at ``address + block * stride`` in the engine, at ``offset`` in the block's slot."""

    layer: int
    address: int
    stride: int
    offset: int
    size: int
    packed: int = 0  # bytes in the slot, where blocks are packed (:mod:`kvbm.transfer.packing`)

    @property
    def slot_size(self) -> int:
        return self.packed or self.size


class BlockLayout(NamedTuple):
    """The engine's blocks, as a copier needs them."""

    layers: tuple[str, ...]
    num_blocks: int
    segments: tuple[Segment, ...]  # in layer order
    block_bytes: int  # bytes of one block on this rank, as it lies in a slot
    description: str  # blocks with equal descriptions have exchangeable bytes
    dtype: str = ""  # of all values; empty where they differ, or where layers of different shapes share memory
    tile_values: int = 0  # values that are packed together; 0: slots hold the bytes as they are

    @property
    def slot_bytes(self) -> int:
        return -(-self.block_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT

    @property
    def raw_bytes(self) -> int:
        """Bytes of one block in the engine's memory."""
        return sum(segment.size for segment in self.segments)

    def merged(self) -> tuple[Segment, ...]:
        """Segments merged across layers: the fewest copies that move a whole block."""
        return _merge(self.segments)


def describe(tensors: Sequence[TensorSpec], num_blocks: int) -> BlockLayout:
    """The layout of an engine's cache of ``num_blocks`` blocks."""
    if not tensors:
        raise LayoutError("the engine registered no KV tensors")
    places: dict[int, _Place] = {}
    for layer, tensor in enumerate(tensors):
        stride, dims = _split_blocks(tensor, num_blocks)
        found = _Place(layer, stride, *_contiguous(dims, tensor.itemsize), (f"{tensor.dtype}{_order(dims)}",))
        known = places.get(tensor.address)
        places[tensor.address] = found if known is None else _shared(known, found, tensors)
    segments: list[Segment] = []
    offset = 0
    for address, place in places.items():
        for start in place.starts:
            segments.append(Segment(place.layer, address + start, place.stride, offset, place.size))
            offset += place.size
    shapes = ["+".join(place.shapes) for place in places.values()]
    dtypes = {tensor.dtype.removeprefix("torch.") for tensor in tensors}
    is_uniform = len(dtypes) == 1 and all(len(place.shapes) == 1 for place in places.values())
    return BlockLayout(
        layers=tuple(tensor.name for tensor in tensors),
        num_blocks=num_blocks,
        segments=tuple(_merge(segments, across_layers=False)),
        block_bytes=offset,
        description=_describe(shapes),
        dtype=dtypes.pop() if is_uniform else "",
    )


class _Place(NamedTuple):
    """Where the blocks of the layers at one address lie."""

    layer: int  # the first of them
    stride: int
    starts: list[int]
    size: int
    shapes: tuple[str, ...]


def _shared(one: _Place, other: _Place, tensors: Sequence[TensorSpec]) -> _Place:
    """The place of a layer that reads another layer's KV, or of KV cache groups that share memory.

    A block belongs to one group at a time. Where a layer's part of it is smaller (the state of a Mamba layer beside
    KV), the block is as large as the largest part: the engine fills up the others, to parts of equal size.
    """
    shapes = tuple(dict.fromkeys(one.shapes + other.shapes))
    if (one.stride, one.starts, one.size) == (other.stride, other.starts, other.size):
        return one._replace(shapes=shapes)
    if one.stride == other.stride and one.starts == other.starts == [0]:
        return one._replace(size=max(one.size, other.size), shapes=shapes)
    first, second = tensors[one.layer].name, tensors[other.layer].name
    raise LayoutError(f"layers {first} and {second} share memory but place their blocks differently")


class _Dim(NamedTuple):
    axis: int  # of the tensor; -1 for the pages within a block
    size: int
    stride: int


def _split_blocks(tensor: TensorSpec, num_blocks: int) -> tuple[int, list[_Dim]]:
    """(bytes from one block to the next, dimensions inside a block with the outermost in memory first)."""
    for blocks in (0, 1):
        if blocks < len(tensor.shape) and tensor.shape[blocks] and tensor.shape[blocks] % num_blocks == 0:
            # A kernel may use smaller pages than the scheduler: several pages make up one block.
            pages = tensor.shape[blocks] // num_blocks
            inside = [_Dim(-1, pages, tensor.strides[blocks])]
            for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.strides, strict=True)):
                if axis != blocks:
                    inside.append(_Dim(axis, size, stride))
            dims = sorted((dim for dim in inside if dim.size != 1), key=lambda dim: -dim.stride)
            return tensor.strides[blocks] * pages, dims
    raise LayoutError(
        f"layer {tensor.name}: no axis of shape {tensor.shape} counts the engine's {num_blocks} blocks"
        " (expected as the first or the second)"
    )


def _contiguous(dims: list[_Dim], itemsize: int) -> tuple[list[int], int]:
    """(starts of the contiguous byte ranges of a block, size of each)."""
    size, outer = itemsize, list(dims)
    while outer and outer[-1].stride == size:
        size *= outer.pop().size
    starts = [sum(at) for at in product(*(range(0, dim.size * dim.stride, dim.stride) for dim in outer))]
    return sorted(starts), size


def _order(dims: list[_Dim]) -> str:
    """Axes and sizes of a block from outermost to innermost in memory. The axes matter: 16 heads of 16 tokens differ
    from 16 tokens of 16 heads. Gaps do not matter, because a slot has none."""
    return "".join(f"[{'p' if dim.axis < 0 else dim.axis}:{dim.size}]" for dim in dims)


def _merge(segments: Iterable[Segment], across_layers: bool = True) -> tuple[Segment, ...]:
    merged: list[Segment] = []
    for segment in segments:
        last = merged[-1] if merged else None
        if (
            last is not None
            and (across_layers or last.layer == segment.layer)
            and last.stride == segment.stride
            and last.address + last.size == segment.address
            and last.offset + last.slot_size == segment.offset
        ):
            merged[-1] = last._replace(size=last.size + segment.size, packed=last.packed + segment.packed)
        else:
            merged.append(segment)
    return tuple(merged)


def _describe(shapes: list[str]) -> str:
    if len(set(shapes)) == 1:
        return f"{len(shapes)}*{shapes[0]}"
    return f"{len(shapes)}*mixed-{hashlib.sha256('/'.join(shapes).encode()).hexdigest()[:16]}"
