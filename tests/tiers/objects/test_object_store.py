"""Blocks to a real S3 store and back."""

import threading

import pytest
from object_blocks import BLOCK, Blocks, ended, group_places, new_names, open_store, random_keys, single_places

from kvbm.tiers.objects.client import Client, ObjectStoreError
from kvbm.tiers.objects.format import object_of

SECRETS = pytest.mark.parametrize("secret", ["", "a secret"], ids=["plain", "encrypted"])


@SECRETS
def test_another_instance_reads_what_one_has_written(weed, secret):
    settings = weed.settings(encryption_secret=secret)
    names = new_names(secret)
    keys, memory, target = random_keys(70), Blocks(70), Blocks(70)
    places = group_places(keys[:64]) + single_places(keys[64:])
    writer, reader = open_store(settings, names), open_store(settings, names)
    written = ended(writer.write(places, memory.addresses, keys))
    assert (written.bad, written.reason) == ([], "")
    assert written.bytes == 70 * BLOCK
    assert written.seconds > 0
    read = ended(reader.read(places, target.addresses, keys))
    assert (read.bad, read.reason) == ([], "")
    assert [target[i] for i in range(70)] == [memory[i] for i in range(70)]
    # Two groups of 32 blocks and six single objects.
    assert len(list(Client(settings).list(names.prefix(0)))) == 8
    assert writer.close()
    assert reader.close()


def test_part_of_a_group_can_be_read(weed):
    names = new_names()
    keys, memory, target = random_keys(32), Blocks(32), Blocks(3)
    places = group_places(keys)
    store = open_store(weed.settings(), names)
    assert not ended(store.write(places, memory.addresses, keys)).bad
    wanted = [30, 2, 17]
    read = ended(store.read([places[i] for i in wanted], target.addresses, [keys[i] for i in wanted]))
    assert not read.bad
    assert [target[i] for i in range(3)] == [memory[i] for i in wanted]
    store.close()


def test_an_object_is_written_once_and_never_overwritten(weed):
    names = new_names()
    keys, first, second, target = random_keys(1), Blocks(1), Blocks(1), Blocks(1)
    store = open_store(weed.settings(), names)
    for memory in (first, second):
        assert not ended(store.write(single_places(keys), memory.addresses, keys)).bad
    assert not ended(store.read(single_places(keys), target.addresses, keys)).bad
    assert target[0] == first[0]
    store.close()


def test_part_of_a_group_is_not_written(weed):
    names = new_names()
    keys, memory = random_keys(32), Blocks(32)
    store = open_store(weed.settings(), names)
    written = ended(store.write(group_places(keys)[:31], memory.addresses[:31], keys[:31]))
    assert written.bad == list(range(31))
    assert "31 of the 32 blocks" in written.reason
    assert not list(Client(weed.settings()).list(names.prefix(0)))
    store.close()


def test_a_missing_object_fails_its_blocks_and_no_others(weed):
    names = new_names()
    keys, memory, target = random_keys(4), Blocks(4), Blocks(4)
    places = single_places(keys)
    store = open_store(weed.settings(), names)
    assert not ended(store.write(places[:2] + places[3:], memory.addresses[:3], keys[:2] + keys[3:])).bad
    read = ended(store.read(places, target.addresses, keys))
    assert read.bad == [2]
    assert "is not in bucket" in read.reason
    store.close()


def test_a_block_of_another_generation_is_refused(weed):
    names = new_names()
    keys, memory, target = random_keys(1), Blocks(1), Blocks(1)
    store = open_store(weed.settings(), names)
    assert not ended(store.write(single_places(keys), memory.addresses, keys)).bad
    read = ended(store.read(single_places(keys), target.addresses, [keys[0] + b"12345678"]))
    assert read.bad == [0]
    assert "another block" in read.reason
    store.close()


