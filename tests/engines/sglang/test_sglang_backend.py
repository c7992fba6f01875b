"""The backend under SGLang's own classes: its base class, its host pools, its factory, its controller and threads.

Needs SGLang, which `make test-sglang` installs beside everything else; no GPU. What stands in for the rest of the
engine is said where it is made.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import queue
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(180)]

pytest.importorskip("sglang.srt.mem_cache.hicache_storage", reason="make test-sglang installs SGLang")

import torch
from sglang.srt import runtime_context
from sglang.srt.managers import cache_controller
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MambaStateBufferInfo, MLABufferInfo
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.pool_host import base as pool_base
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHABufferInfo, MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory

from kvbm.control import socket as control
from kvbm.engines.sglang.__main__ import extra_config
from kvbm.engines.sglang.backend import KvbmStorage
from kvbm.engines.sglang.settings import Prefetch, read_prefetch

PAGE = 16  # tokens
LAYERS, HEADS, DIM = 3, 2, 16
PAGE_BYTES = 2 * LAYERS * PAGE * HEADS * DIM * 2

# Stands for the model that a server has loaded in this process.
MODEL = torch.nn.Linear(2, 2, bias=False)
MODEL.weight.data.fill_(1.0)


def host_pool(layout="page_first", pages=64, layers=LAYERS):
    """A real host pool. Of the GPU's side it has two tensors to take its shape from."""
    keys, values = ([torch.zeros((PAGE, HEADS, DIM), dtype=torch.bfloat16) for _ in range(layers)] for _ in range(2))
    pointers = [torch.tensor([tensor.data_ptr() for tensor in part], dtype=torch.uint64) for part in (keys, values)]
    buffers = KVBuffers(
        k=tuple(keys), v=tuple(values), k_data_ptrs=pointers[0], v_data_ptrs=pointers[1], layout=KVBufferLayout.NHD
    )
    info = MHABufferInfo(
        buffers=buffers, page_size=PAGE, head_num=HEADS, head_dim=DIM, v_head_dim=DIM, dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )  # fmt: skip
    return MHATokenToKVPoolHost(
        info, 2.0, 0, PAGE, layout, pin_memory=False, device_capacity_tokens=PAGE, start_layer=0, end_layer=layers,
        host_token_capacity=pages * PAGE,
    )  # fmt: skip


def latent_pool(layout="page_first", pages=64):
    """A real host pool of latent attention (MLA): one row a token and layer, the same on every rank."""
    rows = tuple(torch.zeros((PAGE, 1, 80), dtype=torch.bfloat16) for _ in range(LAYERS))
    info = MLABufferInfo(
        buffers=rows, data_ptrs=torch.tensor([layer.data_ptr() for layer in rows], dtype=torch.uint64),
        layer_indices=tuple(range(LAYERS)), device_layer_num=LAYERS, page_size=PAGE, kv_lora_rank=64,
        qk_rope_head_dim=16, kv_cache_dim=80, dtype=torch.bfloat16, device=torch.device("cpu"),
    )  # fmt: skip
    return MLATokenToKVPoolHost(
        info, 2.0, 0, PAGE, layout, pin_memory=False, device_capacity_tokens=PAGE, start_layer=0, end_layer=LAYERS,
        target_layer_num=LAYERS, host_token_capacity=pages * PAGE,
    )  # fmt: skip


def storage_config(tmp_path, rank=0, ranks=1, mla=False, **extra):
    # A page of this model is computed sooner than any disk is asked for it.
    values = {"disk_cache_override_num_blocks": 256, "disk_cache_dir": str(tmp_path), "disk_bounce_mb": 1}
    values = {**values, "load": "always", **extra}
    return HiCacheStorageConfig(
        tp_rank=rank, tp_size=ranks, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=mla,
        enable_storage_metrics=False, is_page_first_layout=True, model_name=__file__,
        extra_config={**json.loads(extra_config()), **values},
    )  # fmt: skip


def serve_no_adapters(patch):
    """For the arguments of the server, which this process has none of."""
    patch(runtime_context, "get_server_args", lambda: SimpleNamespace(enable_lora=None, lora_paths=None))


