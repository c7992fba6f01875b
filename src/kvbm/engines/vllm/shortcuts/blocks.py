"""Taking, naming and counting the blocks of a long prompt.

When a prompt of 32k tokens returns, vLLM's thread goes through its 2,000 blocks several times, a few calls a block: to
take them from those that are free, to name them, to count those it had. Requests that decode wait meanwhile. Here the
same is done to the same fields in one loop without calls, for many blocks at a time. A decode step, which has few, pays
a comparison.

The contents of a block pool are vLLM's to define. So this is for pools that do nothing else when a block changes hands
(no events, no metrics, no watchers), and only after both ways have been seen to leave pools in the same state; else
vLLM's own functions do it. A loop that meets a block that is not plain leaves it to them.
"""

from __future__ import annotations

import functools
import logging
from operator import attrgetter
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
import vllm.v1.core.kv_cache_utils as kv_cache_utils
import vllm.v1.kv_cache_interface as kv_cache_interface

from kvbm.engines.vllm import compat
from kvbm.engines.vllm.shortcuts import Function, is_vllms

logger = logging.getLogger(__name__)

_MANY = 64  # blocks: with fewer there is little to save

# Of the pools and their histories that both ways are put through.
_BLOCKS, _SIZE, _STEPS = 32, 16, 40


def install() -> bool:
    """From now on the block pools of this process go through many blocks the short way; False if they do not."""
    if not compat.is_tested():
        return False
    try:
        # Only the scheduler's process needs these, and only releases we have read.
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.core.kv_cache_manager import KVCacheManager

        take, cache = BlockPool.get_new_blocks, BlockPool.cache_full_blocks
        count = KVCacheManager.estimate_cached_tokens
        places = (take, BlockPool), (cache, BlockPool), (count, KVCacheManager)
        if not all(is_vllms(own, place.__module__) for own, place in places):
            return False
        short = taking(take, BlockPool, 1), caching(cache, BlockPool, 1), counting(count)
        if any(_history(BlockPool, seed, *short) != _history(BlockPool, seed, take, cache, count) for seed in range(4)):
            logger.warning("The fast path for a prompt's blocks failed its self-test; using vLLM's own")
            return False
        BlockPool.get_new_blocks = taking(take, BlockPool)
        BlockPool.cache_full_blocks = caching(cache, BlockPool)
        KVCacheManager.estimate_cached_tokens = counting(count)
        return True
    except Exception as error:
        logger.info(
            "The fast path for a prompt's blocks is off (%s: %s); using vLLM's own", type(error).__name__, error
        )
        return False


def taking(own: Function, kind: type, least: int = _MANY) -> Function:
    """``BlockPool.get_new_blocks``: the first of the free blocks, which lose the names that they had."""

    @functools.wraps(own)
    def get_new_blocks(self: Any, num_blocks: int) -> list[Any]:
        if (
            num_blocks < least
            or num_blocks > self.get_num_free_blocks()
            or not self.enable_caching
            or self.enable_kv_cache_events
            or self.metrics_collector
            or self.cached_block_hashes_by_block  # blocks of several names
            or getattr(self, "_reuse_watchers", None)  # from 0.30 on
            or type(self) is not kind
        ):
            return own(self, num_blocks)
        named = self.cached_block_hash_to_block._cache
        taken = self.free_block_queue.popleft_n(num_blocks)
        for block in taken:
            name = block._block_hash
            if name is not None:
                if named.get(name) is block:
                    del named[name]
                    block._block_hash = block._block_hash_num_tokens = None
                else:  # one of several of that name
                    self._maybe_evict_cached_block(block)
            assert block.ref_cnt == 0
            block.ref_cnt += 1
        return taken

    return get_new_blocks


