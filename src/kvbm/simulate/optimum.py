"""The offline optimum: the most prefix blocks that any policy could find with so many slots.

Belady's rule evicts the block whose next use is farthest away, and does not keep a new block whose next use is farther
away than those of all kept ones. It knows the future, so no engine can follow it; it is the bound beside which a policy
is plotted.

A block is worth nothing without the blocks before it. The rule takes care of that by itself: every request that uses a
block uses the blocks before it, so these are never needed later than it is. Where both are needed next by the same
request, the later block of the prefix goes first. So the kept blocks always are whole prefixes, each of them counts,
and the rule is optimal for prefixes because it is for single blocks. ``tests/simulate/test_optimum.py``
compares it with an exhaustive search.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from heapq import heappop, heappush
from itertools import accumulate

Chain = Sequence[Hashable]


def optimal_hits(chains: Sequence[Chain], slots: int, countable: Sequence[int] | None = None) -> list[int]:
    """Blocks that each request finds. ``chains``: the keys of the blocks that each request computes or finds, in the
    order of time. ``countable``: blocks of each request, from the front, that it may find; by default all of them."""
    never = len(chains)
    starts = list(accumulate(map(len, chains), initial=0))
    next_use = [never] * starts[-1]  # of each block of each request: the request that uses it next
    seen: dict[Hashable, int] = {}
    for number in range(never - 1, -1, -1):
        for at, key in enumerate(chains[number], starts[number]):
            next_use[at] = seen.get(key, never)
        seen.update(dict.fromkeys(chains[number], number))
    kept: dict[Hashable, int] = {}  # block -> the request that uses it next
    farthest: list[tuple[int, int, Hashable]] = []  # a heap of (-next use, -depth, block); some entries are outdated
    hits = []
    for number, chain in enumerate(chains):
        found = 0
        limit = len(chain) if countable is None else countable[number]
        while found < limit and chain[found] in kept:
            found += 1
        hits.append(found)
        for depth, (key, use) in enumerate(zip(chain, next_use[starts[number] : starts[number + 1]], strict=True)):
            if use == never:
                kept.pop(key, None)
            elif kept.get(key) != use:
                kept[key] = use
                heappush(farthest, (-use, -depth, key))
        while len(kept) > slots:
            use, _, key = heappop(farthest)
            if kept.get(key) == -use:
                del kept[key]
    return hits


def possible_hits(chains: Sequence[Chain], countable: Sequence[int] | None = None) -> list[int]:
    """Blocks that each request finds if nothing is ever evicted."""
    seen: set[Hashable] = set()
    hits = []
    for number, chain in enumerate(chains):
        limit = len(chain) if countable is None else countable[number]
        found = 0
        while found < limit and chain[found] in seen:
            found += 1
        hits.append(found)
        seen.update(chain)
    return hits
