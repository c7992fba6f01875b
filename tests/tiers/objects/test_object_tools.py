"""A disk cache to a bucket and back."""

import time

import pytest
from object_blocks import BLOCK, WAIT_SECONDS, Blocks, ended, group_places, open_store, random_keys, single_places

from kvbm.core.catalog import PENDING
from kvbm.tiers.disk import inspect
from kvbm.tiers.disk.cache_dir import cache_directory, slab_path
from kvbm.tiers.disk.file import DiskFile
from kvbm.tiers.disk.index import Index
from kvbm.tiers.objects import tools
from kvbm.tiers.objects.client import Client
from kvbm.tiers.objects.format import MIN_OBJECT_BYTES, group_bits, object_of
from kvbm.tiers.objects.presence import Presence
from kvbm.tiers.objects.store import describe_cache

RANKS = 2


def make_cache(root, fingerprint, keys, ranks=RANKS):
    """A disk cache as an engine leaves it; returns the blocks of each rank."""
    directory = cache_directory(root, fingerprint)
    index = Index.open(directory, fingerprint, len(keys) + 3)
    slots = list(range(len(keys)))
    memories = []
    for rank in range(ranks):
        file = DiskFile(slab_path(directory, rank), len(keys) + 3, BLOCK)
        memory = Blocks(len(keys))
        assert not ended(file.write(slots, memory.addresses, keys)).bad
        file.close()
        memories.append(memory)
    index.put(list(zip(keys, slots, strict=True)))
    index.close()
    return directory, memories


def use(directory, fingerprint, *prompts):
    """A request for each of these prompts."""
    index = Index.open(directory, fingerprint, inspect.describe(directory).slots)
    for keys in prompts:
        index.touch(keys, is_prefix=True)
    index.close()


def until(condition):
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.01)


def read_cache(directory, keys, ranks=RANKS):
    """By rank the blocks of ``keys`` in a disk cache, verified."""
    cache = inspect.describe(directory)
    index = Index.open(directory, cache.fingerprint, cache.slots)
    slots = dict(index.entries())
    found = []
    for rank in range(ranks):
        file = DiskFile(slab_path(directory, rank), cache.slots, cache.slot_bytes)
        target = Blocks(len(keys))
        assert not ended(file.read([slots[key] for key in keys], target.addresses, keys)).bad
        file.close()
        found.append([target[i] for i in range(len(keys))])
    index.close()
    return found


class Progress:
    def __init__(self):
        self.steps = []

    def __call__(self, done, total):
        self.steps.append((done, total))

    def check(self, total):
        assert self.steps[-1] == (total, total)
        assert self.steps == sorted(self.steps)


def test_prefix_cache_comes_back_in_another_directory(weed, tmp_path):
    for secret in ("", "a secret"):
        settings = weed.settings(encryption_secret=secret)
        fingerprint = {"model": f"org/tiny{len(secret)}", "block_size": 16, "test": str(tmp_path)}
        keys = random_keys(50)
        directory, memories = make_cache(tmp_path / f"a{secret}", fingerprint, keys)
        progress = Progress()
        assert tools.push(directory, settings, progress) == (50, 0, "")
        progress.check(50)
        assert tools.push(directory, settings, Progress()).blocks == 50, "a second time nothing changes"

        (cache,) = [found for found in tools.list_caches(settings) if fingerprint.items() <= found.fingerprint.items()]
        assert (cache.blocks, cache.ranks, cache.block_bytes) == (50, RANKS, BLOCK)
        assert cache.bytes > 2 * 50 * BLOCK

        progress = Progress()
        assert tools.verify(cache, settings, progress) == (2 * 50, [])
        progress.check(2 * 50)

        progress = Progress()
        assert tools.pull(cache, tmp_path / f"b{secret}", settings, progress) == (50, 0, "")
        progress.check(50)
        pulled = cache_directory(tmp_path / f"b{secret}", fingerprint)
        assert all(not verdict.bad and verdict.good == 50 for verdict in inspect.verify(pulled, lambda *_: None))
        assert read_cache(pulled, keys) == [[memory[i] for i in range(50)] for memory in memories]


