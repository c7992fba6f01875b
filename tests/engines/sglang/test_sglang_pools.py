"""Pages of every kind of pool that SGLang has come back as they were."""

from __future__ import annotations

import time

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(180), pytest.mark.usefixtures("around_sglang")]

pytest.importorskip("sglang.srt.mem_cache.hicache_storage", reason="make test-sglang installs SGLang")

import torch
from engine_pools import (
    DIM,
    HEADS,
    LAYERS,
    PAGE,
    fill,
    hashes,
    host_pool,
    latent_pool,
    mamba_pool,
    page_of,
    state_of,
)
from sglang.srt.mem_cache.hicache_storage import (
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)


@pytest.mark.parametrize(
    ("make", "layout"),
    [
        *((host_pool, layout) for layout in ("page_first", "page_first_direct", "page_head", "layer_first")),
        *((latent_pool, layout) for layout in ("page_first", "page_first_direct", "layer_first")),
    ],
)
def test_pages_come_back_as_they_were_in_every_layout(backends, make, layout):
    pool = make(layout)
    backend = backends(pool)
    indices = pool.alloc(40 * PAGE)
    content = fill(pool)
    assert backend.batch_set_v1(hashes(*range(40)), indices) == [True] * 40
    pool.kv_buffer[...] = 0
    # Half of them to other places of the pool.
    moved = pool.alloc(20 * PAGE)
    assert backend.batch_exists(hashes(*range(50))) == 40
    assert backend.batch_get_v1(hashes(*range(20)), moved) == [True] * 20
    assert backend.batch_get_v1(hashes(*range(20, 40)), indices[20 * PAGE :]) == [True] * 20
    here = torch.cat([moved, indices[20 * PAGE :]])
    for mine, theirs in zip(here[::PAGE], indices[::PAGE], strict=True):
        assert page_of(pool, mine) == page_of(pool, theirs, content)


def test_one_rank_keeps_for_all_what_all_have(backends):
    writer_pool, reader_pool = latent_pool(), latent_pool()
    writer = backends(writer_pool, mla=True, ranks=2)
    reader = backends(reader_pool, mla=True, ranks=2, rank=1)
    indices = writer_pool.alloc(8 * PAGE)
    content = fill(writer_pool)
    assert writer.batch_set_v1(hashes(*range(8)), indices) == [True] * 8
    end = time.monotonic() + 60
    while reader.batch_exists(hashes(*range(9))) != 8:  # it looks for the writer's map once a second
        assert time.monotonic() < end
        time.sleep(0.01)
    mine = reader_pool.alloc(8 * PAGE)
    assert reader.batch_get_v1(hashes(*range(8)), mine) == [True] * 8
    for here, there in zip(mine[::PAGE], indices[::PAGE], strict=True):
        assert page_of(reader_pool, here) == page_of(writer_pool, there, content)
    assert reader.batch_set_v1(hashes(99), mine[:PAGE]) == [False]


def test_states_of_a_hybrid_model_come_back_and_a_prefix_ends_where_one_is(backends):
    """Every page has KV; a state is kept where a request ended."""
    kv, states = host_pool(), mamba_pool()
    backend = backends(kv, pools={PoolName.MAMBA: states})
    fill(kv)
    assert backend.batch_set_v1(hashes(*range(6)), kv.alloc(6 * PAGE)) == [True] * 6
    slot = states.alloc(1)
    states.set_from_flat_data_page(int(slot[0]), torch.randint(0, 256, (states.size_per_token,), dtype=torch.uint8))
    content = state_of(states, slot[0])
    wrote = backend.batch_set_v2([PoolTransfer(name=PoolName.MAMBA, keys=hashes(3), host_indices=slot)])
    assert wrote == {PoolName.MAMBA: [True]}
    transfer = PoolTransfer(name=PoolName.MAMBA, keys=hashes(5), hit_policy=PoolHitPolicy.TRAILING_PAGES)
    found = backend.batch_exists_v2(hashes(*range(6)), [transfer])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [4])
    assert found.extra_pool_hit_pages == {PoolName.KV: 6, PoolName.MAMBA: 4}
    target = states.alloc(1)
    read = PoolTransfer(name=PoolName.MAMBA, keys=hashes(3), host_indices=target)
    assert backend.batch_get_v2([read]) == {PoolName.MAMBA: [True]}
    assert state_of(states, target[0]) == content


