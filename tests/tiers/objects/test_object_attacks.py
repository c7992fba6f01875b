"""What a reader of the bucket sees, what a writer of rubbish can do, and what happens between a lookup and a read."""

from __future__ import annotations

import os
import struct
import time

import pytest
from object_blocks import WAIT_SECONDS, keys_of, random_keys
from test_object_presence import Bucket
from test_object_tier import Engine, content

from kvbm.core.catalog import PENDING
from kvbm.tiers.objects import tools
from kvbm.tiers.objects.capacity import trim
from kvbm.tiers.objects.catalog import ObjectCatalog
from kvbm.tiers.objects.client import Client
from kvbm.tiers.objects.format import Codec, Names, RefusedError
from kvbm.tiers.objects.presence import Presence
from tiernames import OBJECT

SECRET = "a cipher secret"
TOKENS = [int.from_bytes(os.urandom(3), "big") | 1 << 22 for _ in range(20)]


@pytest.fixture
def make(weed):
    made = []

    def engine(model, **options):
        made.append(Engine(weed, model, **options))
        return made[-1]

    yield engine
    for each in made:
        each.close()


@pytest.fixture
def model():
    return f"org/secret-model-{os.urandom(8).hex()}"


def dump(weed, engine):
    """Every name and every byte of one cache, as a reader with full access to the bucket gets them."""
    root = engine.hellos[0].tier(OBJECT).store
    found = list(Client(weed.settings()).list(f"{root}/"))
    return {listed.name: weed.stored_bytes(listed.name) for listed in found}


@pytest.mark.parametrize("secret", ["", SECRET], ids=["plain", "encrypted"])
def test_a_listing_and_leaked_objects_reveal_no_tokens_and_with_a_secret_no_kv(make, weed, model, secret):
    keys = keys_of(TOKENS, salt="tenant")
    engine = make(model, object_encryption_secret=secret)
    engine.serve(keys)
    objects = dump(weed, engine)
    assert len([name for name in objects if "/0/" in name]) >= 2
    seen = b"\n".join(name.encode() + b"\n" + data for name, data in objects.items())
    for order in (struct.pack("<3i", *TOKENS[:3]), struct.pack("<3q", *TOKENS[:3]), struct.pack(">3i", *TOKENS[:3])):
        assert order not in seen
    assert b" ".join(str(token).encode() for token in TOKENS[:3]) not in seen
    kv = [struct.pack("<8i", *[content(key, 0)] * 8) for key in keys]
    if secret:
        assert not [block for block in kv if block in seen]
        assert not [key for key in keys if key in seen or key.hex().encode() in seen or key[:7].hex().encode() in seen]
        assert model.encode() not in seen
        for wrong in ("", "another secret"):
            codec = Codec(Names({"model": model, "layout": "x"}, wrong).scope, wrong)
            for name, data in objects.items():
                if "/0/" in name:
                    with pytest.raises(RefusedError):
                        codec.open(data)
    else:
        assert [block for block in kv if block in seen], "the search would find KV if it were there"


@pytest.mark.parametrize("secret", ["", SECRET], ids=["plain", "encrypted"])
def test_two_salts_never_share_an_object(make, weed, model, secret):
    engine = make(model, object_encryption_secret=secret)
    engine.serve(keys_of(TOKENS, salt="one"))
    first = dump(weed, engine)
    other = make(model, object_encryption_secret=secret)
    assert other.serve(keys_of(TOKENS, salt="two")) == 0, "the other tenant's blocks are not found"
    second = {name: data for name, data in dump(weed, engine).items() if name not in first}
    assert len(second) == len([name for name in first if "/0/" in name])
    assert {name: data for name, data in dump(weed, engine).items() if name in first} == first
    assert make(model, object_encryption_secret=secret).serve(keys_of(TOKENS, salt="one")) == 20


def test_a_bucket_full_of_foreign_objects(make, weed, model):
    """They cost requests of a listing; blocks are found beside them, and only objects of this cache are deleted."""
    client = Client(weed.settings())
    engine = make(model)
    keys = random_keys(16)
    engine.serve(keys)
    root = engine.hellos[0].tier(OBJECT).store
    foreign = [f"other/{i}" for i in range(30)] + [f"kvbm-1/{i}/cache" for i in range(5)] + ["kvbm-1/rubbish/0/x-9"]
    inside = [f"{root}/0/rubbish", f"{root}/0/a-b-c", f"{root}/0/deep/er/x-999999", f"{root}/0/x-0"]
    for name in foreign + inside:
        client.put(name, [os.urandom(100)])
    names = Names({"model": model, "layout": engine.hellos[0].layout})
    assert names.root == root
    assert make(model).serve(keys) == 16
    listed = {cache.root: cache for cache in tools.list_caches(weed.settings())}
    assert listed[root].blocks == 16
    assert tools.verify(listed[root], weed.settings(), lambda *_: None) == (16, [])
    assert trim([client], names, 1).deleted == 16
    left = {found.name for found in client.list("other/")}
    assert left == {name for name in foreign if name.startswith("other/")}
    assert {found.name for found in client.list(f"{root}/0/")} == set(inside)
    client.delete(foreign + inside)


