"""The tier under SGLang's page store: another instance finds what one has written."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from object_servers import BUCKET

from tiernames import OBJECT

sys.path.append(str(Path(__file__).parents[2] / "engines" / "sglang"))


def settings(weed):
    found = weed.settings()
    return {
        "object_enabled": True, "object_bucket": BUCKET, "object_endpoint": found.endpoint,
        "object_access_key": found.access_key, "object_secret_key": found.secret_key, "object_timeout_secs": 30.0,
        "object_lookup_secs": 30.0, "disable_disk_offload_filter": True,
    }  # fmt: skip


def test_pages_of_sglang(weed, tmp_path):
    """SGLang asks once. Its thread waits for the answer of the bucket, so an empty machine finds the pages at once."""
    from engine_pages import get, keys, open_store, put, wait_until

    cache = {"engine": "sglang", "model": os.urandom(8).hex(), "layout": "x"}
    numbers = list(range(40))
    first = open_store(tmp_path / "a", host=200, disk=0, cache=cache, **settings(weed))
    try:
        assert first.count(keys(*numbers)) == 0
        assert all(put(first, numbers))
        wait_until(lambda: not first.leader.moves_under_way)
        assert first.counts.moved_blocks == {OBJECT: 40}
    finally:
        first.close()
    second = open_store(tmp_path / "b", host=200, disk=0, cache=cache, **settings(weed))
    try:
        assert second.count(keys(*numbers, 1000)) == 40
        assert get(second, numbers) == numbers
        assert second.counts.onboarded_blocks[OBJECT] == 40
    finally:
        second.close()