def test_ranks_with_the_same_kv_have_states_of_their_own(backends):
    """Latent attention (MLA) beside linear attention: all ranks have the same KV, and each a part of the state."""
    kept = []
    for rank in range(2):
        states = mamba_pool()
        backend = backends(host_pool(), mla=True, ranks=2, rank=rank, pools={PoolName.MAMBA: states})
        slot = states.alloc(1)
        states.set_from_flat_data_page(int(slot[0]), torch.full((states.size_per_token,), rank + 1, dtype=torch.uint8))
        transfer = PoolTransfer(name=PoolName.MAMBA, keys=hashes(7), host_indices=slot)
        assert backend.batch_set_v2([transfer]) == {PoolName.MAMBA: [True]}
        kept.append((backend, states))
    for rank, (backend, states) in enumerate(kept):
        target = states.alloc(1)
        read = PoolTransfer(name=PoolName.MAMBA, keys=hashes(7), host_indices=target)
        assert backend.batch_get_v2([read]) == {PoolName.MAMBA: [True]}
        assert set(state_of(states, target[0])) == {rank + 1}


def test_pages_as_tensors(backends):
    """The path of engines that do not ask for pages where they lie, and of draft models."""
    pool = host_pool()
    backend = backends(pool)
    values = [torch.randn(2, LAYERS, PAGE, HEADS, DIM).to(torch.bfloat16) for _ in range(3)]
    assert backend.batch_set(hashes(1, 2, 3), values)
    assert backend.exists(hashes(1)[0])
    assert not backend.exists(hashes(9)[0])
    targets = [torch.zeros_like(value) for value in values]
    assert all(map(torch.equal, backend.batch_get(hashes(1, 2, 3), targets), values))
    assert backend.get(hashes(9)[0], targets[0]) is None
    draft = torch.randn(2, 1, PAGE, HEADS, DIM).to(torch.bfloat16)
    assert backend.set(f"{hashes(1)[0]}.draft", draft)
    assert torch.equal(backend.get(f"{hashes(1)[0]}.draft", torch.zeros_like(draft)), draft)
    # A page and a tensor of its size are the same thing.
    assert backend.batch_get_v1(hashes(1), pool.alloc(PAGE)) == [True]


def test_a_prefix_counts_as_far_as_every_pool_has_its_part(backends):
    kv, window = host_pool(), host_pool(layers=1)
    backend = backends(kv)
    backend.register_mem_host_pool_v2(window, PoolName.SWA)
    fill(kv)
    fill(window)
    backend.batch_set_v1(hashes(*range(6)), kv.alloc(6 * PAGE))
    wrote = backend.batch_set_v2(
        [PoolTransfer(name=PoolName.SWA, keys=hashes(2, 3), host_indices=window.alloc(2 * PAGE))]
    )
    assert wrote == {PoolName.SWA: [True, True]}
    trailing = PoolTransfer(name=PoolName.SWA, keys=hashes(4, 5), hit_policy=PoolHitPolicy.TRAILING_PAGES)
    found = backend.batch_exists_v2(hashes(*range(8)), [trailing])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [4])
    everything = PoolTransfer(name=PoolName.SWA, hit_policy=PoolHitPolicy.ALL_PAGES)
    assert backend.batch_exists_v2(hashes(*range(8)), [everything]).kv_hit_pages == 0
    assert backend.batch_exists_v2(hashes(*range(8))).kv_hit_pages == 6
    content = window.kv_buffer.clone()
    target = window.alloc(2 * PAGE)
    read = PoolTransfer(name=PoolName.SWA, keys=hashes(2, 3), host_indices=target)
    assert backend.batch_get_v2([read]) == {PoolName.SWA: [True, True]}
    assert page_of(window, target[0]) == page_of(window, 0, content)
