"""How a long load is cut into pieces: every layer once, in order, less and less towards the end."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import itertools

from kvbm.storage.layout import TensorSpec, describe
from kvbm.transfer.bulk_loads import _groups


def layout(layers, planes=1):
    shape = (10, 16, 64) if planes == 1 else (2, 10, 16, 64)
    strides = (2048, 128, 2) if planes == 1 else (20480, 2048, 128, 2)
    tensors = [TensorSpec(f"layer{i}", (i + 1) << 24, shape, strides, 2, "bfloat16") for i in range(layers)]
    return describe(tensors, 10)


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 6, 7, 12, 36, 61, 80])
@pytest.mark.parametrize("planes", [1, 2])
def test_groups_cover_every_segment_once_and_in_order(layers, planes):
    described = layout(layers, planes)
    groups = _groups(described)
    assert groups[0].first == 0
    assert groups[-1].last == len(described.segments)
    for left, right in itertools.pairwise(groups):
        assert left.last == right.first
        assert left.offset + left.size == right.offset
    assert groups[-1].offset + groups[-1].size == described.block_bytes


def test_the_last_group_is_one_layer_and_none_is_larger_than_a_sixth():
    sizes = [group.last - group.first for group in _groups(layout(36))]
    assert sizes[-1] == 1
    assert max(sizes) == 6
    assert sizes == sorted(sizes, reverse=True)