def test_small_blocks_of_one_prompt_are_pushed_in_the_groups_that_an_engine_looks_for(weed, tmp_path):
    settings = weed.settings()
    fingerprint = {"model": "m", "test": str(tmp_path)}
    size = 1 << group_bits(BLOCK)
    keys, others = random_keys(2 * size + 3), random_keys(size + 5)
    directory, memories = make_cache(tmp_path / "a", fingerprint, keys + others)
    use(directory, fingerprint, keys, others[: size // 2] + random_keys(3))
    progress = Progress()
    assert tools.push(directory, settings, progress) == (len(keys + others), 0, "")
    progress.check(len(keys + others))
    (cache,) = [found for found in tools.list_caches(settings) if found.fingerprint.get("test") == str(tmp_path)]
    listed = {listed.name: listed.bytes for listed in Client(settings).list(f"{cache.root}/0/")}
    names = tools.Names(fingerprint)
    groups = {names.of(0, object_of(place)) for place in group_places(keys[: 2 * size])}
    assert len(groups) == 2
    assert min(listed[name] for name in groups) >= MIN_OBJECT_BYTES
    alone = {names.of(0, object_of(place)) for place in single_places(keys[2 * size :] + others)}
    assert listed.keys() == groups | alone
    assert tools.verify(cache, settings, Progress()) == (RANKS * len(keys + others), [])
    # An engine that looks for the prompt finds all of it.
    presence = Presence([Client(settings)] * RANKS, names, group_bits(BLOCK), lookup_seconds=60.0)
    presence.expect(keys)
    until(lambda: PENDING not in [presence.find(key) for key in keys])
    assert [presence.find(key) for key in keys] == group_places(keys[: 2 * size]) + single_places(keys[2 * size :])
    presence.close()
    assert tools.pull(cache, tmp_path / "b", settings, Progress()).blocks == len(keys + others)
    found = read_cache(cache_directory(tmp_path / "b", fingerprint), keys + others)
    assert found == [[memory[i] for i in range(len(keys + others))] for memory in memories]


def test_a_block_that_cannot_be_read_costs_its_group_and_no_other_block(weed, tmp_path):
    settings = weed.settings()
    fingerprint = {"model": "m", "test": str(tmp_path)}
    size = 1 << group_bits(BLOCK)
    keys = random_keys(2 * size)
    directory, _ = make_cache(tmp_path, fingerprint, keys)
    use(directory, fingerprint, keys)
    with open(slab_path(directory, 1), "r+b") as slab:  # of the second rank: the first has written the group by then
        slab.seek(3 * BLOCK)
        slab.write(b"other")
    moved = tools.push(directory, settings, Progress())
    assert moved[:2] == (2 * size - 1, 1)
    assert moved.reason
    names = tools.Names(fingerprint)
    client = Client(settings)
    for rank in range(RANKS):
        for i, place in enumerate(single_places(keys[:size])):
            assert client.exists(names.of(rank, object_of(place))) == (i != 3 or rank == 0)
        assert client.exists(names.of(rank, object_of(group_places(keys)[-1])))


def test_caches_of_another_secret_are_not_listed(weed, tmp_path):
    fingerprint = {"model": "m", "test": str(tmp_path)}
    directory, _ = make_cache(tmp_path, fingerprint, random_keys(1), ranks=1)
    tools.push(directory, weed.settings(encryption_secret="one"), Progress())
    for secret in ("", "two"):
        found = tools.list_caches(weed.settings(encryption_secret=secret))
        assert not [cache for cache in found if cache.fingerprint.get("test") == str(tmp_path)]


def test_groups_of_an_engine_are_pulled_as_blocks(weed, tmp_path):
    settings = weed.settings()
    fingerprint = {"model": "m", "test": str(tmp_path)}
    names = tools.Names(fingerprint)
    keys, memory = random_keys(64), Blocks(64)
    store = open_store(settings, names)
    assert not ended(store.write(group_places(keys), memory.addresses, keys)).bad
    store.close()
    client = Client(settings)
    describe_cache(client, names, fingerprint, 1, BLOCK)
    (cache,) = [found for found in tools.list_caches(settings) if found.root == names.root]
    assert cache.blocks == 64
    assert tools.pull(cache, tmp_path, settings, Progress()).blocks == 64
    assert read_cache(cache_directory(tmp_path, fingerprint), keys, 1) == [[memory[i] for i in range(64)]]


def test_pull_takes_the_newest_blocks_that_fit(weed, tmp_path):
    settings = weed.settings()
    fingerprint = {"model": "m", "test": str(tmp_path)}
    directory, _ = make_cache(tmp_path / "a", fingerprint, random_keys(20), ranks=1)
    tools.push(directory, settings, Progress())
    (cache,) = [found for found in tools.list_caches(settings) if found.fingerprint.get("test") == str(tmp_path)]
    assert tools.pull(cache, tmp_path / "b", settings, Progress(), max_blocks=7).blocks == 7
    assert inspect.describe(cache_directory(tmp_path / "b", fingerprint)).blocks == 7


def test_damage_in_the_bucket_is_named_and_not_pulled(weed, tmp_path):
    settings = weed.settings()
    fingerprint = {"model": "m", "test": str(tmp_path)}
    keys = random_keys(5)
    directory, _ = make_cache(tmp_path / "a", fingerprint, keys, ranks=1)
    tools.push(directory, settings, Progress())
    (cache,) = [found for found in tools.list_caches(settings) if found.fingerprint.get("test") == str(tmp_path)]
    first, second, third, _, last = [listed.name for listed in Client(settings).list(f"{cache.root}/0/")]
    data = weed.stored_bytes(first)
    weed.overwrite(first, data[:-1] + bytes([data[-1] ^ 1]))
    weed.overwrite(second, weed.stored_bytes(second)[:100])
    weed.overwrite(third, weed.stored_bytes(last))
    verified = tools.verify(cache, settings, Progress())
    assert verified.good == 2
    assert dict(verified.bad).keys() == {first, second, third}
    assert "checksum" in dict(verified.bad)[first]
    assert "truncated" in dict(verified.bad)[second]
    assert "another block" in dict(verified.bad)[third]
    pulled = tools.pull(cache, tmp_path / "b", settings, Progress())
    assert pulled.failed == 2
    assert pulled.reason
    assert not [v for v in inspect.verify(cache_directory(tmp_path / "b", fingerprint), lambda *_: None) if v.bad]


def test_a_cache_in_use_is_not_pushed(weed, tmp_path):
    fingerprint = {"model": "m", "test": str(tmp_path)}
    keys = random_keys(3)
    directory, _ = make_cache(tmp_path, fingerprint, keys, ranks=1)
    held = Index.open(directory, fingerprint, 6)
    with pytest.raises(tools.ToolError, match="use"):
        tools.push(directory, weed.settings(), Progress())
    held.close()


def test_a_store_that_fails_is_an_error_with_its_reason(weed, tmp_path):
    directory, _ = make_cache(tmp_path, {"model": "m"}, random_keys(1), ranks=1)
    with pytest.raises(tools.ToolError, match=r"bucket kvbm-tests at .*the secret key is wrong"):
        tools.push(directory, weed.settings(secret_key="no"), Progress())
    with pytest.raises(tools.ToolError, match="cannot be read"):
        tools.push(tmp_path / "nothing", weed.settings(), Progress())
