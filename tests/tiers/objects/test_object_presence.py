"""A lookup never waits for the network: it gets found, missing or pending, and the answer comes later."""

import threading
import time

import pytest
from object_blocks import WAIT_SECONDS, Blocks, ended, group_places, new_names, open_store, random_keys, single_places

from kvbm.core.catalog import PENDING
from kvbm.tiers.objects.catalog import ObjectCatalog
from kvbm.tiers.objects.client import Client, ObjectStoreError
from kvbm.tiers.objects.format import blocks_in, object_of
from kvbm.tiers.objects.presence import MAX_CHECKS, WAIT_SHARE, Presence
from kvbm.tiers.objects.settings import ObjectSettings

BITS = 5  # of blocks of 64 KiB


class Bucket:
    """Stands in for a client where the order and number of requests matter; answers when it may."""

    def __init__(self, names=()):
        self.there = set(names)
        self.asked = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.suspended = ""
        self.is_doubted = False
        self.settings = ObjectSettings(bucket="none", concurrency=4)

    def exists(self, name):
        self.asked.append(name)
        assert self.may_answer.wait(WAIT_SECONDS)
        return name in self.there


def settled(presence):
    deadline = time.monotonic() + WAIT_SECONDS
    while presence.checks:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def found_run(presence, keys, start=0):
    places = []
    for key in keys[start:]:
        place = presence.find(key)
        if place is None or place == PENDING:
            break
        places.append(place)
    return places


@pytest.fixture
def opened():
    made = []

    def make(*clients, names=None, bits=0, **options):
        presence = Presence(clients, names or new_names(), bits, **{"lookup_seconds": WAIT_SECONDS, **options})
        made.append(presence)
        return presence

    yield make
    for presence in made:
        presence.close(5)


class Clock:
    """Goes on with every look at it, however long the threads of a test are kept from running."""

    sleep = staticmethod(time.sleep)

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        self.now += 1e-4
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("kvbm.tiers.objects.presence.time", clock)
    return clock


def test_blocks_of_another_engine_are_found_in_a_real_store(weed, opened):
    names, keys, memory = new_names(), random_keys(70), Blocks(70)
    store = open_store(weed.settings(), names)
    places = group_places(keys[:64]) + single_places(keys[64:68])
    assert not ended(store.write(places, memory.addresses[:68], keys[:68])).bad
    store.close()
    client = Client(weed.settings())
    presence = opened(client, names=names, bits=BITS)
    assert presence.find(keys[0]) is None, "nothing was asked yet"
    presence.expect(keys)
    settled(presence)
    assert found_run(presence, keys) == places
    assert presence.find(keys[68]) is None
    assert presence.latency_seconds > 0
    client.close()


def test_a_lookup_is_pending_until_the_answer_is_there(opened):
    names, keys = new_names(), random_keys(3)
    bucket = Bucket(names.of(0, object_of(place)) for place in single_places(keys))
    bucket.may_answer.clear()
    presence = opened(bucket, names=names)
    presence.expect(keys)
    assert presence.find(keys[0]) == PENDING
    bucket.may_answer.set()
    settled(presence)
    assert found_run(presence, keys) == single_places(keys)


def test_a_lookup_that_comes_again_gets_an_answer(opened):
    """The same check must not be started again: its blocks would be pending for ever."""
    keys = random_keys(3)
    bucket = Bucket()
    presence = opened(bucket)
    for _ in range(3):
        presence.expect(keys)
        settled(presence)
        presence.expect(keys)
        assert presence.find(keys[0]) is None
    assert len(bucket.asked) == 3, "the first window, once"


def test_after_the_deadline_a_lookup_uses_what_is_known(opened):
    bucket = Bucket()
    bucket.may_answer.clear()
    presence = opened(bucket, lookup_seconds=0.0)
    keys = random_keys(1)
    presence.expect(keys)
    assert presence.find(keys[0]) is None
    bucket.may_answer.set()


def test_a_prompt_that_is_not_there_costs_one_window(opened):
    bucket = Bucket()
    presence = opened(bucket)
    presence.expect(random_keys(1000))
    settled(presence)
    assert len(bucket.asked) == 8


def test_a_long_prompt_that_is_there_is_found_to_its_end(opened):
    names, keys = new_names(), random_keys(1000)
    bucket = Bucket(names.of(0, object_of(place)) for place in single_places(keys[:777]))
    presence = opened(bucket, names=names)
    presence.expect(keys)
    settled(presence)
    assert len(found_run(presence, keys)) == 777
    assert presence.find(keys[777]) is None


