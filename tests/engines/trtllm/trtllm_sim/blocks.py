"""Who owns which block of the pool. Every rank keeps the same books.

Full blocks are found again by their content as long as nobody has taken them; requests are only admitted when the
blocks for their longest answer are there (GUARANTEED_NO_EVICT).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any


class Blocks:
    def __init__(self, count: int, size: int, partial_reuse: bool, copy: Callable[[int, int], None]) -> None:
        self.size = size
        self.count = count
        self.reused = 0
        self._partial = partial_reuse
        self._copy = copy
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(count))  # next to go first
        self._owners: Counter[int] = Counter()
        self._content: dict[int, tuple] = {}  # block -> name of what it holds
        self._by_content: dict[tuple, int] = {}
        self._tables: dict[int, list[int]] = {}

    # -- counting -----------------------------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        return len(self._free)

    def needed(self, request: Any) -> int:
        """Blocks the request may still take."""
        most = -(-(request.asked + request.max_new_tokens) // self.size)
        return most - len(self._tables.get(request.request_id, ()))

    # -- sequences ----------------------------------------------------------------------------------------------------

    def has(self, request: Any) -> bool:
        return request.request_id in self._tables

    def add_sequence(self, request: Any, ask: Callable[[Any, int], int]) -> None:
        """Room for a prompt: blocks whose content is still there, then free ones. ``ask`` is the connector."""
        names = self._names(request, request.get_tokens(0))
        table: list[int] = []
        # One token is always left to compute.
        for name in names[: (request.prompt_len - 1) // self.size]:
            block = self._by_content.get(name)
            if block is None:
                break
            self._take(block)
            table.append(block)
        reused = len(table) * self.size
        self.reused += reused
        fresh = [self._allocate() for _ in range(-(-request.prompt_len // self.size) - len(table))]
        reused += self._reuse_part(request, reused, fresh[0])
        matched = ask(request, reused)
        self._tables[request.request_id] = table + fresh
        request.prepopulated_prompt_len = reused + matched
        request.context_current_position = reused + matched
        request.context_chunk_size = request.prompt_len - reused - matched

    def _reuse_part(self, request: Any, reused: int, target: int) -> int:
        """Copy a block whose first tokens are right, at once: before the connector hears of anything."""
        if not self._partial:
            return 0
        tokens = request.get_tokens(0)
        parent = tuple(tokens[:reused])
        best, best_length = None, 0
        for name, block in self._by_content.items():
            scope, content = name
            if scope != request.scope or content[:reused] != parent or len(content) != reused + self.size:
                continue
            length = 0
            while reused + length < request.prompt_len - 1 and length < self.size:
                if content[reused + length] != tokens[reused + length]:
                    break
                length += 1
            if length > best_length:
                best, best_length = block, length
        if best is not None and best_length < self.size:
            self._copy(best, target)
            return best_length
        return 0

    def add_token(self, request: Any, length: int) -> None:
        """Room for the KV of ``length`` tokens."""
        table = self._tables[request.request_id]
        while len(table) * self.size < length:
            table.append(self._allocate())

    def get_cache_indices(self, request: Any) -> list[int]:
        return self._tables[request.request_id]

    def keep_for_reuse(self, request: Any, tokens: list[int]) -> None:
        """The KV of these tokens is in the request's blocks: they can be found from now on."""
        for name, block in zip(self._names(request, tokens), self._tables[request.request_id], strict=False):
            if name not in self._by_content and block not in self._content:
                self._by_content[name] = block
                self._content[block] = name

    def free_sequence(self, request: Any) -> None:
        # The last first: what is in front is worth more, and goes last.
        for block in reversed(self._tables.pop(request.request_id)):
            self._owners[block] -= 1
            if not self._owners[block]:
                self._free[block] = None
                if block not in self._content:
                    self._free.move_to_end(block, last=False)

    # -- one block ----------------------------------------------------------------------------------------------------

    def _take(self, block: int) -> None:
        self._owners[block] += 1
        self._free.pop(block, None)

    def _allocate(self) -> int:
        block, _ = self._free.popitem(last=False)
        name = self._content.pop(block, None)
        if name is not None:
            del self._by_content[name]
        self._owners[block] += 1
        return block

    def _names(self, request: Any, tokens: list[int]) -> list[tuple]:
        full = len(tokens) // self.size
        return [(request.scope, tuple(tokens[: (i + 1) * self.size])) for i in range(full)]
