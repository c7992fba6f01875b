"""Engine tensors as blocks: where the bytes of a block are, in plain numbers."""

from __future__ import annotations

import pytest

from kvbm.transfer.layout import SLOT_ALIGNMENT, LayoutError, Segment, TensorSpec, describe

BLOCKS = 10


def tensor(name="layer0", address=1 << 20, shape=(BLOCKS, 2, 16, 64), strides=None, itemsize=2, dtype="bfloat16"):
    if strides is None:
        strides, size = [], itemsize
        for n in reversed(shape):
            strides.insert(0, size)
            size *= n
    return TensorSpec(name, address, tuple(shape), tuple(strides), itemsize, dtype)


def test_a_contiguous_block_is_one_segment():
    layout = describe([tensor()], BLOCKS)
    (segment,) = layout.segments
    assert segment == Segment(0, 1 << 20, 2 * 16 * 64 * 2, 0, 2 * 16 * 64 * 2)
    assert layout.block_bytes == segment.size


def test_k_and_v_apart_are_two_segments_next_to_each_other_in_the_slot():
    layout = describe([tensor(shape=(2, BLOCKS, 16, 64))], BLOCKS)
    k, v = layout.segments
    page = 16 * 64 * 2
    assert (k.address, k.offset, k.size) == (1 << 20, 0, page)
    assert (v.address, v.offset, v.size) == ((1 << 20) + BLOCKS * page, page, page)
    assert k.stride == v.stride == page


def test_a_permuted_view_of_contiguous_memory_is_still_one_segment():
    # logical [blocks, heads, tokens, dim], tokens outside heads in memory
    spec = tensor(strides=(2 * 16 * 64 * 2, 64 * 2, 2 * 64 * 2, 2))
    assert len(describe([spec], BLOCKS).segments) == 1


def test_layers_that_touch_are_merged_into_one_copy_a_block():
    page = 2 * 16 * 64 * 2
    layers = [
        tensor(f"layer{i}", address=(1 << 20) + i * page, strides=(4 * page, 16 * 64 * 2, 64 * 2, 2)) for i in range(4)
    ]
    layout = describe(layers, BLOCKS)
    assert len(layout.segments) == 4
    (whole,) = layout.merged()
    assert (whole.size, whole.stride, whole.offset) == (4 * page, 4 * page, 0)


def test_layers_in_storages_of_their_own_are_not_merged():
    layers = [tensor(f"layer{i}", address=(1 << 20) + i * (1 << 24)) for i in range(3)]
    assert len(describe(layers, BLOCKS).merged()) == 3


def test_a_block_of_several_kernel_pages_spans_them():
    layout = describe([tensor(shape=(BLOCKS * 4, 8, 64))], BLOCKS)
    (segment,) = layout.segments
    assert segment.size == segment.stride == 4 * 8 * 64 * 2


def test_slots_begin_on_pages():
    layout = describe([tensor(shape=(BLOCKS, 7, 3), itemsize=1, dtype="uint8")], BLOCKS)
    assert layout.block_bytes == 21
    assert layout.slot_bytes == SLOT_ALIGNMENT


def test_sixteen_heads_of_sixteen_tokens_are_not_sixteen_tokens_of_sixteen_heads():
    page = 16 * 16 * 64 * 2
    heads_first = tensor(shape=(BLOCKS, 16, 16, 64))
    tokens_first = tensor(shape=(BLOCKS, 16, 16, 64), strides=(page, 64 * 2, 16 * 64 * 2, 2))
    assert describe([heads_first], BLOCKS).description != describe([tokens_first], BLOCKS).description


@pytest.mark.parametrize(
    "other",
    [
        tensor(dtype="float16"),
        tensor(shape=(BLOCKS, 2, 16, 128)),
        tensor(shape=(BLOCKS, 4, 16, 64)),
        tensor(shape=(2, BLOCKS, 16, 64)),
    ],
    ids=["dtype", "head size", "heads", "k and v apart"],
)
def test_whatever_changes_the_bytes_changes_the_description(other):
    assert describe([tensor()], BLOCKS).description != describe([other], BLOCKS).description


def test_addresses_and_names_do_not_change_the_description():
    left = describe([tensor("a", 4096), tensor("b", 1 << 30)], BLOCKS)
    right = describe([tensor("x", 1 << 40), tensor("y", 1 << 41)], BLOCKS)
    assert left.description == right.description


def test_a_tensor_without_a_block_axis_is_refused_with_its_name_and_shape():
    with pytest.raises(LayoutError, match=r"layer odd: no axis of shape \(3, 7, 64\) counts the engine's 10 blocks"):
        describe([tensor("odd", shape=(3, 7, 64))], BLOCKS)


def test_no_tensors_is_an_error():
    with pytest.raises(LayoutError, match="no KV tensors"):
        describe([], BLOCKS)


def test_layers_in_the_same_memory_are_copied_once():
    """Layers that use another's KV, and layers of groups that take turns in it."""
    first, second = tensor("a"), tensor("b", 1 << 30)
    alone, shared = describe([first, second], BLOCKS), describe([first, second, tensor("c")], BLOCKS)
    assert shared.segments == alone.segments
    assert (shared.block_bytes, shared.description) == (alone.block_bytes, alone.description)
    assert shared.layers == ("a", "b", "c")


@pytest.mark.parametrize("first", ["kv", "state"])
def test_a_smaller_part_in_the_same_memory_takes_the_room_of_the_largest(first):
    """The state of a layer without attention: vLLM fills it up to the size of an attention block."""
    kv, page = tensor("kv"), 2 * 16 * 64 * 2
    state = tensor("state", shape=(BLOCKS, 50), strides=(page, 2))
    layout = describe([kv, state] if first == "kv" else [state, kv], BLOCKS)
    assert [(segment.stride, segment.size) for segment in layout.segments] == [(page, page)]
    assert layout.block_bytes == page
    other = tensor("state", shape=(BLOCKS, 51), strides=(page, 2))
    assert layout.description != describe([kv, other], BLOCKS).description != describe([kv], BLOCKS).description


def test_layers_that_share_memory_in_different_ways_are_refused():
    with pytest.raises(LayoutError, match="layers a and b share memory but place their blocks differently"):
        describe([tensor("a"), tensor("b", shape=(BLOCKS, 2, 16, 32))], BLOCKS)