def caching(own: Function, kind: type, least: int = _MANY) -> Function:
    """``BlockPool.cache_full_blocks``: names blocks with new hashes, and calls ``own`` from the first known one."""

    @functools.wraps(own)
    def cache_full_blocks(
        self: Any,
        request: Any,
        blocks: Any,
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: Any = None,
        **more: Any,
    ) -> None:
        done = num_cached_blocks
        if (
            num_full_blocks - done >= least
            and done >= 0
            and block_mask is None
            and not more
            and block_size == self.hash_block_size
            and not self.enable_kv_cache_events
            and type(self) is kind
        ):
            named = self.cached_block_hash_to_block._cache
            group = kv_cache_utils.make_block_hash_with_group_id(b"", kv_cache_group_id)
            tokens = done * block_size
            names = request.block_hashes[done:num_full_blocks]
            for block, of_tokens in zip(blocks[done:num_full_blocks], names, strict=False):
                name = of_tokens + group
                if block._block_hash is not None or block.is_null or name in named:
                    break
                tokens += block_size
                block._block_hash = name
                block._block_hash_num_tokens = tokens
                named[name] = block
                done += 1
        own(self, request, blocks, done, num_full_blocks, block_size, kv_cache_group_id, block_mask, **more)

    return cache_full_blocks


def counting(own: Function) -> Function:
    """``KVCacheManager.estimate_cached_tokens``: how far the names of a request's blocks reach."""

    @functools.wraps(own)
    def estimate_cached_tokens(self: Any, request: Any) -> int:
        groups = self.kv_cache_config.kv_cache_groups
        spec = groups[0].kv_cache_spec if len(groups) == 1 else None
        if not isinstance(spec, kv_cache_interface.FullAttentionSpec) or not getattr(spec, "prefix_cacheable", True):
            return own(self, request)
        (blocks,) = self.get_blocks(request.request_id).blocks
        return max(filter(None, map(attrgetter("_block_hash_num_tokens"), blocks)), default=0)

    return estimate_cached_tokens


def _history(kind: type, seed: int, take: Function, cache: Function, count: Function) -> list[Any]:
    """What becomes of a small pool while prompts that share their beginnings come and go."""
    source = Random(seed)
    pool: Any = kind(_BLOCKS, True, _SIZE)
    running: list[list[Any]] = []
    told: list[Any] = []
    for step in range(_STEPS):
        if running and source.random() < 0.4:
            pool.free_blocks(reversed(running.pop(source.randrange(len(running)))))
        elif running and source.random() < 0.2:  # a load into one of its blocks has failed
            pool.evict_blocks({block.block_id for block in source.choice(running)[-3:]})
        else:
            names = [b"shared %d" % i for i in range(source.randrange(9))]
            names += [b"own %d %d" % (step, i) for i in range(source.randrange(9))]
            hits = [pool.get_cached_block(name, [0]) for name in names]
            known = hits.index(None) if None in hits and source.random() < 0.8 else 0  # or it came at the same time
            blocks = [block for hit in hits[:known] for block in hit]
            pool.touch(blocks)
            try:
                blocks += take(pool, len(names) - known)
            except ValueError as error:
                told.append(str(error))
            else:
                cache(pool, SimpleNamespace(block_hashes=names), blocks, known, len(names), _SIZE, 0)
            running.append(blocks)
            told.append(_counted(count, blocks))
        told.append(_state(pool))
    return told


def _state(pool: Any) -> Any:
    """All that a pool knows, without its blocks themselves: no two pools have the same."""
    named = pool.cached_block_hash_to_block._cache.items()
    return (
        [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
        [(name, sorted(found) if isinstance(found, dict) else found.block_id) for name, found in named],
        [(block.ref_cnt, block.block_hash, block.block_hash_num_tokens) for block in pool.blocks],
        sorted(pool.cached_block_hashes_by_block.items()),
    )


def _counted(count: Function, blocks: list[Any]) -> int:
    spec = kv_cache_interface.FullAttentionSpec(block_size=_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float16)
    groups = [SimpleNamespace(kv_cache_spec=spec)]
    manager = SimpleNamespace(
        kv_cache_config=SimpleNamespace(kv_cache_groups=groups), get_blocks=lambda _: SimpleNamespace(blocks=(blocks,))
    )
    return count(manager, SimpleNamespace(request_id=""))
