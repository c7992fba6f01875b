"""What it takes vLLM to go through the blocks and tokens of a long prompt, its own way and the short one
(`kvbm.engines.vllm.shortcuts`).

    python benchmarks/shortcuts.py [--check] [--json FILE]

Both are given the same in turn: a pool that is full of older prompts' blocks, so that every block that is taken loses a
name; a new prompt's names; the prompt's tokens, which stay on the CPU. The time is CPU time of one call. Needs vLLM.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from hashing import BLOCK, LENGTHS, VOCABULARY, given, keep
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager

from kvbm.engines.vllm.shortcuts import blocks as short_blocks
from kvbm.engines.vllm.shortcuts import tokens as short_tokens

LEAST_SAVED = 0.4  # of the time of each

Ways = dict[str, Callable[..., Any]]


def main() -> int:
    options = given(__doc__)
    own: Ways = {
        "take": BlockPool.get_new_blocks,
        "name": BlockPool.cache_full_blocks,
        "count": KVCacheManager.estimate_cached_tokens,
        "send": async_tensor_h2d,
    }
    short: Ways = {
        "take": short_blocks.taking(own["take"], BlockPool),
        "name": short_blocks.caching(own["name"], BlockPool),
        "count": short_blocks.counting(own["count"]),
        "send": short_tokens.sending(own["send"]),
    }
    figures = []
    for length in LENGTHS:
        times: dict[tuple[str, str], list[float]] = {}
        prompts = [prompt_after_prompt(ways, length) for ways in (own, short)]
        for _ in range(options.rounds + 1):
            for way, prompt in zip(("own", "short"), prompts, strict=True):
                for what, seconds in next(prompt).items():
                    times.setdefault((what, way), []).append(1e3 * seconds)
        row = {"tokens": length, "blocks": length // BLOCK}
        row |= {f"{what}_{way}_ms": round(median(rounds[1:]), 3) for (what, way), rounds in times.items()}
        figures.append(row)
        print(f"{length:>8,} tokens, ms vLLM's own way -> the short one:", end=" ")
        print(", ".join(f"{what} {row[f'{what}_own_ms']:.2f} -> {row[f'{what}_short_ms']:.2f}" for what in own))
    keep(figures, options)
    missed = [
        f"{what} at {row['tokens']} tokens"
        for row in figures
        for what in own
        if row[f"{what}_short_ms"] > (1 - LEAST_SAVED) * row[f"{what}_own_ms"]
    ]
    if options.check and missed:
        print(f"too little saved: {', '.join(missed)}")
        return 1
    return 0


def prompt_after_prompt(ways: Ways, length: int) -> Iterator[dict[str, float]]:
    """Seconds of each call, for one prompt after the other. The first finds a pool without names."""
    source = random.Random(length)
    blocks = length // BLOCK
    pool = BlockPool(blocks + 1, True, BLOCK)
    while True:
        request = SimpleNamespace(request_id="", block_hashes=[source.randbytes(32) for _ in range(blocks)])
        tokens = [source.randrange(VOCABULARY) for _ in range(length)]
        times = [time.thread_time()]
        taken = ways["take"](pool, blocks)
        times.append(time.thread_time())
        ways["name"](pool, request, taken, 0, blocks, BLOCK, 0)
        times.append(time.thread_time())
        short_blocks._counted(ways["count"], taken)
        times.append(time.thread_time())
        ways["send"](tokens, device="cpu", dtype=torch.int32)
        times.append(time.thread_time())
        pool.free_blocks(reversed(taken))
        yield {what: end - start for what, (start, end) in zip(ways, pairwise(times), strict=True)}


if __name__ == "__main__":
    raise SystemExit(main())
