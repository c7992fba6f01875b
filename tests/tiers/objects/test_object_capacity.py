"""The bound on blocks in the bucket, kept by one engine at a time."""

import time

import pytest
from object_blocks import WAIT_SECONDS, Blocks, ended, group_places, new_names, open_store, random_keys, single_places

from kvbm.tiers.objects.capacity import Keeper, Lease, statement, trim
from kvbm.tiers.objects.client import Client
from kvbm.tiers.objects.format import object_of


@pytest.fixture
def client(weed):
    opened = Client(weed.settings())
    yield opened
    opened.close()


def write(weed, names, places, keys, ranks=1, secret=""):
    memory = Blocks(len(keys))
    for rank in range(ranks):
        store = open_store(weed.settings(encryption_secret=secret), names, rank)
        assert not ended(store.write(places, memory.addresses, keys)).bad
        store.close()


@pytest.mark.parametrize("secret", ["", "a secret"], ids=["plain", "encrypted"])
def test_the_oldest_blocks_of_all_ranks_are_deleted_first(weed, client, secret):
    names = new_names(secret)
    old, young = random_keys(40), random_keys(10)
    write(weed, names, group_places(old[:32]) + single_places(old[32:]), old, 2, secret)
    time.sleep(1.1)  # a listing has whole seconds
    write(weed, names, single_places(young), young, 2, secret)
    client.put(names.lease, [b"is no block"])
    assert trim([client, client], names, 50) == (50, 0)
    left, deleted = trim([client, client], names, 20)
    assert left <= 20
    assert left + deleted == 50
    for rank in range(2):
        there = {listed.name for listed in client.list(names.prefix(rank))}
        assert {names.of(rank, object_of(place)) for place in single_places(young)} <= there
        assert len(there) == left, "single objects only"
    assert client.exists(names.lease)


def test_one_of_several_engines_holds_the_lease(client):
    names = new_names()
    first, second = Lease(client, names.lease, 60), Lease(client, names.lease, 60)
    assert first.hold()
    assert not second.hold()
    assert first.hold(), "renewed"
    assert not second.hold()
    first.release()
    assert second.hold()
    assert not first.hold()


def test_a_lease_that_is_not_renewed_is_taken_over(client):
    names = new_names()
    dead, next_one = Lease(client, names.lease, 0.2), Lease(client, names.lease, 0.2)
    assert dead.hold()
    assert not next_one.hold()
    time.sleep(0.25)
    assert next_one.hold()
    assert not dead.hold(), "it was away for too long"


def test_a_lease_that_is_renewed_is_not_taken_over(client):
    names = new_names()
    holder, other = Lease(client, names.lease, 1e6), Lease(client, names.lease, 0.0001)
    assert holder.hold()
    assert not other.hold()
    assert holder.hold()
    time.sleep(0.01)
    assert not other.hold(), "the lease has changed since it was seen"


def test_the_keeper_keeps_the_bound(weed, client):
    names, keys = new_names(), random_keys(30)
    write(weed, names, single_places(keys), keys)
    keeper = Keeper([client], names, 10, lease_seconds=1, trim_seconds=0.1)
    deadline = time.monotonic() + WAIT_SECONDS
    while len(list(client.list(names.prefix(0)))) > 10:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert keeper.close(30)
    assert not client.exists(names.lease), "released at the end"


def test_the_rule_in_force_is_said():
    assert "lifecycle rule" in statement(0)
    assert "1,000 blocks" in statement(1000)
