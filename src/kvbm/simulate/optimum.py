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

Chain = Sequence[Hashable]


class Optimum:
    """``chains``: the keys of the blocks that each request computes or finds, in the order of time. ``countable``:
    blocks of each request, from the front, that it may find; by default all of them."""

    def __init__(self, chains: Sequence[Chain], countable: Sequence[int] | None = None) -> None:
        numbers: dict[Hashable, int] = {}
        self._chains = [[numbers.setdefault(key, len(numbers)) for key in chain] for chain in chains]
        self._countable = list(map(len, chains)) if countable is None else countable
        # Of each block of each request: the request that uses it next; 0 where none does.
        self._next_uses: list[list[int]] = []
        soonest = [0] * len(numbers)
        for request in range(len(chains) - 1, -1, -1):
            chain = self._chains[request]
            self._next_uses.append([soonest[block] for block in chain])
            for block in chain:
                soonest[block] = request
        self._next_uses.reverse()
        self._blocks = len(numbers)

    def hits(self, slots: int) -> list[int]:
        """Blocks that each request finds with so many slots."""
        kept = [0] * self._blocks  # the request that uses a kept block next; 0: it is not kept
        used = 0  # slots
        # A heap of (-next use, -depth, block). Where a block has been used since, its entry is outdated.
        farthest: list[tuple[int, int, int]] = []
        hits = []
        for chain, uses, limit in zip(self._chains, self._next_uses, self._countable, strict=True):
            found = 0
            for block in chain[:limit]:
                if not kept[block]:
                    break
                found += 1
            hits.append(found)
            for depth, (block, use) in enumerate(zip(chain, uses, strict=True)):
                before, kept[block] = kept[block], use
                if use:
                    used += not before
                    if before != use:
                        heappush(farthest, (-use, -depth, block))
                elif before:
                    used -= 1
            while used > slots:
                use, _, block = heappop(farthest)
                if kept[block] == -use:
                    kept[block] = 0
                    used -= 1
        return hits

    def possible(self) -> list[int]:
        """Blocks that each request finds if nothing is ever evicted."""
        return self.hits(self._blocks)
