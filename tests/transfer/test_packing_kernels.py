"""The kernels that pack and unpack write the very bytes that numpy does. Triton's interpreter runs them, without a GPU.

The interpreter is chosen when the kernels are imported, so they run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

BLOCKS, SEGMENTS, TILES = 3, 2, 2
ORDER, SLOTS = [2, 0, 1], [4, 0, 9]


@pytest.mark.parametrize(("size", "programs"), [(1024, 5), (4096, 1)])
def test_the_kernels_write_the_bytes_that_numpy_does(size, programs):
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", __file__, str(size), str(programs)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def contents(size):
    """[segments, blocks, tiles, values] like KV, with escapes; a tile of block 1 cannot be packed."""
    source = np.random.default_rng(size)
    values = source.standard_normal((SEGMENTS, BLOCKS, TILES, size)).astype(np.float32)
    values[source.random(values.shape) < 0.004] *= 2.0**-30
    values[source.random(values.shape) < 0.01] = 0
    words = (values.view(np.uint32) >> 16).astype(np.uint16)
    words[0, 0, 0] = np.arange(size) << 3  # every exponent
    words[1, 2, 1] = np.arange(0xFFFF, 0xFFFF - size, -1)
    words[0, 1, 1] = source.integers(0, 65536, size)
    return words


def compare(size, programs):
    import torch

    from kvbm.transfer.packing import Tile, pack
    from kvbm.transfer.packing_kernels import pack_pieces, unpack_pieces

    tile = Tile(size)
    words = contents(size)
    engine = torch.from_numpy(words.view(np.int16).copy())
    stride, row = TILES * tile.raw_size, SEGMENTS * TILES * tile.size
    constants = (TILES, size, tile.size, min(16, tile.size & -tile.size))

    def table(tensor):
        rows = [[tensor.data_ptr() + i * BLOCKS * stride, stride, i * TILES * tile.size, i] for i in range(SEGMENTS)]
        return torch.tensor(rows, dtype=torch.int64)

    expected = np.zeros((BLOCKS, SEGMENTS, TILES, tile.size), np.uint8)
    unpackable = set()
    for at, block in enumerate(ORDER):
        for segment in range(SEGMENTS):
            if len(pack(words[segment, block], expected[at, segment])):
                unpackable.add(SLOTS[at])
    assert SLOTS[ORDER.index(1)] in unpackable
    assert len(unpackable) < len(SLOTS)

    rows, flags = torch.full((BLOCKS, row), 7, dtype=torch.uint8), torch.zeros(10, dtype=torch.int32)
    pack_pieces[(programs,)](
        table(engine), torch.tensor(SLOTS + ORDER), 0, BLOCKS, rows.data_ptr(), row, flags.data_ptr(), 0, SEGMENTS,
        BLOCKS, *constants,
    )  # fmt: skip
    assert (rows.numpy().reshape(expected.shape) == expected).all()
    assert set(flags.nonzero().flatten().tolist()) == unpackable

    back, arrived = torch.zeros_like(engine), torch.zeros(SEGMENTS, dtype=torch.int32)
    unpack_pieces[(programs,)](
        table(back), torch.tensor([0, 1, 2, *ORDER]), arrived, 0, BLOCKS, rows.data_ptr(), row, 0, SEGMENTS, BLOCKS,
        *constants, True,
    )  # fmt: skip
    assert arrived.tolist() == [BLOCKS] * SEGMENTS
    good = [block for at, block in enumerate(ORDER) if SLOTS[at] not in unpackable]
    assert (back.numpy().view(np.uint16)[:, good] == words[:, good]).all()

    # Damaged bytes may give any values, but nothing may be written elsewhere.
    rows.random_(0, 256)
    around = torch.full((3, *engine.shape), 77, dtype=torch.int16)
    unpack_pieces[(programs,)](
        table(around[1]), torch.tensor([0, 1, 2, *ORDER]), arrived, 0, BLOCKS, rows.data_ptr(), row, 0, SEGMENTS,
        BLOCKS, *constants, False,
    )  # fmt: skip
    assert (around[0] == 77).all()
    assert (around[2] == 77).all()
    assert arrived.tolist() == [BLOCKS] * SEGMENTS


if __name__ == "__main__":
    compare(*map(int, sys.argv[1:]))
