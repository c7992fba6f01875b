"""The packed format: every bit pattern comes back, in slots of one size, and what does not fit is said so."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kvbm.transfer import pack_slots
from kvbm.transfer.layout import TensorSpec, describe
from kvbm.transfer.packing import GROUP, OVERFLOW, DamagedBlockError, Tile, pack, pack_layout, unpack

SIZES = (1024, 2048, 4096)
EVERY = np.arange(65536, dtype=np.uint16)


def exponents(values):
    return values >> 7 & 0xFF


def round_trip(values):
    """(what came back, tiles that did not fit)"""
    tile = Tile(values.shape[1])
    packed = np.full((len(values), tile.size), 0xAA, np.uint8)
    overflows = pack(values, packed)
    fit = np.setdiff1d(np.arange(len(values)), overflows)
    back = np.zeros_like(values)
    rows = np.zeros_like(values[fit])
    unpack(packed[fit], rows)
    back[fit] = rows
    return back, overflows.tolist()


def bfloat16(values):
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("size", SIZES)
def test_a_packed_slot_takes_at_most_0768_of_the_bytes(size):
    tile = Tile(size)
    assert tile.size / tile.raw_size <= 0.768
    assert tile.room >= 0.0145 * size
    assert tile.size % 8 == 0


@pytest.mark.parametrize("size", SIZES)
def test_every_bit_pattern_comes_back_among_its_neighbours(size):
    values = EVERY.reshape(-1, size)
    back, overflows = round_trip(values)
    assert not overflows
    assert (back == values).all()


@pytest.mark.parametrize("size", [1024, 4096])
def test_every_finite_bit_pattern_comes_back_as_an_escape(size):
    finite = EVERY[exponents(EVERY) < 255]
    finite = finite[np.argsort(exponents(finite), kind="stable")]
    escapes = 0
    tile = Tile(size)
    packed = np.empty((1, tile.size), np.uint8)
    for start in range(0, len(finite), 15):
        part = finite[start : start + 15]
        base = min(int(exponents(part).max()) + 20, 254)
        values = np.full((1, size), base << 7, np.uint16)
        values[0, 63::GROUP] = base - 4 << 7
        values[0, np.arange(len(part)) * (size // 15 - 1)] = part
        back, overflows = round_trip(values)
        assert not overflows
        assert (back == values).all()
        pack(values, packed)
        escapes += int(packed[0, tile.count])
    assert escapes > 55_000


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("times", [60, 1000, 1e6])
def test_a_channel_with_far_larger_values_makes_few_escapes(size, times):
    values = np.random.default_rng(0).standard_normal((20, size))
    values[:, 5::GROUP] *= times
    words = bfloat16(values)
    tile = Tile(size)
    packed = np.empty((20, tile.size), np.uint8)
    assert pack(words, packed).size == 0
    assert packed[:, tile.count].mean() < 0.004 * size
    assert (round_trip(words)[0] == words).all()


@pytest.mark.parametrize("size", SIZES)
def test_infinities_and_every_nan_come_back_among_zeros(size):
    special = EVERY[exponents(EVERY) == 255]
    values = np.zeros((len(special) * GROUP // size, size), np.uint16)
    values.reshape(-1)[::GROUP] = special
    back, overflows = round_trip(values)
    assert not overflows
    assert (back == values).all()


@given(
    arrays.arrays(np.uint16, (2, 1024), elements=st.integers(0, 65535), fill=st.integers(0, 65535)),
    st.sampled_from((0, 0x3F80, 0x8000, 0x0100)),
)
@settings(max_examples=60, deadline=None)
def test_whatever_fits_comes_back(values, background):
    """Mostly one value, with others among them."""
    values[:, 64:] = np.where(values[:, 64:] == values[0, -1], background, values[:, 64:])
    back, overflows = round_trip(values)
    fit = [row for row in range(2) if row not in overflows]
    assert (back[fit] == values[fit]).all()


@given(st.integers(0, 2**32 - 1), st.sampled_from(SIZES), st.floats(0, 0.012), st.floats(-30, 30))
@settings(max_examples=40, deadline=None)
def test_values_like_those_of_kv_fit_and_come_back(seed, size, tiny, scale):
    source = np.random.default_rng(seed)
    values = source.standard_normal((3, size)) * 2.0**scale
    at = source.permuted(np.tile(np.arange(size) < int(tiny * size), (3, 1)), axis=1)
    values[at] = values[at] * 2.0**-25
    values[source.random(values.shape) < 0.01] = 0
    words = bfloat16(values)
    back, overflows = round_trip(words)
    if tiny < 0.01:
        assert not overflows
    fit = [row for row in range(3) if row not in overflows]
    assert (back[fit] == words[fit]).all()


@pytest.mark.long
def test_a_hundred_thousand_blocks_come_back():
    source = np.random.default_rng(5)
    kept = 0
    for _ in range(50):
        scale = 2.0 ** source.uniform(-12, 6, (2000, 1))
        words = bfloat16(source.standard_normal((2000, 1024)) * scale)
        at = source.random(words.shape) < 0.005
        words[at] = source.integers(0, 0x4000, at.sum())
        back, overflows = round_trip(words)
        fit = np.setdiff1d(np.arange(2000), overflows)
        assert (back[fit] == words[fit]).all()
        kept += len(fit)
    assert kept > 99_000


@pytest.mark.long
def test_blocks_of_a_real_model_fit_and_come_back(benchmark_script):
    """The KV of SmolLM2-135M-Instruct, which reads the documentation: 30 layers, 16 tokens a block."""
    pytest.importorskip("transformers")
    kv = benchmark_script("packing").real_kv(1024)
    layers, blocks = kv.shape[:2]
    assert (layers, blocks) == (30, 64)
    words = kv.reshape(layers * blocks, -1)
    size = int(words.shape[1] & -words.shape[1])
    assert size == 2048
    words = words.reshape(-1, size)
    assert exponents(words).max() - exponents(words[words != 0]).min() > 20  # not all alike
    back, overflows = round_trip(words)
    assert not overflows
    assert (back == words).all()


def test_a_tile_with_one_escape_too_many_does_not_fit():
    tile = Tile(4096)
    values = np.full((2, 4096), 0x3F80, np.uint16)
    values[:, ::GROUP] = 0x3C00  # the second base
    at = np.flatnonzero((np.arange(4096) - 1) % GROUP < 3)
    values[0, at[: tile.room]] = 0x0100
    values[1, at[: tile.room + 1]] = 0x0100
    packed = np.zeros((2, tile.size), np.uint8)
    assert pack(values, packed).tolist() == [1]
    assert packed[:, tile.count].tolist() == [tile.room, OVERFLOW]
    with pytest.raises(DamagedBlockError):
        unpack(packed, np.zeros_like(values))


def test_equal_values_have_equal_bytes_whatever_was_there_before():
    values = bfloat16(np.random.default_rng(1).standard_normal((2, 4096)) * [[1], [1e-3]])
    values[0, ::500] = 0x0100
    first, second = np.zeros((2, Tile(4096).size), np.uint8), np.full((2, Tile(4096).size), 255, np.uint8)
    pack(values, first)
    pack(values, second)
    assert (first == second).all()


def spec(dtype="bfloat16", shape=(8, 16, 2, 64), address=1 << 20, itemsize=2):
    strides = tuple(int(np.prod(shape[i + 1 :])) * itemsize for i in range(len(shape)))
    return TensorSpec("layer", address, shape, strides, itemsize, dtype)


def test_a_packed_layout_has_smaller_slots_and_another_description():
    layout = describe([spec(), spec(address=1 << 22)], 8)
    packed = pack_layout(layout)
    assert packed.block_bytes / layout.block_bytes < 0.768
    assert packed.raw_bytes == layout.raw_bytes == layout.block_bytes
    assert packed.description != layout.description
    assert [segment.offset for segment in packed.segments] == [0, packed.segments[0].packed]
    assert sum(segment.slot_size for segment in packed.merged()) == packed.block_bytes
    wider = pack_layout(describe([spec(shape=(8, 32, 2, 64))], 8))
    assert wider.tile_values != packed.tile_values
    assert wider.description != packed.description


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ([spec(dtype="float16")], "float16"),
        ([spec(dtype="uint8", itemsize=1)], "uint8"),
        ([spec(), spec(dtype="float32", address=1 << 22, itemsize=4)], "several kinds"),
        ([spec(), spec(shape=(8, 16, 1, 128))], "several kinds"),  # two layers in one place
        ([spec(shape=(8, 7, 3))], "not multiples"),
        ([spec(address=(1 << 20) + 8)], "multiples of 16 bytes"),
    ],
    ids=["fp16", "fp8", "mixed", "shared", "small", "unaligned"],
)
def test_other_caches_are_left_alone_with_a_reason(tensors, reason):
    with pytest.raises(ValueError, match=reason):
        pack_layout(describe(tensors, 8))


RAW = describe([spec(shape=(8, 32, 8, 64))], 8)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU whose trial ends as the test says: ``gpu(is_exact, bus, unpacked)``, or with an exception."""
    pytest.importorskip("triton")
    from kvbm.transfer import cuda_calls, packing_trial

    monkeypatch.setattr(cuda_calls, "batch_function", lambda: print)

    def prepare(*outcome):
        def trial(layout, device):
            if isinstance(outcome[0], Exception):
                raise outcome[0]
            return packing_trial.Trial(*outcome)

        monkeypatch.setattr(packing_trial, "try_packing", trial)

    return prepare


