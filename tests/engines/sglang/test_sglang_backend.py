"""The backend under SGLang's own classes: its base class, its host pools, its factory, its controller and threads.

Needs SGLang, which `make test-sglang` installs beside everything else; no GPU. What stands in for the rest of the
engine is said where it is made.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(180), pytest.mark.usefixtures("around_sglang")]

pytest.importorskip("sglang.srt.mem_cache.hicache_storage", reason="make test-sglang installs SGLang")

import torch
from engine_pools import (
    PAGE,
    PAGE_BYTES,
    fill,
    hashes,
    host_pool,
    storage_config,
)
from sglang.srt import runtime_context
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
)
from sglang.srt.mem_cache.storage import StorageBackendFactory

from kvbm.control import socket as control
from kvbm.engines.sglang.backend import KvbmStorage
from kvbm.engines.sglang.settings import Prefetch, read_prefetch
from servers import free_port


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
    port = free_port()
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
