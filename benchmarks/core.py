"""What the bookkeeping costs: hashing, finding, publishing and evicting blocks, with one million of them in a tier.

    python benchmarks/core.py [--check] [--json FILE]

Times are CPU time of the one thread that does all of it: bookkeeping never waits, and what else runs on the machine
shall not count. The garbage collector runs as it does in an engine. Each prompt that is looked up is another one, so
that its blocks are not in the processor's caches from the round before. Limits are compared with the median.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import pickle
import platform
import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from statistics import median
from typing import NamedTuple

from kvbm.core.keys import KEY_BYTES, KeyChain, Namespace
from kvbm.core.manager import BlockManager
from kvbm.core.policy import POLICIES, Turn, make_policy
from kvbm.core.pool import Pool
from kvbm.tiers import disk, host

HOST, DISK = host.TIER.name, disk.TIER.name
BATCH = 256  # blocks one step of an engine completes: 4,096 tokens
POLICY_PROMPTS = (768, 96, 24)  # blocks; 768 are 12,288 tokens, the mean of the Mooncake conversation trace

# What must hold on any machine an engine runs on. A key is the name of a row below.
LIMITS = {
    "lookup": 6.0,  # ms: a prompt of 131,072 tokens costs an engine's step no more than this, hashing included
    "publish": 3.0,  # µs a block
    "evict": 3.0,  # µs a block
    **dict.fromkeys((f"policy-{prompt}-session" for prompt in POLICY_PROMPTS), 1.5),  # times what it costs with LRU
    "linearity": 2.0,  # cost a block of a prompt eight times as long: caches count for something, squares for 8
}


class Row(NamedTuple):
    name: str
    what: str
    unit: str
    best: float
    median: float

    @property
    def limit(self) -> float | None:
        return LIMITS.get(self.name)

    @property
    def missed(self) -> bool:
        return self.limit is not None and self.median > self.limit


def timed(name: str, what: str, unit: str, rounds: list[float], per: int = 1) -> Row:
    """A row from seconds a round, each of which did ``per`` of what is counted."""
    scale = {"ms": 1e3, "µs": 1e6}[unit.split()[0]] / per
    return Row(name, what, unit, min(rounds) * scale, median(rounds) * scale)


def clock(work: Callable[[], object]) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start


def machine() -> dict[str, object]:
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as lines:
            model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass  # not Linux, or a processor that does not say
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": platform.system(),
    }


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def strange_keys(count: int, seed: int) -> Iterator[list[bytes]]:
    """Keys of blocks that nobody looks up, a batch at a time."""
    data = random.Random(seed)
    for at in range(0, count, BATCH):
        yield [data.randbytes(KEY_BYTES) for _ in range(min(BATCH, count - at))]


def fill(pool: Pool, count: int, seed: int) -> None:
    for keys in strange_keys(count, seed):
        slots = pool.reserve(keys)
        assert slots is not None
        pool.commit(slots)


def vllm_style(tokens: list[int], block_size: int) -> list[bytes]:
    """A digest over the pickled parent and tokens of each block, as vLLM hashes prefixes."""
    digests: list[bytes] = []
    parent = b""
    for at in range(0, len(tokens) - block_size + 1, block_size):
        block = (parent, tuple(tokens[at : at + block_size]), None)
        parent = hashlib.sha256(pickle.dumps(block, protocol=pickle.HIGHEST_PROTOCOL)).digest()
        digests.append(parent)
    return digests


class Requests:
    """Conversations of one engine with a tier of its own. Time passes: a second with each request."""

    def __init__(self, policy: str, slots: int, prompt: int) -> None:
        self.now = 0.0
        self.pool = Pool(slots, make_policy(policy, slots, lambda: self.now))
        self.manager = BlockManager({HOST: self.pool})
        self.random = random.Random(0)
        self.prompt = prompt
        self.engine = range(slots)
        self.talks: list[list[bytes]] = []
        while not self.pool.evictions:
            self.serve(self.draw())
        self.run(2 * slots // prompt)

    def draw(self) -> list[bytes]:
        if self.talks and self.random.random() < 0.5:
            keys = self.talks.pop(self.random.randrange(len(self.talks)))
            keys = keys + self.new(self.prompt // 8)
        else:
            keys = self.new(self.prompt)
        if len(keys) < 2 * self.prompt:
            self.talks.append(keys)
            del self.talks[: -self.pool.size // self.prompt]
        return keys

    def new(self, blocks: int) -> list[bytes]:
        return [self.random.randbytes(KEY_BYTES) for _ in range(blocks)]

    def serve(self, keys: list[bytes]) -> None:
        self.now += 1.0
        match = self.manager.lookup(keys, 0, len(keys) - 1)
        found = match.blocks
        if found:
            plan = self.manager.load(match, "request", self.engine[:found], in_step=True, after=[])
            self.manager.finish_load(plan.id)
        stored = self.manager.store(keys[found:], self.engine[found : len(keys)])
        if stored is not None:
            self.manager.finish_store(stored.id, ok=True)
        self.manager.touch(keys, Turn(found, 100))

    def run(self, requests: int) -> float:
        """Seconds a block."""
        drawn = [self.draw() for _ in range(requests)]
        return sum(clock(lambda k=keys: self.serve(k)) for keys in drawn) / sum(map(len, drawn))


class Bench:
    def __init__(self, blocks: int, tokens: int, block_size: int, rounds: int) -> None:
        self.blocks, self.tokens, self.rounds = blocks, tokens, rounds
        self.prompt_blocks = tokens // block_size
        self.namespace = Namespace("model", "bfloat16", "layout", block_size)
        self.random = random.Random(0)

    def prompt(self, tokens: int | None = None) -> list[int]:
        return self.random.choices(range(128_000), k=tokens or self.tokens)

    def keys(self, prompt: list[int]) -> list[bytes]:
        return KeyChain(self.namespace).extend(prompt)

    # -- memory -------------------------------------------------------------------------------------------------------

    def memory(self) -> list[Row]:
        """Filled twice: seen from the system first, then from Python's allocator, which would count in the former."""
        gc.collect()
        before, tracked = resident(), len(gc.get_objects())
        without = [clock(gc.collect) for _ in range(5)]
        pool = Pool(self.blocks)
        fill(pool, self.blocks, seed=1)
        gc.collect()
        rss = (resident() - before) / self.blocks
        tracked = len(gc.get_objects()) - tracked
        beside = [clock(gc.collect) for _ in range(5)]
        del pool
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        pool = Pool(self.blocks)
        fill(pool, self.blocks, seed=1)
        allocated = (tracemalloc.get_traced_memory()[0] - before) / self.blocks
        tracemalloc.stop()
        return [
            Row("rss", "memory a block, resident set of the process", "bytes", rss, rss),
            Row("allocated", "memory a block, tracemalloc, key included", "bytes", allocated, allocated),
            Row("tracked", "objects that the garbage collector tracks for the tier", "objects", tracked, tracked),
            timed("gc", "full garbage collection with the tier", "ms", beside),
            timed("gc-without", "  the same without it", "ms", without),
        ]

    # -- a prompt arrives ---------------------------------------------------------------------------------------------

    def lookups(self) -> list[Row]:
        prompts = [self.prompt() for _ in range(self.rounds)]
        pool = Pool(max(self.blocks, self.rounds * self.prompt_blocks))
        strangers = (pool.size - self.rounds * self.prompt_blocks) // self.rounds
        for seed, prompt in enumerate(prompts):
            pool.commit(pool.reserve(self.keys(prompt)) or [])
            fill(pool, strangers, seed)
        manager = BlockManager({HOST: pool})

        def whole(prompt: list[int]) -> None:
            assert manager.lookup(self.keys(prompt)).blocks == self.prompt_blocks

        rounds = [clock(lambda p=prompt: whole(p)) for prompt in prompts]
        hashing = [clock(lambda p=prompt: self.keys(p)) for prompt in prompts]
        known = [self.keys(prompt) for prompt in prompts]
        matching = [clock(lambda k=keys: pool.match(k)) for keys in known]
        other = [clock(lambda p=prompt: vllm_style(p, self.namespace.block_size)) for prompt in prompts]

        host, disk = Pool(self.prompt_blocks), Pool(self.prompt_blocks)
        host.commit(host.reserve(known[0][::2]) or [])
        disk.commit(disk.reserve(known[0][1::2]) or [])
        mixed = BlockManager({HOST: host, DISK: disk})
        alternating = [clock(lambda: mixed.lookup(known[0])) for _ in prompts]

        said = f"{self.tokens:,} tokens"
        return [
            timed("lookup", f"look up a prompt of {said}, hashing included", "ms", rounds),
            timed("hash", "  hash it", "ms", hashing),
            timed("match", "  find its blocks", "ms", matching),
            timed("alternating", "  find them in two tiers, block by block", "ms", alternating),
            timed("vllm-hash", "  for comparison: hash it block by block, pickled", "ms", other),
        ]

    # -- blocks come and go -------------------------------------------------------------------------------------------

    def turnover(self) -> list[Row]:
        pool = Pool(self.blocks)
        batches = min(self.rounds * 16, max(1, self.blocks // BATCH // 2))

        def step(keys: list[bytes]) -> None:
            pool.commit(pool.reserve(keys) or [])

        size = min(BATCH, self.blocks)
        publish = [clock(lambda k=keys: step(k)) for keys in strange_keys(batches * size, seed=2)]
        fill(pool, pool.free, seed=3)
        full = list(strange_keys(batches * size, seed=4))
        taking = [clock(lambda k=keys: step(k)) for keys in full]
        assert pool.evictions == sum(map(len, full))
        return [
            timed("publish", "allocate and publish a block in a free slot", "µs", publish, size),
            timed("evict", "the same in a full tier, evicting one for it", "µs", taking, size),
            timed("clear", "forget every block", "ms", [clock(pool.clear)]),
        ]

    def plans(self) -> list[Row]:
        """A whole prompt through the manager, into and out of a full tier."""
        pool = Pool(max(self.blocks, 2 * self.prompt_blocks))
        fill(pool, pool.size, seed=5)
        manager = BlockManager({HOST: pool})
        engine = list(range(self.prompt_blocks))
        stores, loads = [], []

        def store(keys: list[bytes]) -> None:
            plan = manager.store(keys, engine)
            assert plan is not None
            manager.finish_store(plan.id, ok=True)

        def load(keys: list[bytes]) -> None:
            plan = manager.load(manager.lookup(keys), "request", engine, in_step=True, after=[])
            manager.finish_load(plan.id)

        for _ in range(self.rounds):
            keys = self.keys(self.prompt())
            stores.append(clock(lambda k=keys: store(k)))
            loads.append(clock(lambda k=keys: load(k)))
        return [
            timed("store", "store and finish_store, a block, evicting", "µs", stores, self.prompt_blocks),
            timed("load", "lookup, load and finish_load, a block", "µs", loads, self.prompt_blocks),
        ]

    # -- policies -----------------------------------------------------------------------------------------------------

    def policies(self) -> list[Row]:
        """Requests through the manager and a full tier: lookup, load, store, end. Half of them go on with an earlier
        conversation. Rounds of all policies alternate, so that a busy machine is busy for all of them."""
        rows = []
        for prompt in POLICY_PROMPTS:
            clients = {name: Requests(name, max(self.blocks // 10, 16 * prompt), prompt) for name in POLICIES}
            rounds: dict[str, list[float]] = {name: [] for name in clients}
            for _ in range(self.rounds):
                for name, client in clients.items():
                    rounds[name].append(client.run(max(8, POLICY_PROMPTS[0] * 8 // prompt)))
            each = {
                name: timed(f"request-{prompt}-{name}", f"requests of {prompt} blocks, a block: {name}", "µs", seconds)
                for name, seconds in rounds.items()
            }
            lru = each["lru"]
            rows += [
                *each.values(),
                *(
                    Row(f"policy-{prompt}-{name}", f"  {name} over lru", "times", row.best / lru.best,
                        row.median / lru.median)
                    for name, row in each.items() if name != "lru"
                ),
            ]  # fmt: skip
        return rows

    # -- longer prompts -----------------------------------------------------------------------------------------------

    def linearity(self) -> list[Row]:
        """Cost a block of looking up and of storing prompts of four lengths; the last row compares the extremes."""
        rows = []
        worst: list[tuple[float, float]] = []
        sizes = [self.prompt_blocks * factor // 4 for factor in (1, 2, 4, 8)]
        pool = Pool(max(self.blocks, self.rounds * sizes[-1]))
        fill(pool, pool.size, seed=6)
        manager = BlockManager({HOST: pool})
        cost: dict[str, list[Row]] = {"look up": [], "store": []}
        for blocks in sizes:
            prompts = [self.prompt(blocks * self.namespace.block_size) for _ in range(self.rounds)]
            known = [self.keys(prompt) for prompt in prompts]
            storing = [clock(lambda k=keys, n=blocks: self._store(manager, k, n)) for keys in known]
            finding = [clock(lambda p=prompt: manager.lookup(self.keys(p))) for prompt in prompts]
            for what, rounds in (("look up", finding), ("store", storing)):
                name = f"{what.replace(' ', '')}-{blocks}"
                cost[what].append(timed(name, f"{what} {blocks:,} blocks, a block", "µs", rounds, blocks))
        for each in cost.values():
            rows += each
            worst.append((each[-1].best / each[0].best, each[-1].median / each[0].median))
        best, middle = max(worst, key=lambda pair: pair[1])
        rows.append(Row("linearity", f"{sizes[-1]:,} blocks over {sizes[0]:,}, cost a block", "times", best, middle))
        return rows

    @staticmethod
    def _store(manager: BlockManager, keys: list[bytes], blocks: int) -> None:
        plan = manager.store(keys, range(blocks))
        assert plan is not None
        manager.finish_store(plan.id, ok=True)

    def run(self) -> list[Row]:
        # Memory first: the resident set only tells something while nothing has been freed yet.
        return [*self.memory(), *self.lookups(), *self.turnover(), *self.plans(), *self.policies(), *self.linearity()]


def table(rows: list[Row]) -> str:
    lines = [f"{'':<58}{'best':>10}{'median':>10}  {'':<8}{'limit':>6}"]
    for row in rows:
        limit = "" if row.limit is None else f"{row.limit:>6g}  {'MISSED' if row.missed else 'ok'}"
        lines.append(f"{row.what:<58}{row.best:>10.2f}{row.median:>10.2f}  {row.unit:<8}{limit}".rstrip())
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="blocks in the tier")
    parser.add_argument("--tokens", type=int, default=131_072, help="tokens of a prompt")
    parser.add_argument("--block-size", type=int, default=16, help="tokens of a block")
    parser.add_argument("--rounds", type=int, default=15, help="how often each thing is measured")
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a limit is missed")
    options = parser.parse_args(arguments)

    about = machine()
    print(f"{about['cpu']}, {about['cores']} cores, {about['python']}, {about['system']}")
    print(f"{options.blocks:,} blocks, gc thresholds {gc.get_threshold()}, median of {options.rounds} rounds\n")
    rows = Bench(options.blocks, options.tokens, options.block_size, options.rounds).run()
    print(table(rows))
    if options.json:
        figures = [{**row._asdict(), "limit": row.limit, "missed": row.missed} for row in rows]
        with open(options.json, "w") as file:
            json.dump({"machine": about, "settings": vars(options), "rows": figures}, file, indent=2)
    missed = [row for row in rows if row.missed]
    for row in missed:
        print(
            f"\nlimit missed: {row.what.strip()}: {row.median:.2f} {row.unit}, at most {row.limit:g}", file=sys.stderr
        )
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