def test_rubbish_under_a_blocks_own_name_costs_a_hit(make, weed, model):
    engine = make(model)
    keys = random_keys(16)
    engine.serve(keys)
    (listed,) = Client(weed.settings()).list(f"{engine.hellos[0].tier(OBJECT).store}/0/")
    weed.overwrite(listed.name, os.urandom(1000))
    other = make(model)
    match = other.lookup(keys)
    plan = other.leader.onboard(match, "r", range(match.blocks), in_step=False)
    bad = set().union(*(outcome.bad_blocks for outcome in other.step(loads=[plan]))) | other.run()
    assert bad == set(range(16))


@pytest.mark.parametrize("fetch", [False, True], ids=["load", "fetch"])
def test_objects_that_are_deleted_between_lookup_and_read(make, weed, model, fetch):
    engine = make(model)
    keys = random_keys(16)
    engine.serve(keys)
    other = make(model)
    match = other.lookup(keys)
    assert match.blocks == 16
    client = Client(weed.settings())
    client.delete([item.name for item in client.list(f"{engine.hellos[0].tier(OBJECT).store}/0/")])
    if fetch:
        assert other.leader.fetches.start(match) == 16
        other.run()
        assert other.leader.counts.failed_fetch_blocks == {OBJECT: 16}
    else:
        plan = other.leader.onboard(match, "r", range(16), in_step=False)
        assert set().union(*(o.bad_blocks for o in other.step(loads=[plan]))) | other.run() == set(range(16))
    assert other.leader.manager.near.free == 96, "no slot leaks"
    assert other.serve(keys) == 0
    assert other.leader.counts.moved_blocks == {OBJECT: 16}, "they are written anew"


def test_blocks_are_fetched_ahead_into_host_memory(make, model):
    keys = random_keys(16)
    make(model).serve(keys)
    other = make(model)
    assert other.leader.fetches.start(other.lookup(keys)) == 16
    other.run()
    match = other.lookup(keys)
    assert {run.tier for run in match.runs} == {other.leader.manager.near_tier}
    assert other.serve(keys) == 16, "and they are right"


def test_a_reset_while_a_check_and_a_fetch_are_under_way(make, model):
    keys = random_keys(16)
    make(model).serve(keys)
    other = make(model)
    other.leader.fetches.start(other.lookup(keys))
    other.leader.manager.expect(random_keys(4), 0, 4)
    other.leader.reset()
    other.run()
    assert other.lookup(keys).blocks == 0
    assert other.leader.manager.near.free == 96
    assert other.leader.counts.fetched_blocks.get(OBJECT, 0) == 0


def test_an_answer_that_comes_after_a_clear_finds_nothing():
    names, keys = Names({"model": "m"}), random_keys(3)
    bucket = Bucket()
    bucket.exists = lambda name: bucket.may_answer.wait(WAIT_SECONDS)
    bucket.close = lambda: None
    bucket.may_answer.clear()
    presence = Presence([bucket], names, 0, lookup_seconds=WAIT_SECONDS)
    catalog = ObjectCatalog([bucket], presence)
    catalog.expect(keys)
    assert catalog.find(keys[0]) == PENDING
    catalog.clear()
    assert catalog.find(keys[0]) is None
    assert catalog.answer_seconds(keys[0]) is None
    bucket.may_answer.set()
    deadline = time.monotonic() + WAIT_SECONDS
    while presence.checks and time.monotonic() < deadline:
        time.sleep(0.005)
    assert catalog.find(keys[0]) is None
    assert not catalog.findable
    catalog.close()


def test_a_huge_prompt_does_not_hold_up_the_leader():
    """Two million tokens: the leader's calls take no longer than copying a list, whatever the threads do."""
    keys = [os.urandom(32) for _ in range(1 << 17)]
    bucket = Bucket()
    presence = Presence([bucket], Names({"model": "m"}), 5, lookup_seconds=60.0)
    began = time.thread_time()
    presence.expect(keys)
    presence.find(keys[0])
    presence.answer_seconds(keys[0])
    assert time.thread_time() - began < 0.05
    deadline = time.monotonic() + WAIT_SECONDS
    while presence.checks:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(bucket.asked) < 100, "nothing is there: one window is asked for"
    presence.close(5)
