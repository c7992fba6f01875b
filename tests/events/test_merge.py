"""Several streams of block events made into one."""

from __future__ import annotations

import random

import pytest

from kvbm.events.merge import Merge

SIZE = 2


def stored(names, tokens, parent=None, medium="GPU", **more):
    return {
        "type": "BlockStored", "block_hashes": names, "parent_block_hash": parent, "token_ids": tokens,
        "block_size": SIZE, "medium": medium, **more,
    }  # fmt: skip


def removed(names, medium="GPU"):
    return {"type": "BlockRemoved", "block_hashes": names, "medium": medium}


CLEARED = {"type": "AllBlocksCleared"}


def test_a_block_is_published_once_however_many_places_have_it():
    merge = Merge("dedup")
    found = merge.apply("engine", [stored([1, 2], [10, 11, 12, 13])])
    assert [(e["type"], e["block_hashes"], e["parent_block_hash"], e["token_ids"], e["medium"]) for e in found] == [
        ("BlockStored", [1], None, [10, 11], "GPU"),
        ("BlockStored", [2], 1, [12, 13], "GPU"),
    ]
    assert merge.apply("kvbm", [stored([1, 2], [10, 11, 12, 13], medium="CPU")]) == []
    assert merge.apply("kvbm", [stored([2], [12, 13], 1, medium="STORAGE")]) == []
    assert merge.apply("engine", [removed([2, 1])]) == []
    assert merge.apply("kvbm", [removed([1, 2], "CPU")]) == [removed([1])]
    assert merge.apply("kvbm", [removed([2], "STORAGE")]) == [removed([2])]


def test_two_names_of_one_block_are_one_block():
    """The name that was heard first is the one that goes out, for its children and for its end as well."""
    merge = Merge("dedup")
    merge.apply("engine", [stored([1], [10, 11])])
    found = merge.apply("kvbm", [stored([101, 102], [10, 11, 12, 13], medium="CPU")])
    assert [(e["block_hashes"], e["parent_block_hash"]) for e in found] == [([102], 1)]
    assert merge.apply("engine", [removed([1])]) == []
    assert merge.apply("kvbm", [removed([101], "CPU")]) == [removed([1])]


def test_a_place_that_has_two_names_for_a_block_must_lose_both():
    """An engine may tell blocks apart by something that its events do not say."""
    merge = Merge("dedup")
    merge.apply("engine", [stored([1], [10, 11]), stored([2], [10, 11])])
    assert merge.apply("engine", [removed([1])]) == []
    assert merge.apply("engine", [removed([2])]) == [removed([1])]
    merge.apply("engine", [stored([1], [10, 11]), stored([2], [10, 11]), removed([1])])
    assert merge.clear("engine") == [CLEARED]


def test_the_same_tokens_behind_another_prefix_are_another_block():
    merge = Merge("dedup")
    merge.apply("engine", [stored([1, 2], [10, 11, 12, 13])])
    assert len(merge.apply("engine", [stored([3], [12, 13])])) == 1
    assert len(merge.apply("engine", [stored([4], [12, 13], parent=99)])) == 1  # of a parent that nobody told of


@pytest.mark.parametrize("scope", [{"lora_name": "a"}, {"cache_salt": "a"}, {"extra_keys": [["a"]]}])
def test_tenants_are_told_apart(scope):
    merge = Merge("dedup")
    merge.apply("engine", [stored([1], [10, 11])])
    (event,) = merge.apply("engine", [stored([2], [10, 11], **scope)])
    assert event["block_hashes"] == [2]
    assert {key: event[key] for key in scope} == scope
    assert merge.apply("engine", [removed([1])]) == [removed([1])]


def test_an_engine_that_holds_a_block_twice_must_lose_it_twice():
    merge = Merge("dedup")
    assert len(merge.apply("engine", [stored([1], [10, 11]), stored([1], [10, 11])])) == 1
    assert merge.apply("engine", [removed([1])]) == []
    assert merge.apply("engine", [removed([1])]) == [removed([1])]
    assert merge.apply("engine", [removed([1])]) == []