def test_damage_at_rest_is_noticed_and_does_not_stay(weed):
    """Objects are never overwritten, so a damaged one would keep its block out of the store for ever."""
    names = new_names()
    keys, memory, target = random_keys(1), Blocks(1), Blocks(1)
    places = single_places(keys)
    store = open_store(weed.settings(), names)
    assert not ended(store.write(places, memory.addresses, keys)).bad
    (listed,) = Client(weed.settings()).list(names.prefix(0))
    data = weed.stored_bytes(listed.name)
    for damaged in (data[: len(data) // 2], data[:-1] + bytes([data[-1] ^ 1])):
        weed.overwrite(listed.name, damaged)
        assert ended(store.read(places, target.addresses, keys)).bad == [0]
        assert not ended(store.write(places, memory.addresses, keys)).bad
        assert not ended(store.read(places, target.addresses, keys)).bad
        assert target[0] == memory[0]
    store.close()


def test_an_object_of_another_key_is_noticed_and_does_not_stay(weed):
    names = new_names()
    keys, memory, target = random_keys(2), Blocks(2), Blocks(2)
    places = single_places(keys)
    store = open_store(weed.settings(), names)
    assert not ended(store.write(places, memory.addresses, keys)).bad
    name, other = (names.of(0, object_of(place)) for place in places)
    weed.overwrite(name, weed.stored_bytes(other))
    read = ended(store.read(places, target.addresses, keys))
    assert read.bad == [0]
    assert "another" in read.reason
    assert not ended(store.write(places, memory.addresses, keys)).bad
    assert not ended(store.read(places, target.addresses, keys)).bad
    assert [target[i] for i in range(2)] == [memory[i] for i in range(2)]
    store.close()


def test_a_damaged_object_that_cannot_be_deleted_is_not_taken_for_a_good_one(weed):
    """The write of its blocks finds an object of the right name and size."""
    names = new_names()
    keys, memory, target = random_keys(1), Blocks(1), Blocks(1)
    places = single_places(keys)
    store = open_store(weed.settings(), names)
    assert not ended(store.write(places, memory.addresses, keys)).bad
    name = names.of(0, object_of(places[0]))
    data = weed.stored_bytes(name)
    weed.overwrite(name, data[:-1] + bytes([data[-1] ^ 1]))
    delete = store._client.delete

    def refuse(names):
        raise ObjectStoreError("access denied")

    store._client.delete = refuse
    assert ended(store.read(places, target.addresses, keys)).bad == [0]
    assert ended(store.write(places, memory.addresses, keys)).bad == [0]
    store._client.delete = delete
    assert not ended(store.write(places, memory.addresses, keys)).bad
    assert not ended(store.read(places, target.addresses, keys)).bad
    assert target[0] == memory[0]
    assert not store._damaged
    stays = open_store(weed.settings(), names)
    stays._remember_damage(name)
    stays._client.delete([name])  # by another engine
    assert not ended(stays.write(places, memory.addresses, keys)).bad
    assert not stays._damaged, "what it has written itself is good"
    stays.close()
    store.close()


def test_memory_for_objects_is_bounded(weed):
    settings = weed.settings(memory_bytes=3 * BLOCK, concurrency=16)
    store = open_store(settings, new_names())
    keys, memory = random_keys(40), Blocks(40)
    seen = []
    put = store._client.put

    def watched(name, pieces):
        seen.append(store._client.memory.used)
        return put(name, pieces)

    store._client.put = watched
    assert not ended(store.write(single_places(keys), memory.addresses, keys)).bad
    assert len(seen) == 40
    assert max(seen) <= 3 * BLOCK
    assert store._client.memory.used == 0
    store.close()


def test_an_operation_on_nothing_ends(weed):
    store = open_store(weed.settings(), new_names())
    assert ended(store.read([], [], [])).bad == []
    assert store.close()
    after = ended(store.read(single_places(random_keys(1)), Blocks(1).addresses, random_keys(1)))
    assert after.bad == [0]
    assert "closed" in after.reason


def test_what_has_not_begun_when_the_store_closes_is_given_up(weed):
    store = open_store(weed.settings(concurrency=1), new_names())
    begun, go_on = threading.Event(), threading.Event()
    put = store._client.put

    def slow(name, pieces):
        begun.set()
        assert go_on.wait(60)
        return put(name, pieces)

    store._client.put = slow
    keys, memory = random_keys(5), Blocks(5)
    operation = store.write(single_places(keys), memory.addresses, keys)
    assert begun.wait(60)
    assert not store.close(0.05), "the first write still uses its memory"
    go_on.set()
    assert len(ended(operation).bad) == 4


def test_a_cancelled_read_skips_what_has_not_begun(weed):
    store = open_store(weed.settings(), new_names())
    hold = store._client.memory.take(store._client.settings.memory_bytes)
    keys, target = random_keys(100), Blocks(100)
    operation = store.read(single_places(keys), target.addresses, keys)
    operation.cancel()
    store._client.memory.give(hold)
    assert ended(operation).bad == list(range(100))
    store.close()


def test_the_rate_is_measured_and_leaves_no_object(weed):
    names = new_names()
    store = open_store(weed.settings(), names)
    rate = store.measure()
    assert rate is not None
    assert rate.bytes_per_second > 1e6
    assert 0 < rate.fixed_seconds < 10
    assert not list(Client(weed.settings()).list(f"{names.root}/"))
    store.close()