@pytest.fixture(autouse=True)
def _model_is_visible():
    gc.unfreeze()  # conftest.py hides everything from the collector, and so from the search for loaded models


@pytest.fixture(autouse=True)
def _no_adapters(monkeypatch):
    serve_no_adapters(monkeypatch.setattr)


@pytest.fixture(autouse=True)
def _small_machine(monkeypatch):
    """SGLang leaves 10 GB of a machine alone; these pools have some hundred kilobytes."""
    monkeypatch.setattr(pool_base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 0)


@pytest.fixture
def model():
    yield MODEL
    MODEL.weight.data.fill_(1.0)


@pytest.fixture
def backends(tmp_path):
    made = []

    def make(pool, pools=None, **options):
        config = storage_config(tmp_path, **options)
        made.append(StorageBackendFactory.create_backend("dynamic", config, pool))
        made[-1].register_mem_pool_host(pool)
        for name, other in (pools or {}).items():
            made[-1].register_mem_host_pool_v2(other, name)
        made[-1].on_host_pools_registered()
        return made[-1]

    yield make
    for backend in made:
        backend.close()


def hashes(*numbers):
    return [hashlib.sha256(str(number).encode()).hexdigest() for number in numbers]


def fill(pool):
    pool.kv_buffer.view(torch.int16).random_(-30000, 30000)
    return pool.kv_buffer.clone()


def page_of(pool, index, content=None):
    """The bytes of a page, of now or of an earlier copy of the pool's memory."""
    now = pool.kv_buffer
    try:
        pool.kv_buffer = now if content is None else content
        return pool.get_data_page(int(index)).contiguous().view(torch.uint8).flatten().numpy().tobytes()
    finally:
        pool.kv_buffer = now


def test_the_helper_prints_what_sglang_takes(tmp_path):
    printed = subprocess.run(
        [sys.executable, "-m", "kvbm.engines.sglang", "disk_cache_gb=0.5"], capture_output=True, text=True, check=True
    )
    config = storage_config(tmp_path)
    config.extra_config = {**json.loads(printed.stdout), "disk_cache_dir": str(tmp_path)}
    backend = StorageBackendFactory.create_backend("dynamic", config, None)
    assert isinstance(backend, KvbmStorage)
    assert isinstance(backend, HiCacheStorage)
    assert backend._config.disk_cache_gb == 0.5
    assert not KvbmStorage.__abstractmethods__


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


def test_a_get_ends_at_the_first_page_that_is_not_there(backends):
    pool = host_pool()
    backend = backends(pool)
    indices = pool.alloc(4 * PAGE)
    fill(pool)
    backend.batch_set_v1(hashes(0, 1, 3), indices[: 3 * PAGE])
    assert backend.batch_exists(hashes(0, 1, 2, 3)) == 2
    assert backend.batch_get_v1(hashes(0, 1, 2, 3), indices) == [True, True, False, False]


def test_ranks_and_layouts_have_caches_of_their_own(backends):
    for options, layout in (
        ({}, "page_first"), ({"rank": 0, "ranks": 2}, "page_first"), ({"rank": 1, "ranks": 2}, "page_first"),
        ({}, "layer_first"),
    ):  # fmt: skip
        pool = host_pool(layout)
        backend = backends(pool, **options)
        assert backend.batch_exists(hashes(1)) == 0
        assert backend.batch_set_v1(hashes(1), pool.alloc(PAGE)) == [True]


def test_other_weights_under_the_same_name_find_nothing(backends, model):
    pool = host_pool()
    first = backends(pool)
    first.batch_set_v1(hashes(1), pool.alloc(PAGE))
    first.close()
    again = backends(pool)
    assert again.batch_exists(hashes(1)) == 1
    again.close()
    model.weight.data[1, 1] += 1
    assert backends(pool).batch_exists(hashes(1)) == 0