@pytest.mark.parametrize(("given", "number"), [(-1, 2**64 - 1), (b"\1" * 24 + b"\0" * 7 + b"\5", 5), (7, 7)])
def test_names_go_out_as_numbers_of_64_bits(given, number):
    for mode in ("dedup", "passthrough"):
        (event,) = Merge(mode).apply("engine", [stored([given], [10, 11], parent=given)])
        assert event["block_hashes"] == [number]
        assert event["parent_block_hash"] == number


def test_passthrough_forwards_everything_with_its_tier():
    merge = Merge("passthrough")
    events = [stored([1, 2], [1, 2, 3, 4], medium=medium) for medium in ("GPU", "CPU", "STORAGE")]
    found = merge.apply("engine", [*events, removed([1], "CPU"), {"type": "BlockRemoved", "block_hashes": [2]}])
    assert [event["medium"] for event in found] == ["GPU", "CPU_TIER1", "CPU_TIER2", "CPU_TIER1", "GPU"]
    assert [event["block_hashes"] for event in found] == [[1, 2], [1, 2], [1, 2], [1], [2]]


@pytest.mark.parametrize("mode", ["dedup", "passthrough"])
def test_a_stream_that_starts_over_takes_only_its_own_blocks_along(mode):
    merge = Merge(mode)
    merge.apply("engine", [stored([1, 2], [1, 2, 3, 4])])
    merge.apply("kvbm", [stored([1], [1, 2], medium="CPU")])
    gone = merge.apply("engine", [CLEARED])
    expected = [removed([2])] if mode == "dedup" else [removed([1, 2])]
    assert gone == expected
    assert merge.apply("kvbm", [CLEARED]) == [CLEARED]


@pytest.mark.parametrize("mode", ["dedup", "passthrough"])
def test_what_cannot_be_understood_is_left_out_and_nothing_else(mode, caplog):
    merge = Merge(mode)
    odd = [{}, {"type": "BlockStored"}, stored(["x"], [1, 2]), stored([1], 5), {"type": "news"}, {"type": None}]
    assert all("type" in event for event in merge.apply("engine", odd if mode == "dedup" else odd[:3]))
    assert len(merge.apply("engine", [stored([1], [1, 2])])) == 1
    assert "skipped an invalid event" in caplog.text


def test_random_streams_agree_with_what_the_places_hold():
    """300 histories: nothing stored twice, nothing removed that is unknown, and at the end exactly what is there."""
    for seed in range(300):
        rng = random.Random(seed)
        merge = Merge("dedup")
        chains = [[rng.randrange(2) for _ in range(6)] for _ in range(3)]
        rename = {"engine": 0, "kvbm": rng.choice([0, 1000])}
        places = {(stream, medium): {} for stream, medium in (("engine", "GPU"), ("kvbm", "CPU"), ("kvbm", "STORAGE"))}
        view = set()

        def hear(events, view=view):
            for event in events:
                if event["type"] == "AllBlocksCleared":
                    view.clear()
                elif event["type"] == "BlockStored":
                    assert event["block_hashes"][0] not in view
                    view.update(event["block_hashes"])
                else:
                    assert event["block_hashes"][0] in view
                    view.difference_update(event["block_hashes"])

        def name(chain, i, stream, rename=rename):
            return hash(tuple(chain[: (i + 1) * SIZE])) % 2**32 + rename[stream]

        for _ in range(60):
            (stream, medium), held = rng.choice(list(places.items()))
            action = rng.random()
            if action < 0.55:
                chain, first = rng.choice(chains), 0
                end = rng.randint(1, 3)
                names = [name(chain, i, stream) for i in range(first, end)]
                hear(merge.apply(stream, [stored(names, chain[: end * SIZE], None, medium)]))
                for i, each in enumerate(names):
                    content = tuple(chain[: (i + 1) * SIZE])
                    held[each] = (content, held.get(each, (0, 0))[1] + 1)
            elif action < 0.97 and held:
                each = rng.choice(sorted(held))
                hear(merge.apply(stream, [removed([each], medium)]))
                content, times = held.pop(each)
                if times > 1:
                    held[each] = (content, times - 1)
            elif action >= 0.97:
                hear(merge.apply(stream, [CLEARED]))
                for place, others in places.items():
                    if place[0] == stream:
                        others.clear()
            there = {content for held in places.values() for content, _ in held.values()}
            assert len(view) == len(there), f"history {seed}"
        assert len(merge._blocks) == len(there)
