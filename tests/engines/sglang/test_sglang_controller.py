"""The backend under SGLang's own controller and its three threads: one asks, one reads, one writes."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(180), pytest.mark.usefixtures("around_sglang")]

pytest.importorskip("sglang.srt.mem_cache.hicache_storage", reason="make test-sglang installs SGLang")

import torch
from engine_pools import (
    PAGE,
    fill,
    host_pool,
    page_of,
    serve_no_adapters,
    storage_config,
)
from sglang.srt.managers import cache_controller
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.pool_host import base as pool_base


def stand_in(patch):
    """For what SGLang's controller asks of the processes around it: there is one rank."""
    parallel = SimpleNamespace(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_dcp_size=1, attn_dcp_rank=0, attn_tp_rank=0, attn_tp_size=1,
        attn_dp_rank=0,
    )  # fmt: skip
    patch(cache_controller, "get_parallel", lambda: parallel)
    patch(cache_controller, "is_dp_attention_enabled", lambda: False)
    patch(pool_base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 0)
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
        "import test_sglang_controller as here, time\n"
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
