"""What block events cost the engine: a tier in which blocks come and go, with vLLM's events of it and without.

    python benchmarks/events.py [--check] [--json FILE]

Each step stores blocks in a full tier, so that as many are evicted. What is counted is all that events add: describing
blocks, comparing, vLLM's event objects, and encoding them, which vLLM's publisher does in a thread of its own but of
the same process. Times are CPU time. Needs vLLM.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace

import msgspec

from kvbm.core.keys import KEY_BYTES
from kvbm.core.pool import Pool
from kvbm.tiers.registry import NEAR

BLOCKS_A_SECOND = 100_000
MAX_PERCENT = 10.0  # of a core, for that many blocks a second


class Bench:
    def __init__(self, blocks: int, block_size: int, step: int, steps: int) -> None:
        self.blocks, self.block_size, self.step, self.steps = blocks, block_size, step, steps
        self.random = random.Random(0)
        self.requests = [self.request() for _ in range(steps)]

    def request(self) -> SimpleNamespace:
        keys = [self.random.randbytes(KEY_BYTES) for _ in range(self.step)]
        tokens = self.random.choices(range(128_000), k=self.step * self.block_size)
        return SimpleNamespace(
            block_hashes=keys, all_token_ids=tokens, lora_request=None, cache_salt=None, mm_features=[],
            prompt_embeds=None,
        )  # fmt: skip

    def full(self) -> Pool:
        pool = Pool(self.blocks)
        for _ in range(0, self.blocks, self.step):
            keys = [self.random.randbytes(KEY_BYTES) for _ in range(min(self.step, pool.free))]
            pool.commit(pool.reserve(keys) or [])
        return pool

    def feed(self, pool: Pool) -> object:
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        from kvbm.engines.vllm.feed import EventFeed
        from kvbm.engines.vllm.groups import Groups

        spec = FullAttentionSpec.__new__(FullAttentionSpec)  # only its kind is asked for
        cache = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
        return EventFeed({NEAR.name: pool}, self.block_size, cache, Groups())

    def churn(self, pool: Pool, planned: Callable[[SimpleNamespace], None], ended: Callable[[], None]) -> float:
        """Seconds of CPU of all steps; called when blocks are on their way, and when they have been published."""
        start = time.thread_time()
        for request in self.requests:
            slots = pool.reserve(request.block_hashes)
            assert slots is not None
            planned(request)
            pool.commit(slots)
            ended()
        return time.thread_time() - start

    def run(self) -> dict[str, float]:
        from vllm.distributed.kv_events import KVEventBatch

        encode = msgspec.msgpack.Encoder().encode
        pool = self.full()
        feed = self.feed(pool)
        for request in [self.request() for _ in range(self.blocks // self.step + 1)]:  # all described, all told
            pool.commit(pool.reserve(request.block_hashes) or [])
            feed.follow(request, request.block_hashes, 0, self.step)
            feed.take(None)
        stored = removed = size = 0
        encoding = 0.0

        def follow(request: SimpleNamespace) -> None:
            feed.follow(request, request.block_hashes, 0, self.step)

        def tell() -> None:
            nonlocal stored, removed, size, encoding
            while feed.ledger.owed:
                events = feed.take(None)
                start = time.thread_time()
                size += len(encode(KVEventBatch(ts=0.0, events=events)))
                encoding += time.thread_time() - start
                for event in events:
                    if hasattr(event, "token_ids"):
                        stored += len(event.block_hashes)
                    else:
                        removed += len(event.block_hashes)

        gc.collect()
        with_events = self.churn(pool, follow, tell)
        expected = self.step * self.steps
        assert (stored, removed) == (expected, expected), (stored, removed, expected)
        quiet = self.full()
        gc.collect()
        without = self.churn(quiet, lambda request: None, lambda: None)
        events = stored + removed
        return {
            "microseconds_a_block": (with_events - without) / events * 1e6,
            "of_that_encoding": encoding / events * 1e6,
            "percent_of_a_core": (with_events - without) / events * BLOCKS_A_SECOND * 100,
            "bytes_a_block": size / events,
            "step_milliseconds": (with_events - without - encoding) / self.steps * 1e3,
        }


def machine() -> dict[str, object]:
    """What the figures depend on. ``load``: processes that wanted a core, over the last minute and five and fifteen."""
    import vllm

    return {
        "python": platform.python_version(), "vllm": vllm.__version__, "cores": os.cpu_count(),
        "load": os.getloadavg(),
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=200_000, help="blocks in the tier")
    parser.add_argument("--block-size", type=int, default=16, help="tokens of a block")
    parser.add_argument("--step", type=int, default=512, help="blocks that a step stores")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    parser.add_argument("--check", action="store_true", help=f"exit with 1 above {MAX_PERCENT:g} %% of a core")
    options = parser.parse_args(arguments)
    rounds = [
        Bench(options.blocks, options.block_size, options.step, options.steps).run() for _ in range(options.rounds)
    ]
    figures = {name: median(each[name] for each in rounds) for name in rounds[0]}
    print(
        f"{options.blocks:,} blocks of {options.block_size} tokens in the tier; every step stores {options.step} and "
        f"evicts as many; median of {options.rounds} rounds\n"
        f"  {figures['microseconds_a_block']:.2f} µs of CPU an event of a block, stored or removed "
        f"({figures['of_that_encoding']:.2f} of it to encode {figures['bytes_a_block']:.0f} bytes)\n"
        f"  {figures['step_milliseconds']:.2f} ms in the scheduler's thread a step\n"
        f"  {BLOCKS_A_SECOND:,} blocks a second cost {figures['percent_of_a_core']:.1f} % of a core "
        f"(at most {MAX_PERCENT:g})"
    )
    if options.json:
        with open(options.json, "w") as file:
            sizes = {name: value for name, value in vars(options).items() if name not in ("json", "check")}
            json.dump({"settings": sizes, "machine": machine(), "figures": figures, "rounds": rounds}, file, indent=2)
            file.write("\n")
    return 1 if options.check and figures["percent_of_a_core"] > MAX_PERCENT else 0


if __name__ == "__main__":
    sys.exit(main())