def test_without_a_model_to_be_found_nothing_outlives_the_server(backends, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("kvbm.engines.weights.roots", list)
    pool = host_pool()
    backend = backends(pool, cpu_cache_override_num_blocks=16)
    assert backend.batch_set_v1(hashes(1), pool.alloc(PAGE)) == [True]
    assert backend.batch_exists(hashes(1)) == 1
    backend.close()
    assert "Cannot fingerprint the weights; persistence is off: no loaded model was found" in caplog.text
    disk_only = backends(pool)
    assert "KVBM is off: the disk tier needs a fingerprint" in caplog.text
    assert disk_only.batch_set_v1(hashes(1), pool.alloc(PAGE)) == [False]
    assert disk_only.batch_exists(hashes(1)) == 0
    assert list(tmp_path.iterdir()) == []


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


def mamba_pool(states=16):
    """A real pool of Mamba states on the host: one state is a page."""
    info = MambaStateBufferInfo(temporal=torch.zeros(2, 4, 2, 8, 4), conv=(torch.zeros(2, 4, 24, 3),))
    return MambaPoolHost(
        info, 2.0, 0, device_capacity=states - 1, pin_memory=False, layout="page_first",
    )  # fmt: skip


def state_of(pool, index):
    return pool.get_data_page(int(index)).numpy().tobytes()


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


def test_what_goes_wrong_costs_pages_and_not_the_engine(backends, monkeypatch):
    pool = host_pool()
    backend = backends(pool)
    indices = pool.alloc(2 * PAGE)
    backend.batch_set_v1(hashes(1, 2), indices)

    def broken(*args, **kwargs):
        raise RuntimeError("broken on purpose")

    for method in ("get", "put", "count", "has", "clear"):
        monkeypatch.setattr(backend._store("kv"), method, broken)
    assert backend.batch_get_v1(hashes(1, 2), indices) == [False, False]
    assert backend.batch_set_v1(hashes(3, 4), indices) == [False, False]
    assert backend.batch_exists(hashes(1)) == 0
    assert backend.batch_exists_v2(hashes(1)).kv_hit_pages == 0
    assert backend.batch_get(hashes(1), [torch.zeros(PAGE_BYTES, dtype=torch.uint8)]) == [None]
    assert backend.set(hashes(1)[0], torch.zeros(PAGE_BYTES, dtype=torch.uint8)) is False
    assert backend.exists(hashes(1)[0]) is False
    assert backend.clear() is False
    assert sum(backend._faults.counts.values()) >= 7


def test_nobody_who_asks_or_reads_waits_for_a_slow_write(backends, stall):
    pool = host_pool()
    backend = backends(pool, inject_faults="disk-slow-write")
    indices = pool.alloc(4 * PAGE)
    fill(pool)
    assert backend.batch_exists(hashes(9)) == 0
    writer = threading.Thread(target=backend.batch_set_v1, args=(hashes(0, 1, 2, 3), indices))
    writer.start()
    try:
        assert stall.begun.wait(60)
        assert backend.batch_exists(hashes(7)) == 0
        assert backend.batch_get_v1(hashes(7), pool.alloc(PAGE)) == [False]
        assert writer.is_alive()
    finally:
        stall.over.set()
        writer.join()


def test_a_call_that_comes_with_the_end_opens_nothing_again(backends):
    """SGLang's threads may be in a call while it detaches the backend."""
    backend = backends(host_pool())
    backend.close()
    with pytest.raises(RuntimeError, match="closed"):
        backend._store("kv")
    assert backend._stores == {}
    assert backend.batch_exists(hashes(1)) == 0


def test_stats_are_sglangs(backends):
    pool = host_pool()
    backend = backends(pool)
    indices = pool.alloc(4 * PAGE)
    backend.batch_set_v1(hashes(*range(4)), indices)
    backend.batch_get_v1(hashes(*range(4)), indices)
    stats = backend.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([4], [4])
    assert stats.backup_bandwidth[0] > 0
    assert backend.get_stats().backup_pgs == []
    assert sum(backend.counts()["kv"].moved_blocks.values()) == 4


def test_metrics_are_on_a_port_of_their_own(backends):
    pool = host_pool()
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    backend = backends(pool, metrics=True, metrics_port=port)
    backend.batch_set_v1(hashes(1, 2), pool.alloc(2 * PAGE))
    backend.batch_exists(hashes(1, 2, 3))
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    assert "kvbm_offload_blocks_d2d 2\n" in text
    assert f"kvbm_matched_tokens {2 * PAGE}\n" in text
    backend.close()
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)


