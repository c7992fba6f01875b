"""One rank's start: what it offers the leader, what it refuses, and a copy through what it has opened."""

import pytest
import torch

from kvbm import config as settings
from kvbm.plans import Copy, LoadPlan, StepPlan, StorePlan
from kvbm.runtime.rank import Rank
from tiernames import HOST


def config(**values):
    return settings.load(extra=values, environ={}, files=[])


def layers(blocks=8):
    pool = torch.arange(blocks * 2 * 2 * 64, dtype=torch.int32).view(blocks, 2, 2, 64)
    return pool, {f"layer {i}": pool[:, i] for i in range(2)}


def test_a_rank_offers_its_share_of_the_host_tier():
    _, tensors = layers()
    rank = Rank(config(cpu_cache_gb=16 * 4 * 1024 / 1e9), rank=1, ranks=4)
    assert rank.hello() is None
    rank.register(tensors, 8)
    hello = rank.open()
    assert (hello.rank, hello.block_bytes, hello.slots) == (1, 1024, {HOST: 16})
    assert hello == rank.hello()
    rank.close()


def test_a_tier_that_holds_no_block_is_refused_with_the_size_of_one():
    _, tensors = layers()
    with pytest.raises(ValueError, match=r"DYN_KVBM_CPU_CACHE_GB=1e-06 holds no block: one block takes 0\.000004 GB"):
        Rank(config(cpu_cache_gb=0.000001), 0, 4).register(tensors, 8)


def test_broadcasts_that_are_asked_for_in_vain_are_mentioned(caplog):
    _, tensors = layers()
    rank = Rank(config(cpu_cache_override_num_blocks=4, nccl_mla_mode=True), 0, 2)
    with caplog.at_level("WARNING", "kvbm"):
        rank.register(tensors, 8)
    assert "DYN_KVBM_NCCL_MLA_MODE changes nothing here" in caplog.text
    rank.close()


def test_what_a_rank_stores_it_brings_back():
    pool, tensors = layers()
    rank = Rank(config(cpu_cache_override_num_blocks=4), 0, 1)
    rank.register(tensors, 8)
    rank.open()
    kept = pool[2].clone()
    store = StepPlan(stores=[StorePlan(1, Copy(HOST, [3], [2]))])
    load = StepPlan(loads=[LoadPlan(2, "r", [Copy(HOST, [3], [5])], in_step=True)], fences=[1])
    for plan in (store, load):
        rank.worker.begin(plan)
        if plan.fences:
            pool[2] = 0
        rank.worker.start_loads(plan)
        rank.worker.start_stores(plan)
    assert torch.equal(pool[5], kept)
    rank.close()


def packable(blocks=8):
    torch.manual_seed(1)
    pool = torch.randn(blocks, 2, 4096).to(torch.bfloat16)
    return pool, {f"layer {i}": pool[:, i] for i in range(2)}


def test_a_host_tier_of_packed_blocks_holds_more_of_them_for_the_same_gigabytes():
    _, tensors = packable()
    hellos = {}
    for pack in ("off", "on"):
        rank = Rank(config(cpu_cache_gb=0.02, pack=pack), 0, 1, cache={"weights": "w"})
        rank.register(tensors, 8)
        hellos[pack] = rank.open()
        rank.close()
    raw, packed = hellos["off"], hellos["on"]
    assert packed.slots[HOST] >= 1.30 * raw.slots[HOST]
    assert packed.block_bytes <= 0.77 * raw.block_bytes
    assert packed.raw_bytes == raw.raw_bytes == raw.block_bytes
    # Part of the fingerprint of every cache that outlives the engine.
    assert packed.layout != raw.layout
    assert "packed 2:4096:128:79" in packed.layout


def test_a_rank_names_the_blocks_that_do_not_fit_and_brings_back_the_others():
    pool, tensors = packable()
    pool[3, 1].view(torch.int16).random_(-32768, 32768)
    rank = Rank(config(cpu_cache_override_num_blocks=8, pack="on"), 0, 1)
    rank.register(tensors, 8)
    rank.open()
    kept = pool[4].clone()
    store = StepPlan(stores=[StorePlan(1, Copy(HOST, [1, 2, 5], [2, 3, 4]))])
    rank.worker.begin(store)
    rank.worker.start_stores(store)
    stored = []
    while not stored:
        stored = rank.worker.poll().report.stores
    assert [(result.id, result.ok, result.unpackable) for result in stored] == [(1, True, [1])]
    load = StepPlan(loads=[LoadPlan(2, "r", [Copy(HOST, [5], [7])], in_step=True)])
    rank.worker.begin(load)
    rank.worker.start_loads(load)
    rank.worker.start_stores(load)
    assert torch.equal(pool[7], kept)
    rank.close()


@pytest.mark.parametrize(
    ("pack", "make", "reason"),
    [
        ("on", layers, "its values are int32, not bfloat16"),
        ("auto", packable, "an engine on a CPU gains no time"),
    ],
    ids=["other values", "auto on a CPU"],
)
def test_blocks_that_are_not_packed_are_said_to_be(pack, make, reason, caplog):
    _, tensors = make()
    rank = Rank(config(cpu_cache_override_num_blocks=4, pack=pack), 0, 1)
    with caplog.at_level("INFO", "kvbm"):
        rank.register(tensors, 8)
    assert f"KVBM_PACK={pack}: blocks of this KV cache are not packed: {reason}" in caplog.text
    assert rank.layout.block_bytes == rank.layout.raw_bytes
    rank.close()
