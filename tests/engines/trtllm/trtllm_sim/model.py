"""A fake model: one forward pass over integers whose every output depends on every byte of KV it reads.

Like a transformer, it keeps a state for each token, turns it into KV layer by layer, and mixes into it what it reads of
the KV of all tokens before. All arithmetic is on 64-bit integers, exact on every device and in every batch. A byte that
is off by one changes a sum by an odd multiple, hence the state, hence all that follows.

Every rank writes its bytes under a mask of its own, but computes with what is behind the mask: all ranks agree on the
tokens, and none can use the KV of another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

VOCABULARY = 50_021
_ODD = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


A, B, C, D = (_signed(value) for value in _ODD)


def mix(x: torch.Tensor) -> torch.Tensor:
    """A bijection of 64-bit integers that leaves no trace of their order."""
    x = (x ^ (x >> 30)) * B
    x = (x ^ (x >> 27)) * C
    return x ^ (x >> 31)


class Batch:
    """The tokens of one forward pass, of several requests, as tensors of fixed sizes."""

    def __init__(self, tokens: int, rows: int, blocks: int, device: str) -> None:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.tokens = zeros(tokens)  # to compute
        self.positions = zeros(tokens)
        self.rows = zeros(tokens)  # the request each belongs to
        self.previous = zeros(tokens)  # where the last step's output holds the token; -1: it is in ``tokens``
        self.tables = zeros(rows, blocks)  # of each request
        self.lengths = zeros(rows)  # context of each request at the end of this pass
        self.adapters = zeros(rows)  # LoRA, which changes all KV
        self.last = zeros(rows)  # the token of each request that yields its next one

    def fill(self, **values: Any) -> None:
        for name, value in values.items():
            target = getattr(self, name)
            fresh = torch.tensor(value, dtype=torch.int64).view(-1, *target.shape[1:])
            target[: len(fresh)].copy_(fresh, non_blocking=True)


class Model:
    def __init__(
        self, blocks: int, layers: int, block_size: int, width: int, rank: int, device: str, max_rows: int, lag: int = 0
    ) -> None:
        self._lag = lag if device.startswith("cuda") else 0
        self.layers, self.block_size, self.width = layers, block_size, width
        self.device = device
        # The last block belongs to nobody: tokens that only fill up a batch write there.
        self.pool = torch.zeros((blocks + 1, layers, 2, block_size * width), dtype=torch.uint8, device=device)
        self.scratch = blocks
        self.sampled = torch.zeros(max_rows, dtype=torch.int64, device=device)  # the last pass's tokens, by row
        self.values = torch.zeros(max_rows, dtype=torch.int64, device=device)  # what they were made of
        self._view = self.pool.view(blocks + 1, layers, 2, block_size, width)
        numbers = torch.arange(1, 2 * width + 1, dtype=torch.int64, device=device)
        self._weights = mix(numbers * A) | 1
        # A module, as the engine has one: its numbers name a cache on disk.
        self.loaded = torch.nn.ParameterList([torch.nn.Parameter(self._weights, requires_grad=False)])
        self._shifts = numbers
        self._mask = (mix(numbers * D + rank) & 255).to(torch.uint8).view(2, width)

    def forward(
        self,
        batch: Batch,
        before: Callable[[int], None] = lambda layer: None,
        after: Callable[[int], None] = lambda layer: None,
    ) -> None:
        """Writes KV, then ``values`` and ``sampled``. The callables stand for a layer's hooks."""
        if self._lag:
            torch.cuda._sleep(self._lag)
        from_last = batch.previous >= 0
        tokens = torch.where(from_last, self.sampled[batch.previous.clamp(min=0)], batch.tokens)
        where = batch.tables[batch.rows, batch.positions // self.block_size]
        slots = batch.positions % self.block_size
        span = batch.tables.shape[1] * self.block_size
        at = torch.arange(span, dtype=torch.int64, device=self.device)
        read = at[None, :] < batch.lengths[:, None]
        state = mix(tokens * A + batch.positions * D + batch.adapters[batch.rows] * C)
        for layer in range(self.layers):
            before(layer)
            fresh = (mix(state[:, None] * A + self._shifts * B + layer) & 255).to(torch.uint8)
            self._view[where, layer, :, slots] = fresh.view(-1, 2, self.width) ^ self._mask
            kv = (self._view[batch.tables, layer] ^ self._mask[:, None, :]).transpose(2, 3)
            kv = kv.reshape(len(batch.tables), span, 2 * self.width).to(torch.int64)
            seen = mix((kv * self._weights).sum(-1) + at * C)
            context = torch.where(read, seen, 0).cumsum(1)
            state = mix(state + context[batch.rows, batch.positions] * D + layer)
            after(layer)
        rows = len(batch.last)
        self.values[:rows] = state[batch.last]
        self.sampled[:rows] = token_of(self.values[:rows])


def token_of(value: torch.Tensor) -> torch.Tensor:
    return (mix(value) >> 8) % VOCABULARY


def agree(values: dict[int, list[int]]) -> list[int]:
    """The tokens of a step from what every rank has computed: where all agree, the token of each; else another."""
    first, *others = (torch.tensor(value, dtype=torch.int64) for value in values.values())
    total = first
    for factor, other in enumerate(others, 1):
        total = total + (other - first) * (2 * factor + 1)
    return token_of(total).tolist()  # type: ignore[no-any-return]
