"""The offline optimum against an exhaustive search, and against what any policy reaches."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm.simulate.optimum import Optimum

# A tree of blocks: a block's name is the path to it, so equal blocks have equal blocks before them.
PATHS = st.lists(st.sampled_from("abc"), min_size=1, max_size=4)
TRACES = st.lists(PATHS, min_size=1, max_size=7)


def chain(path: list[str]) -> list[str]:
    return ["".join(path[: end + 1]) for end in range(len(path))]


def most_hits(chains: list[list[str]], slots: int) -> int:
    """Tries every set of blocks that a cache could keep after each request."""

    @cache
    def best(number: int, kept: frozenset[str]) -> int:
        if number == len(chains):
            return 0
        blocks = chains[number]
        found = next((at for at, block in enumerate(blocks) if block not in kept), len(blocks))
        there = sorted(kept.union(blocks))
        choices = combinations(there, min(slots, len(there)))
        return found + max(best(number + 1, frozenset(choice)) for choice in choices)

    return best(0, frozenset())


@settings(max_examples=150, deadline=None)
@given(TRACES, st.integers(1, 4))
def test_no_choice_of_blocks_finds_more(paths, slots):
    chains = [chain(path) for path in paths]
    assert sum(Optimum(chains).hits(slots)) == most_hits(chains, slots)


@settings(max_examples=50, deadline=None)
@given(st.lists(PATHS, min_size=1, max_size=40), st.integers(1, 20))
def test_more_slots_never_find_less_and_end_at_what_is_possible(paths, slots):
    chains = [chain(path) for path in paths]
    fewer, more, every = (sum(Optimum(chains).hits(count)) for count in (slots, slots + 1, 10_000))
    assert fewer <= more <= every == sum(Optimum(chains).possible())


def test_a_block_without_those_before_it_is_not_kept():
    a, b = ["a", "ab", "abc"], ["x", "xy"]
    # Both come back. Two slots are too few for both, and the ends of either alone find nothing.
    assert Optimum([a, b, b, a]).hits(2) == [0, 0, 2, 0]
    assert Optimum([a, b, b, a]).hits(3) == [0, 0, 2, 1]
    assert Optimum([a, b, b, a]).hits(5) == [0, 0, 2, 3]


def test_blocks_that_may_not_be_found_are_kept_for_others():
    optimum = Optimum([["a", "ab"], ["a", "ab"]], [2, 1])
    assert optimum.hits(2) == optimum.possible() == [0, 1]


@pytest.mark.parametrize("slots", [1, 10])
def test_an_empty_prompt_finds_nothing(slots):
    assert Optimum([[], ["a"], []]).hits(slots) == [0, 0, 0]