@pytest.mark.parametrize(
    ("outcome", "on", "auto"),
    [
        ((True, 55e9, 600e9), "", ""),
        ((True, 400e9, 600e9), "", "the GPU unpacks 600 GB/s, the bus carries 400 GB/s"),
        ((False, 55e9, 600e9), "do not give back the same bytes", "do not give back the same bytes"),
        ((RuntimeError("no ptxas"),), "RuntimeError: no ptxas", "RuntimeError: no ptxas"),
    ],
    ids=["fast", "slow beside its bus", "wrong", "broken"],
)
def test_a_trial_decides_where_a_gpu_packs(outcome, on, auto, gpu):
    gpu(*outcome)
    for if_it_wins, reason in ((False, on), (True, auto)):
        if reason:
            with pytest.raises(ValueError, match=reason):
                pack_slots("cuda:0", RAW, if_it_wins)
        else:
            packed, measured = pack_slots("cuda:0", RAW, if_it_wins)
            assert packed == pack_layout(RAW)
            assert measured.startswith(": the GPU unpacks 600 GB/s, the bus carries ")


def test_tiny_blocks_on_a_gpu_stay_as_they_are(gpu):
    gpu(True, 55e9, 600e9)
    with pytest.raises(ValueError, match="too small"):
        pack_slots("cuda:0", describe([spec()], 8))


def test_a_cuda_without_batched_copies_packs_nothing(gpu, monkeypatch):
    gpu(True, 55e9, 600e9)
    from kvbm.transfer import cuda_calls

    monkeypatch.setattr(cuda_calls, "batch_function", lambda: None)
    with pytest.raises(ValueError, match="cudaMemcpyBatchAsync"):
        pack_slots("cuda:0", RAW)


def test_an_engine_on_a_cpu_is_not_tried():
    assert pack_slots("cpu", RAW) == (pack_layout(RAW), "")
