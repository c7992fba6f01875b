"""The filter in front of the disk, against the words of the guide: "only offloads KV blocks from CPU to disk if the
blocks have frequency >= 2. Frequency doubles on cache hit (initialized at 1) and decrements by 1 on each time decay
step.\""""

from __future__ import annotations

import gc
import os
import resource
import time

import pytest

from kvbm.core.policy.admission import MAX_FREQUENCY, FrequencyFilter

A, B = b"a" * 32, b"b" * 32


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


# What happens to one block, and its frequency after each: o offered, h hit, d a decay step.
@pytest.mark.parametrize(
    ("history", "frequencies"),
    [
        ("o", [1]),
        ("oo", [1, 1]),
        ("oh", [1, 2]),
        ("ohh", [1, 2, 4]),
        ("ohhh", [1, 2, 4, 8]),
        ("od", [1, 0]),
        ("ohd", [1, 2, 1]),
        ("ohhd", [1, 2, 4, 3]),
        ("ohhdh", [1, 2, 4, 3, 6]),
        ("ohdd", [1, 2, 1, 0]),
        ("ohddo", [1, 2, 1, 0, 1]),
        ("oddddo", [1, 0, 0, 0, 0, 1]),
        ("h", [2]),
        ("odh", [1, 0, 2]),
        ("ohhdddd", [1, 2, 4, 3, 2, 1, 0]),
    ],
)
def test_frequency_starts_at_1_doubles_on_a_hit_and_loses_1_a_decay_step(clock, history, frequencies):
    counted = FrequencyFilter(clock, decay_seconds=600)
    seen = []
    for event in history:
        if event == "d":
            clock.now += 600
        admitted = {"o": counted.admit, "h": counted.hit, "d": lambda keys: []}[event]([A])
        seen.append(counted.frequency(A))
        assert admitted == ([A] if event != "d" and seen[-1] >= 2 else [])
    assert seen == frequencies


def test_only_what_has_been_hit_may_go_to_disk(clock):
    counted = FrequencyFilter(clock)
    assert counted.admit([A, B]) == []
    assert counted.hit([B]) == [B]
    assert counted.admit([A, B]) == [B]


def test_a_threshold_of_1_lets_everything_through(clock):
    assert FrequencyFilter(clock, threshold=1).admit([A, B]) == [A, B]


def test_a_step_comes_when_its_time_has_come_and_not_before(clock):
    counted = FrequencyFilter(clock, decay_seconds=600)
    counted.hit([A])
    clock.now += 599.9
    assert counted.frequency(A) == 2
    clock.now += 0.2
    assert counted.frequency(A) == 1
    clock.now += 599.8
    assert counted.frequency(A) == 1
    clock.now += 0.2
    assert counted.frequency(A) == 0


def test_after_a_long_pause_nothing_is_remembered(clock):
    counted = FrequencyFilter(clock, decay_seconds=1)
    for _ in range(20):
        counted.hit([A])
    assert counted.frequency(A) == MAX_FREQUENCY
    clock.now += 10.0**9
    assert len(counted) == 0
    counted.admit([A])
    assert counted.frequency(A) == 1


def test_a_full_table_makes_room_by_an_early_step_and_begins_the_interval_anew(clock):
    counted = FrequencyFilter(clock, decay_seconds=600, max_entries=4)
    counted.hit([A])  # 2
    counted.admit([b"1", b"2", b"3"])
    clock.now += 300
    counted.admit([B])
    assert [counted.frequency(key) for key in (A, b"1", b"2", b"3", B)] == [1, 0, 0, 0, 1]
    clock.now += 599
    assert counted.frequency(B) == 1
    clock.now += 1
    assert counted.frequency(B) == 0


def test_a_table_full_of_favourites_still_lets_a_new_block_in(clock):
    counted = FrequencyFilter(clock, max_entries=3)
    for _ in range(10):
        counted.hit([b"1", b"2", b"3"])
    counted.admit([A])
    assert counted.frequency(A) == 1
    assert len(counted) <= 3


def test_the_same_numbers_as_the_plainest_way_to_count(clock):
    counted = FrequencyFilter(clock, decay_seconds=10, max_entries=50)
    plain: dict[bytes, int] = {}
    due = clock.now + 10

    def step() -> None:
        for key in list(plain):
            plain[key] -= 1
            if not plain[key]:
                del plain[key]

    import random

    chance = random.Random(4)
    for _ in range(20_000):
        clock.now += chance.random() / 4
        while clock.now >= due:
            step()
            due += 10
        key = bytes([chance.randrange(80)])
        hit = chance.random() < 0.3
        (counted.hit if hit else counted.admit)([key])
        if key not in plain:
            if len(plain) >= 50:
                while len(plain) >= 50:
                    step()
                due = clock.now + 10
            plain[key] = 1
        if hit:
            plain[key] = min(plain[key] * 2, MAX_FREQUENCY)
        assert counted.frequency(key) == plain[key]
        assert len(counted) == len(plain)
        assert len(counted._ends) + len(counted._old) <= 2 * 50
    assert {key: counted.frequency(key) for key in plain} == plain


@pytest.mark.parametrize("count", [2_000_000, pytest.param(10_000_000, marks=pytest.mark.long)])
def test_millions_of_keys_pass_through_in_bounded_memory_without_ever_holding_up_the_leader(clock, count, request):
    counted = FrequencyFilter(clock, max_entries=100_000)
    batch = 1000
    salt = os.urandom(24)
    peak = None
    times = []
    gc.collect()
    gc.disable()  # a collection of all that other tests have imported takes longer
    request.addfinalizer(gc.enable)
    objects = len(gc.get_objects())
    for start in range(0, count, batch):
        keys = [salt + (start + i).to_bytes(8, "little") for i in range(batch)]
        began = time.thread_time()
        counted.admit(keys)
        times.append(time.thread_time() - began)
        if start == 1_000_000:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert len(counted) <= 100_000
    assert len(counted._ends) + len(counted._old) <= 200_000
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    assert grown < 32 << 10, f"{grown} KiB more after {count:,} keys than after a million"
    # A pass over the whole table would show with every 100,000 keys. One or two slow calls are the machine's.
    slow = sorted(times)[-3]
    assert slow < 0.05, f"{batch} keys took {slow * 1e3:.1f} ms three times"
    assert len(gc.get_objects()) - objects < 1000


@pytest.mark.parametrize("wrong", [{"threshold": 0}, {"decay_seconds": 0}, {"max_entries": 0}, {"threshold": 257}])
def test_what_cannot_work_is_refused(clock, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        FrequencyFilter(clock, **wrong)
