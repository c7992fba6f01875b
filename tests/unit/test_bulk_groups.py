"""Which layers of a long load come together."""

from __future__ import annotations

from itertools import pairwise

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from kvbm.storage.layout import TensorSpec, describe
from kvbm.transfer.bulk_loads import eighth, in_turn, joined, layers_of


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
    assert joined(layers) == (0, len(described.segments), 0, described.block_bytes)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 12, 36, 61, 80])
@pytest.mark.parametrize("room", [1, 1.5, 3, 100], ids=lambda room: f"room for {room}")
def test_every_layer_comes_once_and_in_order(count, room):
    layers = layers_of(layout(count))
    groups = in_turn(layers, int(room * layers[0].row))
    assert groups[0].first == 0
    assert groups[-1].last == layers[-1].last
    assert all(this.last == after.first for this, after in pairwise(groups))
    assert joined(groups) == joined(layers)


@pytest.mark.parametrize("count", [2, 3, 12, 36, 61])
def test_the_later_the_fewer_at_a_time(count):
    layers = layers_of(layout(count))
    sizes = [group.row // layers[0].row for group in in_turn(layers, 3 * layers[0].row)]
    assert sizes[0] == max(1, count // 2)
    assert all(size <= min(3, eighth(layers)) for size in sizes[1:])
    assert sizes[-eighth(layers) :] == [1] * eighth(layers)


def test_no_more_at_a_time_than_a_buffer_takes():
    layers = layers_of(layout(36))
    assert max(group.row for group in in_turn(layers, 2 * layers[0].row)[1:]) == 2 * layers[0].row
    assert [group.row for group in in_turn(layers, 0)[1:]] == [layers[0].row] * 18