def test_prompts_with_a_common_prefix_ask_once(opened):
    names, keys = new_names(), random_keys(8)
    bucket = Bucket(names.of(0, object_of(place)) for place in single_places(keys))
    bucket.may_answer.clear()
    presence = opened(bucket, names=names)
    for end in (5, 6, 7, 8):
        presence.expect(keys[:end])
    bucket.may_answer.set()
    settled(presence)
    assert len(found_run(presence, keys)) == 8
    assert sorted(bucket.asked) == sorted(bucket.there)


def test_a_block_is_found_only_when_every_rank_has_written_it(opened):
    names, keys = new_names(), random_keys(2)
    first, second = single_places(keys)
    ranks = [Bucket({names.of(rank, object_of(first)), names.of(rank, object_of(second))}) for rank in range(3)]
    ranks[2].there.discard(names.of(2, object_of(second)))
    presence = opened(*ranks, names=names)
    presence.expect(keys)
    settled(presence)
    assert found_run(presence, keys) == [first]


def test_blocks_after_a_group_that_was_written_block_by_block_are_found(opened):
    names, keys = new_names(), random_keys(96)
    grouped = group_places(keys)
    stored = grouped[:32] + single_places(keys[32:64]) + grouped[64:]
    bucket = Bucket(names.of(0, object_of(place)) for place in stored)
    presence = opened(bucket, names=names, bits=BITS)
    presence.expect(keys)
    settled(presence)
    assert found_run(presence, keys) == stored


def test_groups_are_aligned_to_the_start_of_the_prompt(opened):
    """Also where the first blocks lie in host memory and only the rest is looked for."""
    names, keys = new_names(), random_keys(64)
    places = group_places(keys)
    bucket = Bucket(names.of(0, object_of(place)) for place in places)
    presence = opened(bucket, names=names, bits=BITS)
    presence.expect(keys, 40)
    settled(presence)
    assert found_run(presence, keys, 40) == places[40:]
    assert len(bucket.asked) == 1


def test_own_writes_are_known_at_once_and_bad_reads_are_forgotten(opened):
    bucket = Bucket()
    presence = opened(bucket)
    keys = random_keys(4)
    presence.add(single_places(keys))
    assert found_run(presence, keys) == single_places(keys)
    assert presence.objects == 4
    presence.discard(single_places(keys)[1:2])
    assert len(found_run(presence, keys)) == 1
    assert not bucket.asked


def test_whole_groups_are_written_as_one_object_and_the_rest_alone(opened):
    presence = opened(Bucket(), bits=BITS)
    keys = random_keys(100)
    assert presence.place_for_write(keys) == single_places(keys), "without a lookup nothing says what follows what"
    presence.expect(keys)
    settled(presence)
    places = presence.place_for_write(keys[:70])
    assert places == group_places(keys[:64]) + single_places(keys[64:70])
    assert [blocks_in(object_of(place)) for place in (places[0], places[69])] == [32, 1]
    assert presence.place_for_write(keys[1:32]) == single_places(keys[1:32])


def test_groups_are_known_of_a_prompt_that_came_while_the_store_was_out_of_use(opened):
    """Its blocks are written when a request has found them again, which looks no further than host memory."""
    bucket = Bucket()
    bucket.suspended = "down"
    presence = opened(bucket, bits=BITS)
    keys = random_keys(40)
    presence.expect(keys)
    deadline = time.monotonic() + WAIT_SECONDS
    while presence.place_for_write(keys) != group_places(keys[:32]) + single_places(keys[32:]):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert not bucket.asked


def test_a_batch_of_writes_ends_at_the_end_of_a_group(opened):
    presence = opened(Bucket(), bits=BITS)
    keys = random_keys(100)
    catalog = ObjectCatalog([presence._clients[0]], presence)
    assert catalog.fitting(keys, 40) == 40, "no group is known"
    presence.expect(keys)
    settled(presence)
    assert [catalog.fitting(keys, room) for room in (31, 32, 63, 70, 96, 99, 100, 200)] == [
        0, 32, 32, 64, 96, 99, 100, 200
    ]  # fmt: skip


def test_answers_age(opened):
    names, keys = new_names(), random_keys(1)
    bucket = Bucket()
    presence = opened(bucket, names=names, missing_seconds=0.05, present_seconds=0.05)
    presence.expect(keys)
    settled(presence)
    assert presence.find(keys[0]) is None
    bucket.there = {names.of(0, object_of(single_places(keys)[0]))}  # another engine has written it
    time.sleep(0.06)
    presence.expect(keys)
    deadline = time.monotonic() + WAIT_SECONDS
    while len(bucket.asked) < 2:
        assert time.monotonic() < deadline
    settled(presence)
    time.sleep(0.06)
    assert presence.find(keys[0]) in (None, PENDING), "present once is not present for ever"


