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
