"""Packed blocks on a GPU that runs its streams in any order it may: the histories of test_bulk_order.py.

A piece is a few words here. Packing makes fewer of them, which remember their version. Packing or unpacking a piece
whose words are not all of one version is an error of order, and raises.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import test_bulk_order as histories  # noqa: E402

from kvbm.transfer import engine_copies, kernel_copies, packed_stores, packing  # noqa: E402

WORD = 128
TILE = 256  # values: four words, and three when packed
PACKED = 1 << 32  # address of the buffer for stores


class PackedHistory(histories.History):
    def __init__(self, seed, patch, fault=0.0):
        patch.setattr(histories, "WORD", WORD)
        patch.setattr(packing, "_MIN_VALUES", TILE)
        patch.setattr(packing, "_MAX_VALUES", TILE)
        patch.setattr(packing, "_MAX_RATIO", 0.75)
        patch.setattr(kernel_copies, "unpack_pieces", histories.Compiled(self.unpack_pieces, constants=5))
        patch.setattr(packed_stores, "pack_pieces", histories.Compiled(self.pack_pieces, constants=4))
        patch.setattr(engine_copies, "EngineCopies", self.open_stores)
        super().__init__(seed, patch, fault)
        patch.setattr(packed_stores, "MAX_CALL_BYTES", self.source.choice((1, 3)) * self.layout.block_bytes)
        if self.copier._engine is None:
            self.copier._engine = self.open_stores(self.layout, self.copier._slab, None, 0, self.batch)

    def open_stores(self, layout, slab, device, priority, batch):
        """A GPU with little memory left has a buffer of a few rows only, which long stores use again and again."""
        torch_of_copies = kernel_copies.torch
        rows = self.source.choice((1, 2, 5))
        free = 4 * rows * layout.block_bytes if rows > 1 else 1  # bytes; a row is the least
        cuda = SimpleNamespace(**vars(torch.cuda), mem_get_info=lambda _: (free, 1 << 40))

        def empty(*shape, **options):
            if options.get("dtype") is torch.uint8:
                size = rows * layout.block_bytes
                self.gpu.memory.update(dict.fromkeys(range(PACKED, PACKED + size, WORD)))
                return SimpleNamespace(data_ptr=lambda: PACKED)
            return torch_of_copies.empty(*shape, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                packed_stores, "torch",
                SimpleNamespace(empty=empty, zeros=torch_of_copies.zeros, int32=torch.int32, int64=torch.int64,
                                uint8=torch.uint8, cuda=cuda),
            )  # fmt: skip
            patch.setattr(packed_stores, "copy_numbers", kernel_copies.copy_numbers)
            stores = packed_stores.PackedStores(layout, slab, device, priority, batch)
        stores._table = stores._table.tolist()
        return stores

    def make_layout(self):
        wide = WORD * 4 * self.source.choice((1, 2))
        tensors = []
        for i in range(histories.LAYERS):
            size = wide if i == 1 else WORD * 4
            address = histories.CACHE + i * (1 << 20)
            shape, strides = (2, histories.BLOCKS, size // 2), (4096 * histories.BLOCKS, 4096, 2)
            tensors.append(histories.TensorSpec(f"layer{i}", address, shape, strides, 2, "bfloat16"))
        return packing.pack_layout(histories.describe(tensors, histories.BLOCKS))

    def move(self, source, source_size, target, target_size):
        """Pack or unpack: all words of the source are of one version of one segment."""
        words = [self.gpu.memory[source + at] for at in range(0, source_size, WORD)]
        assert words[0] is not None, "nothing has been there yet"
        version, segment, _ = words[0]
        assert words == [(version, segment, at) for at in range(0, source_size, WORD)]
        for at in range(0, target_size, WORD):
            assert target + at in self.gpu.memory, "memory that nobody has"
            self.gpu.memory[target + at] = (version, segment, at)

    def submit(self, pieces):
        self.source.shuffle(pieces)
        stream = self.gpu.current[-1]
        for piece in pieces:
            stream.submit(piece)

    def pack_pieces(self, table, pairs, _slots_at, blocks_at, rows, row, _flags, first, segments, count, *constants):
        tiles, values, size, _ = constants

        def pack(segment, pair):
            address, stride, offset, _ = table[segment]
            block = address + int(pairs[blocks_at + pair]) * stride
            self.move(block, tiles * values * 2, rows + pair * row + offset, tiles * size)

        pieces = [(first + i // count, i % count) for i in range(segments * count)]
        self.submit([lambda piece=piece: pack(*piece) for piece in pieces])

    def unpack_pieces(
        self, table, pairs, arrived, slots_at, blocks_at, host, pitch, first, segments, count, tiles, values, size,
        _alignment, signal,
    ):  # fmt: skip
        def unpack(segment, pair):
            address, stride, offset, layer = table[segment]
            slot = host + int(pairs[slots_at + pair]) * pitch + offset
            block = address + int(pairs[blocks_at + pair]) * stride
            self.move(slot, tiles * size, block, tiles * values * 2)
            arrived.counts[layer] += signal

        pieces = [(first + i // count, i % count) for i in range(segments * count)]
        self.submit([lambda piece=piece: unpack(*piece) for piece in pieces])

    def compare(self, address, segments, version):
        for i in segments:
            segment = self.layout.segments[i]
            start = address(segment)
            for at in range(0, segment.slot_size if start >= histories.SLAB else segment.size, WORD):
                assert self.gpu.memory[start + at] == (version, i, at)
        self.compared += 1


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_whatever_order_the_gpu_keeps_packed_blocks_are_whole_and_in_time(first):
    assert histories.run_ten(PackedHistory, first)[0] > 100


@pytest.mark.parametrize("first", range(100, 120, 10))
def test_of_a_packed_load_that_has_failed_nothing_comes_later(first):
    assert histories.run_ten(PackedHistory, first, 20, histories.FAULTS)[1]
