"""How a long load is cut: a front of most layers, which comes in one piece a slot, and the last layers behind it."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from kvbm.storage.layout import TensorSpec, describe
from kvbm.transfer.bulk_loads import layers_of, split, tail


def layout(layers, planes=1):
    shape = (10, 16, 64) if planes == 1 else (2, 10, 16, 64)
    strides = (2048, 128, 2) if planes == 1 else (20480, 2048, 128, 2)
    tensors = [TensorSpec(f"layer{i}", (i + 1) << 24, shape, strides, 2, "bfloat16") for i in range(layers)]
    return describe(tensors, 10)


@pytest.mark.parametrize("layers", [2, 3, 5, 8, 12, 36, 61, 80])
@pytest.mark.parametrize("planes", [1, 2])
def test_the_front_ends_where_a_layer_begins_and_leaves_the_last_eighth(layers, planes):
    described = layout(layers, planes)
    first = split(described)
    left = max(1, layers // 8)
    assert described.segments[first].layer == layers - left
    assert described.segments[first - 1].layer == layers - left - 1
    assert layers_of(described, 0, first).row == described.segments[first].offset
    last = tail(described)
    assert [described.segments[part.first].layer for part in last] == list(range(layers - left, layers))
    assert [part.offset for part in last] == [described.segments[part.first].offset for part in last]
    assert described.segments[first].offset + sum(part.row for part in last) == described.block_bytes


def test_a_single_layer_has_no_front():
    assert split(layout(1)) == 0