def test_a_rank_is_controlled_and_refuses_loads_like_other_engines(backends, caplog):
    """Pages of 16 tokens of this small model are computed sooner than SGLang schedules a request again."""
    pool = host_pool()
    backend = backends(pool, load="auto", staging_mb=1, nccl_mla_mode=True)
    assert "Settings without effect under SGLang: KVBM_STAGING_MB, DYN_KVBM_NCCL_MLA_MODE" in caplog.text
    assert backend.batch_set_v1(hashes(1, 2), pool.alloc(2 * PAGE)) == [True, True]
    assert backend.batch_exists(hashes(1, 2)) == 0
    snapshot = backend._observer.source.snapshot(requests=1)
    assert snapshot.refused_loads == {"recomputing is faster": 2}
    assert snapshot.requests[0].why == "recomputing is faster"
    address = backend._presence.control.address
    status = control.ask(address, {"do": "status"})
    assert (status["engine"], status["pools"]["disk"]["inactive_blocks"]) == ("sglang-0", 2)
    assert control.ask(address, {"do": "reset", "tier": "disk"})["reset_blocks"] == 2
    assert control.ask(address, {"do": "reset"})["reset_blocks"] == 2  # in the staging buffer
    assert not backend.exists(hashes(1)[0])


@pytest.mark.parametrize(("policy", "found"), [("best_effort", 2), ("timeout", 0)])
def test_a_prefetch_that_sglang_does_not_wait_for_is_not_refused(backends, monkeypatch, policy, found):
    arguments = SimpleNamespace(enable_lora=None, lora_paths=None, hicache_storage_prefetch_policy=policy)
    monkeypatch.setattr(runtime_context, "get_server_args", lambda: arguments)
    pool = host_pool()
    backend = backends(pool, load="auto")
    backend.batch_set_v1(hashes(1, 2), pool.alloc(2 * PAGE))
    assert backend.batch_exists(hashes(1, 2)) == found


@pytest.mark.parametrize(
    ("given", "limits"),
    [
        (None, (1.0, 0.25 / 1024)),
        ('{"prefetch_timeout_base": 2, "prefetch_timeout_per_ki_token": 0.5}', (2.0, 0.5 / 1024)),
    ],
)
def test_the_limits_of_a_prefetch_are_sglangs(monkeypatch, given, limits):
    arguments = SimpleNamespace(hicache_storage_prefetch_policy="timeout", hicache_storage_backend_extra_config=given)
    monkeypatch.setattr(runtime_context, "get_server_args", lambda: arguments)
    assert read_prefetch() == Prefetch(True, *limits)


def test_a_tier_that_holds_no_page_is_refused_with_the_size_of_one(backends):
    with pytest.raises(ValueError, match=r"DYN_KVBM_DISK_CACHE_GB=1e-06 holds no block: one block takes 0\.00000"):
        backends(host_pool(), disk_cache_gb=0.000001, disk_cache_override_num_blocks=0)


def test_the_documented_commands_are_sglangs(tmp_path):
    from sglang.srt.server_args import ServerArgs

    page = (Path(__file__).parents[3] / "docs/sglang.md").read_text()
    commands = [block for block in re.findall(r"```bash\n(.*?)```", page, re.S) if "sglang.launch_server" in block]
    assert commands
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    for command in commands:
        # The shell puts it together, with this interpreter; what would start the server prints its arguments instead.
        script = command.replace("python -m sglang.launch_server", "printf '%s\\0'").replace("python", sys.executable)
        printed = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, check=True, timeout=60).stdout
        args = parser.parse_args(printed.rstrip("\0").split("\0"))
        assert args.hicache_storage_backend == "dynamic"
        config = storage_config(tmp_path)
        config.extra_config = {**json.loads(args.hicache_storage_backend_extra_config), "disk_cache_gb": 0.001}
        assert isinstance(StorageBackendFactory.create_backend("dynamic", config, None), KvbmStorage)


