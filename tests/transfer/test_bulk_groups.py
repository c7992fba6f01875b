"""Which layers of a long load come together."""

from __future__ import annotations

from itertools import pairwise

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from kvbm.transfer.bulk_loads import in_halves, layers_of, merge_layers
from kvbm.transfer.layout import TensorSpec, describe


def layout(layers, planes=1):
    shape = (10, 16, 64) if planes == 1 else (2, 10, 16, 64)
    strides = (2048, 128, 2) if planes == 1 else (20480, 2048, 128, 2)
    tensors = [TensorSpec(f"layer{i}", (i + 1) << 24, shape, strides, 2, "bfloat16") for i in range(layers)]
    return describe(tensors, 10)


@pytest.mark.parametrize("planes", [1, 2])
def test_a_layer_is_its_segments(planes):
    described = layout(5, planes)
    layers = layers_of(described)
    assert [layer.offset for layer in layers] == [2048 * planes * i for i in range(5)]
    assert {layer.row for layer in layers} == {2048 * planes}
    for i, layer in enumerate(layers):
        assert {segment.layer for segment in described.segments[layer.first : layer.last]} == {i}
    assert merge_layers(layers) == (0, len(described.segments), 0, described.block_bytes)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 12, 36, 61, 80])
@pytest.mark.parametrize("most", [2, 3, 5, 100])
def test_every_layer_comes_once_and_in_order(count, most):
    layers = layers_of(layout(count))
    groups = in_halves(layers, most)
    assert 2 <= len(groups) <= most
    assert groups[0].first == 0
    assert groups[-1].last == layers[-1].last
    assert all(this.last == after.first for this, after in pairwise(groups))
    assert merge_layers(groups) == merge_layers(layers)


def test_the_later_the_fewer_at_a_time():
    layers = layers_of(layout(36))

    def sizes(most):
        return [group.row // layers[0].row for group in in_halves(layers, most)]

    assert sizes(100) == [18, 9, 5, 2, 1, 1]
    assert sizes(4) == [18, 9, 5, 4]
    assert sizes(2) == [18, 18]
