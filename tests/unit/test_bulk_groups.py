"""How a long load is cut: a front of most layers, which comes in one piece a slot, and the last layers behind it."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from kvbm.storage.layout import TensorSpec, describe
from kvbm.transfer.bulk_loads import front


def layout(layers, planes=1):
    shape = (10, 16, 64) if planes == 1 else (2, 10, 16, 64)
    strides = (2048, 128, 2) if planes == 1 else (20480, 2048, 128, 2)
    tensors = [TensorSpec(f"layer{i}", (i + 1) << 24, shape, strides, 2, "bfloat16") for i in range(layers)]
    return describe(tensors, 10)


@pytest.mark.parametrize("layers", [2, 3, 5, 8, 12, 36, 61, 80])
@pytest.mark.parametrize("planes", [1, 2])
def test_the_front_ends_where_a_layer_begins_and_leaves_the_last_eighth(layers, planes):
    described = layout(layers, planes)
    split, size = front(described)
    left = max(1, layers // 8)
    assert described.segments[split].layer == layers - left
    assert described.segments[split - 1].layer == layers - left - 1
    assert size == described.segments[split].offset == sum(s.size for s in described.segments[:split])


def test_a_single_layer_has_no_front():
    assert front(layout(1)) == (0, 0)