# -- SGLang's own controller ------------------------------------------------------------------------------------------


def stand_in(patch):
    """For what SGLang's controller asks of the processes around it: there is one rank."""
    parallel = SimpleNamespace(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_dcp_size=1, attn_dcp_rank=0, attn_tp_rank=0, attn_tp_size=1,
        attn_dp_rank=0,
    )  # fmt: skip
    patch(cache_controller, "get_parallel", lambda: parallel)
    patch(cache_controller, "is_dp_attention_enabled", lambda: False)
    serve_no_adapters(patch)


def attach(folder, pool, **extra):
    """SGLang's controller with its storage threads. The scheduler, the radix tree and the GPU's pool are not there."""
    controller = HiCacheController.__new__(HiCacheController)
    vars(controller).update(
        mem_pool_host=pool, storage_host_pool=pool, mem_pool_device=object(), page_size=PAGE, tp_group=None,
        attn_cp_group=None, attn_tp_group=None, pp_group=None, host_memory_mode="cache", enable_storage=False,
        enable_storage_metrics=False, storage_backend=None, prefetch_hits_sync_groups=[],
        prefetch_completion_sync_groups=[], storage_stop_event=threading.Event(),
    )  # fmt: skip
    controller.attach_storage_backend(
        "dynamic", prefetch_threshold=PAGE, model_name=__file__,
        storage_backend_extra_config=storage_config(folder, **extra).extra_config,
    )  # fmt: skip
    return controller


@pytest.fixture
def controllers(tmp_path, monkeypatch):
    stand_in(monkeypatch.setattr)
    made = []

    def make(pool, **extra):
        made.append(attach(tmp_path, pool, **extra))
        return made[-1]

    yield make
    for controller in made:
        controller.detach_storage_backend()


def back_up(controller, tokens, indices):
    """What the radix tree does with a node that is to be kept: names its pages and hands them over."""
    names = cache_controller.get_storage_hash_str(tokens, None, page_size=PAGE)
    controller.write_storage(indices, tokens, hash_value=names)
    return controller.ack_backup_queue.get(timeout=30).completed_tokens


def prefetch(controller, pool, tokens):
    """What the scheduler does for a request: asks, makes room for what is there, waits. Returns the indices it got."""
    controller.prefetch("request", tokens)
    operation = controller.prefetch_hit_queue.get(timeout=30)
    if not operation.hash_value:
        return torch.empty(0, dtype=torch.int64)
    operation.host_indices = pool.alloc(len(operation.hash_value) * PAGE)
    controller.prefetch_buffer.put(operation)
    completed = 0
    while True:
        ack = controller.ack_prefetch_queue.get(timeout=30)
        if ack.completed_req:
            return operation.host_indices[:completed]
        completed = ack.completed_tokens


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_sglangs_threads_back_up_and_prefetch(controllers, layout):
    pool = host_pool(layout, pages=700)
    controller = controllers(pool, disk_cache_override_num_blocks=512)
    tokens = list(range(300 * PAGE))
    indices = pool.alloc(len(tokens))
    content = fill(pool)
    assert back_up(controller, tokens, indices) == len(tokens)
    got = prefetch(controller, pool, tokens + list(range(5 * PAGE)))
    assert len(got) == len(tokens)
    for mine, theirs in zip(got[::PAGE], indices[::PAGE], strict=True):
        assert page_of(pool, mine) == page_of(pool, theirs, content)


def prompt(number, pages):
    return list(range(100_000 * number, 100_000 * number + pages * PAGE))


