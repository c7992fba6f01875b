"""Pages of an engine, and what tests of the SGLang stores do with them."""

from __future__ import annotations

import hashlib
import random
import re
import time

import numpy as np

from kvbm import config as settings
from kvbm.engines.sglang.store import PageStore
from kvbm.observe.metrics import render
from kvbm.observe.snapshot import Identity
from kvbm.observe.source import LeaderSource
from kvbm.tiers.base import RankContext

PAGE = 3 * 4096 - 512  # no multiple of a disk's block
CACHE = {"engine": "sglang", "model": "test", "layout": "x"}
SOON = 60.0


def keys(*numbers):
    return [hashlib.sha256(str(number).encode()).digest() for number in numbers]


class Pages:
    """Memory of the engine: every page in two pieces that lie apart, at addresses that are aligned to nothing."""

    def __init__(self, count):
        self.memory = np.zeros((2, count, PAGE // 2 + 8), dtype=np.uint8)
        self.count = count

    def __getitem__(self, page):
        base, (half, row, _) = self.memory.ctypes.data + 8, self.memory.strides
        return [(base + page * row, PAGE // 2), (base + half + page * row, PAGE // 2)]

    def all(self):
        return [self[page] for page in range(self.count)]

    def content(self, page):
        return self.memory[:, page, 8:].tobytes()

    def fill(self, page, number):
        self.memory[:, page, 8:] = np.frombuffer(content_of(number), dtype=np.uint8).reshape(2, -1)


def content_of(number):
    return random.Random(number).randbytes(PAGE)


def settings_for(tmp_path, **values):
    return settings.load(extra={"disk_cache_dir": str(tmp_path), "disk_bounce_mb": 1, **values}, environ={}, files=[])


def open_store(tmp_path, host=0, disk=64, cache=CACHE, access="own", options=None, **values):
    sizes = {"cpu_cache_override_num_blocks": host, "disk_cache_override_num_blocks": disk}
    context = RankContext(settings_for(tmp_path, **sizes, **values), 0, 1, PAGE, 3 * 4096, cache, access=access)
    return PageStore(context, **(options or {}))


def open_reader(tmp_path, options=None, **values):
    return open_store(tmp_path, access="reader", options=options, **values)


def put(store, numbers, pages=None):
    pages = pages or Pages(len(numbers))
    for page, number in enumerate(numbers):
        pages.fill(page, number)
    return store.put(keys(*numbers), [pages[page] for page in range(len(numbers))], time.monotonic() + SOON)


def get(store, numbers, patience=SOON):
    """What came: the number for every page that is right, None for one that did not come."""
    pages = Pages(len(numbers))
    came = store.get(keys(*numbers), pages.all(), patience)
    for page, (number, good) in enumerate(zip(numbers, came, strict=True)):
        # A page behind one that did not come may have arrived.
        assert pages.content(page) in ((content_of(number),) if good else (content_of(number), bytes(PAGE)))
    return [number if good else None for number, good in zip(numbers, came, strict=True)]


def wait_until(what, seconds=60.0):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


def figures(store, log):
    identity = Identity(
        kvbm="", engine="sglang", engine_version="", model="m", ranks=1, block_tokens=16, block_bytes=PAGE,
        engine_blocks=0,
    )  # fmt: skip
    snapshot = LeaderSource(identity, lambda: store.leader, log, store.cost, {}).snapshot()
    text = render(snapshot).decode()
    found = {name: float(value) for name, value in re.findall(r"^(kvbm_\w+) (\S+)$", text, re.M)}
    return snapshot, found
