from __future__ import annotations

import gc

import pytest
from engine_pages import open_store


@pytest.fixture
def stores(tmp_path):
    made = []

    def make(host=0, disk=64, **options):
        made.append(open_store(tmp_path, host, disk, **options))
        return made[-1]

    yield make
    for store in made:
        store.close()


# -- for tests with SGLang's own classes, which are marked so ---------------------------------------------------------


@pytest.fixture
def around_sglang(monkeypatch):
    """What the classes find in the process around them."""
    import engine_pools
    from sglang.srt.mem_cache.pool_host import base

    gc.unfreeze()  # tests/conftest.py hides everything from the collector, and so from the search for loaded models
    engine_pools.serve_no_adapters(monkeypatch.setattr)
    # SGLang leaves 10 GB of a machine alone; these pools have some hundred kilobytes.
    monkeypatch.setattr(base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 0)


@pytest.fixture
def model():
    """Stands for the model that a server has loaded in this process."""
    import engine_pools

    yield engine_pools.MODEL
    engine_pools.MODEL.weight.data.fill_(1.0)


@pytest.fixture
def backends(tmp_path):
    import engine_pools
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    made = []

    def make(pool, pools=None, **options):
        config = engine_pools.storage_config(tmp_path, **options)
        made.append(StorageBackendFactory.create_backend("dynamic", config, pool))
        made[-1].register_mem_pool_host(pool)
        for name, other in (pools or {}).items():
            made[-1].register_mem_host_pool_v2(other, name)
        made[-1].on_host_pools_registered()
        return made[-1]

    yield make
    for backend in made:
        backend.close()
