"""A filter finds every key of its owner, and copies follow by what has changed."""

from __future__ import annotations

import hashlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm.core.key_filter import FilterCopy, KeyFilter, Probe, Update
from kvbm.core.keys import in_group


def keys(count: int, seed: str = "") -> list[bytes]:
    return [hashlib.sha256(f"{seed}{i}".encode()).digest() for i in range(count)]


def found(copy: FilterCopy, names: list[bytes]) -> list[bool]:
    return [copy.leading(Probe([name])) == 1 for name in names]


def follow(copy: FilterCopy, owner: KeyFilter) -> int:
    """Bring a copy up to date, as bytes would; returns their number."""
    update = owner.since(copy.epoch, copy.number)
    if update is None:
        return 0
    data = msgspec.msgpack.encode(update)
    copy.apply(msgspec.msgpack.decode(data, type=Update))
    return len(data)


def test_every_key_is_found_and_few_others():
    owner, copy = KeyFilter(20_000, epoch=1), FilterCopy()
    there = keys(20_000)
    owner.add(there)
    follow(copy, owner)
    assert owner.left_out == 0
    assert copy.leading(Probe(there)) == len(there)
    false = sum(found(copy, keys(20_000, "other")))
    assert false <= 10  # 2.4 expected


def test_a_removed_key_is_not_found_and_the_others_are():
    owner, copy = KeyFilter(1000, epoch=1), FilterCopy()
    there = keys(1000)
    owner.add(there)
    owner.remove(there[::2])
    owner.remove(keys(50, "never added"))
    follow(copy, owner)
    assert all(found(copy, there[1::2]))
    assert sum(found(copy, there[::2])) <= 2
    assert len(owner) == 500


def test_blocks_of_several_groups_of_layers_are_told_apart():
    owner, copy = KeyFilter(64, epoch=1), FilterCopy()
    owner.add(in_group(keys(8), 0))
    follow(copy, owner)
    assert all(found(copy, in_group(keys(8), 0)))
    assert not any(found(copy, in_group(keys(8), 1)))


def test_an_update_grows_with_the_changes_and_not_with_the_size():
    small, large = KeyFilter(2_000, epoch=1), KeyFilter(200_000, epoch=1)
    sent = []
    for owner in (small, large):
        copy = FilterCopy()
        owner.add(keys(1_000))
        follow(copy, owner)
        owner.add(keys(100, "more"))
        owner.remove(keys(100))
        sent.append(follow(copy, owner))
        assert all(found(copy, keys(100, "more")))
    assert sent[0] == pytest.approx(sent[1], rel=0.2)
    assert max(sent) < 200 * 8 + 200


def test_a_copy_that_is_too_far_behind_gets_the_table():
    owner, copy = KeyFilter(100, epoch=1), FilterCopy()
    owner.add(keys(10))
    follow(copy, owner)
    for turn in range(200):
        owner.add(keys(10, f"{turn}"))
        owner.remove(keys(10, f"{turn}"))
    update = owner.since(copy.epoch, copy.number)
    assert update is not None
    assert not update.cells
    follow(copy, owner)
    assert all(found(copy, keys(10)))


def test_a_cleared_filter_and_a_new_owner_are_noticed():
    owner, copy = KeyFilter(100, epoch=1), FilterCopy()
    owner.add(keys(10))
    follow(copy, owner)
    owner.clear()
    assert follow(copy, owner)
    assert not any(found(copy, keys(10)))
    successor = KeyFilter(100, epoch=2)
    successor.add(keys(5))
    follow(copy, successor)
    assert found(copy, keys(10)) == [True] * 5 + [False] * 5
    assert follow(copy, successor) == 0


def test_a_full_filter_leaves_keys_out_and_goes_on():
    owner = KeyFilter(16, epoch=1)
    owner.add(keys(500))
    assert owner.left_out > 400
    owner.remove(keys(500))
    assert len(owner) <= 20


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "clear", "follow"]), st.integers(0, 39)), max_size=120))
def test_a_copy_never_misses_a_key_whatever_happened_before(history):
    names = keys(40)
    owner, copy, there = KeyFilter(40, epoch=3), FilterCopy(), set()
    for what, which in history:
        if what == "add" and which not in there:
            owner.add([names[which]])
            there.add(which)
        elif what == "remove":
            owner.remove([names[which]])
            there.discard(which)
        elif what == "clear":
            owner.clear()
            there.clear()
        elif what == "follow":
            follow(copy, owner)
    follow(copy, owner)
    assert all(found(copy, [names[which] for which in sorted(there)]))
    assert len(owner) == len(there)


HOSTILE = [
    Update(1, 1, 0, b"", b""),
    Update(1, 1, 1 << 40, b"", b""),
    Update(1, 1, 2, b"", b"\0" * 15),
    Update(9, 5, 2, b"\0" * 4, b"\0" * 2),
    Update(1, 5, 2, b"\0" * 3, b"\0" * 2),
    Update(1, 5, 2, b"\xff" * 4, b"\0" * 2),
    Update(1, 5, 2, b"\0" * 4, b"\0" * 8),
    Update(1, -1, 2, b"", b"\0" * 16),
]


@pytest.mark.parametrize("update", HOSTILE, ids=range(len(HOSTILE)))
def test_a_malformed_update_changes_nothing(update):
    owner, copy = KeyFilter(5, epoch=1), FilterCopy()
    owner.add(keys(4))
    follow(copy, owner)
    with pytest.raises(ValueError, match=r"update|table|bytes"):
        copy.apply(update)
    assert all(found(copy, keys(4)))


def test_an_owner_may_hand_over_its_keys_as_they_are():
    owner, copy = KeyFilter(100, epoch=1), FilterCopy()
    owner.sync(keys(50))
    follow(copy, owner)
    owner.sync(keys(50)[10:] + keys(5, "more"))
    assert follow(copy, owner) < 15 * 8 + 40
    assert all(found(copy, keys(50)[10:] + keys(5, "more")))
    assert not any(found(copy, keys(10)))