def test_ten_thousand_pages_while_sglangs_threads_ask_read_and_write_at_once(controllers):
    """Prompt after prompt is backed up while those before are prefetched. Every byte is looked at."""
    prompts, pages = 100, 100
    pool = host_pool(pages=(prompts + 2) * pages, layers=1)
    controller = controllers(pool, disk_cache_override_num_blocks=prompts * pages)
    indices = pool.alloc(prompts * pages * PAGE).view(prompts, pages * PAGE)
    fill(pool)
    kept = queue.Queue()

    def keep():
        for number in range(prompts):
            kept.put((number, back_up(controller, prompt(number, pages), indices[number])))

    writer = threading.Thread(target=keep)
    writer.start()
    equal = 0
    for _ in range(prompts):
        number, tokens = kept.get(timeout=60)
        assert tokens == pages * PAGE
        got = prefetch(controller, pool, prompt(number, pages))
        for mine, theirs in zip(got[::PAGE], indices[number][::PAGE], strict=True):
            equal += page_of(pool, mine) == page_of(pool, theirs)
        pool.kv_buffer[:, got.min() : got.max() + 1] = 0
        pool.free(got)
    writer.join()
    assert equal == prompts * pages
    controller.storage_backend.clear()
    assert len(prefetch(controller, pool, prompt(0, pages))) == 0


def test_pages_outlive_an_engine_that_is_killed(controllers, tmp_path):
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "import test_sglang_backend as here, time\n"
        "here.stand_in(setattr)\n"
        "here.torch.manual_seed(1)\n"
        "pool = here.host_pool()\n"
        f"controller = here.attach({str(tmp_path)!r}, pool)\n"
        "indices = pool.alloc(40 * here.PAGE)\n"
        "here.fill(pool)\n"
        "here.back_up(controller, here.prompt(7, 40), indices)\n"
        "index = controller.storage_backend._store('kv').leader.manager.catalogs['disk'].journal\n"
        "while index._written < index._given: time.sleep(0.01)\n"
        "print('kept', flush=True)\n"
        "time.sleep(100)\n"
    )
    engine = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        while engine.stdout.readline() not in (b"kept\n", b""):
            pass
    finally:
        engine.kill()
        engine.wait()
        engine.stdout.close()
    torch.manual_seed(1)
    pool = host_pool()
    content = fill(pool)
    controller = controllers(pool)
    pool.kv_buffer.zero_()
    got = prefetch(controller, pool, prompt(7, 60))
    assert len(got) == 40 * PAGE
    for page, mine in enumerate(got[::PAGE]):
        assert page_of(pool, mine) == page_of(pool, page * PAGE, content)


def test_detached_and_attached_again_it_finds_its_pages(controllers):
    pool = host_pool()
    controller = controllers(pool)
    tokens = list(range(20 * PAGE))
    indices = pool.alloc(len(tokens))
    fill(pool)
    back_up(controller, tokens, indices)
    controller.detach_storage_backend()
    again = controllers(pool)
    assert len(prefetch(again, pool, tokens)) == len(tokens)
    again.storage_backend.clear()
    assert len(prefetch(again, pool, tokens)) == 0


def test_sglang_stops_at_a_page_that_was_spoiled(controllers, tmp_path):
    pool = host_pool()
    controller = controllers(pool)
    tokens = list(range(8 * PAGE))
    indices = pool.alloc(len(tokens))
    fill(pool)
    page = page_of(pool, indices[3 * PAGE])[:64]
    back_up(controller, tokens, indices)
    controller.detach_storage_backend()
    (slab,) = tmp_path.glob("*/*.slab")
    content = bytearray(slab.read_bytes())
    content[content.index(page) + 1] ^= 1
    slab.write_bytes(content)
    again = controllers(pool)
    assert len(prefetch(again, pool, tokens)) == 3 * PAGE
    assert len(prefetch(again, pool, tokens)) == 3 * PAGE


def test_a_disk_that_hangs_ends_a_prefetch_and_not_the_engine(controllers, stall):
    pool = host_pool()
    controller = controllers(pool)
    tokens = list(range(8 * PAGE))
    indices = pool.alloc(len(tokens))
    fill(pool)
    back_up(controller, tokens, indices)
    controller.detach_storage_backend()
    again = controllers(pool, inject_faults="disk-slow-read", disk_load_timeout_secs=0.2)
    got = prefetch(again, pool, tokens)
    assert len(got) == 0
    assert not stall.over.is_set()  # the disk has not answered yet