def test_what_is_known_is_bounded(opened):
    presence = opened(Bucket(), max_objects=100)
    for _ in range(10):
        presence.add(single_places(random_keys(50)))
    assert presence.objects == 100


def test_checks_under_way_are_bounded(opened):
    bucket = Bucket()
    bucket.may_answer.clear()
    presence = opened(bucket)
    for _ in range(MAX_CHECKS + 10):
        presence.expect(random_keys(2))
    assert presence.checks == MAX_CHECKS
    bucket.may_answer.set()
    settled(presence)


def test_a_store_that_is_suspended_is_not_asked(opened):
    bucket = Bucket()
    bucket.suspended = "down"
    presence = opened(bucket)
    keys = random_keys(1)
    presence.expect(keys)
    assert presence.find(keys[0]) is None
    assert not bucket.asked


def test_a_failing_store_ends_the_check(weed, proxy, opened):
    proxy.set_fault("500")
    client = Client(weed.settings(endpoint=proxy.endpoint, max_retries=0))
    presence = opened(client)
    keys = random_keys(50)
    presence.expect(keys)
    settled(presence)
    assert presence.find(keys[0]) is None
    client.close()


def test_the_deadline_of_a_lookup_follows_the_measured_time(opened, clock):
    bucket = Bucket()
    presence = opened(bucket, lookup_seconds=60.0)
    keys = random_keys(4)
    assert presence.answer_seconds(keys[0]) is None
    presence.expect(keys)
    settled(presence)
    assert 0 < presence.latency_seconds < 60
    bucket.may_answer.clear()
    other = random_keys(4)
    presence.expect(other)
    assert presence.find(other[0]) == PENDING
    assert presence.answer_seconds(other[0]) < 60
    clock.now += 1.0
    assert presence.find(other[0]) is None, "pending for the time that answers take, and not for the setting"
    bucket.may_answer.set()


def test_an_answer_may_be_late_by_a_part_of_what_computing_would_take(opened):
    bucket = Bucket()
    bucket.close = lambda: None
    presence = opened(bucket, lookup_seconds=600.0)
    catalog = ObjectCatalog([bucket], presence, block_bytes=1000)
    presence.expect(random_keys(4))
    settled(presence)
    bucket.may_answer.clear()

    def wait(rate):
        catalog.break_even = lambda: rate
        keys = random_keys(4)
        presence.expect(keys)
        return presence._checks[-1].deadline - presence._checks[-1].began

    assert wait(1.0) == pytest.approx(WAIT_SHARE * 4000, abs=1)
    assert wait(0.1) == pytest.approx(600, abs=1), "the setting is the most"
    assert wait(1e9) < 100
    bucket.may_answer.set()
    catalog.close()


def test_no_lookup_waits_for_a_store_that_owes_an_answer(opened, clock):
    bucket = Bucket()
    bucket.may_answer.clear()
    presence = opened(bucket, lookup_seconds=0.05)
    first, second = random_keys(2), random_keys(2)
    presence.expect(first)
    assert presence.find(first[0]) == PENDING
    clock.now += 0.06
    presence.expect(second)
    assert presence.find(second[0]) is None
    bucket.may_answer.set()
    settled(presence)
    third = random_keys(2)
    bucket.may_answer.clear()
    presence.expect(third)
    assert presence.find(third[0]) == PENDING
    bucket.may_answer.set()


def test_no_lookup_waits_for_a_store_that_did_not_answer_at_the_start(opened):
    bucket = Bucket()
    bucket.may_answer.clear()
    presence = opened(bucket, has_answered=False)
    first, second = random_keys(2), random_keys(2)
    presence.expect(first)
    assert presence.find(first[0]) is None
    bucket.may_answer.set()
    settled(presence)
    bucket.may_answer.clear()
    presence.expect(second)
    assert presence.find(second[0]) == PENDING, "it has answered by now"
    bucket.may_answer.set()


def test_no_lookup_waits_for_a_store_that_has_failed_until_it_answers(opened):
    class Failing(Bucket):
        fails = True

        def exists(self, name):
            if self.fails:
                raise ObjectStoreError("500")
            return super().exists(name)

    bucket = Failing()
    presence = opened(bucket)

    def is_pending():
        keys = random_keys(2)
        bucket.may_answer.clear()
        presence.expect(keys)
        found = presence.find(keys[0])
        bucket.may_answer.set()
        settled(presence)
        return found == PENDING

    presence.expect(random_keys(2))
    settled(presence)
    bucket.fails = False
    assert not is_pending(), "this one hears that the store answers again"
    assert is_pending()
