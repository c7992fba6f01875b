"""Generated workloads, each with one habit of real ones. The same seed gives the same requests.

Lengths are in blocks of 512 tokens, times in seconds.

agents   agents of a few kinds, each with a long system prompt, call tools every few seconds, grow by a block or two a
         turn, start helpers that share their history, and never come back once they are done
batch    jobs of hundreds of requests with one template and a tail of their own, back to back
chat     users with think times, of whom most leave after a few turns
mixed    chat beside a batch job and a scan
rag      questions over a corpus: popular documents come first in many prompts, then rarer ones
scan     chat beside a reader of long documents that never returns to one
quiet    the first of two tenants alone: a small chat
tenants  both: the chat, and a flood of long prompts that never return
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator

from kvbm.simulate.trace import MOONCAKE_BLOCK_TOKENS, Request, Trace, key_of

BLOCK = MOONCAKE_BLOCK_TOKENS
SECONDS = 1500.0
Draw = tuple[float, list[int], int]  # time, blocks of the prompt, tokens of the answer


class _Blocks:
    """Numbers for blocks that no other prompt has."""

    def __init__(self) -> None:
        self._next = 0

    def new(self, count: int) -> list[int]:
        self._next += count
        return list(range(self._next - count, self._next))


def agents(source: random.Random, blocks: _Blocks, seconds: float = SECONDS) -> Iterator[Draw]:
    kinds = [blocks.new(source.randrange(6, 16)) for _ in range(5)]
    at = 0.0
    while at < seconds:
        at += source.expovariate(0.05)
        yield from _agent(source, blocks, at, [*source.choice(kinds), *blocks.new(source.randrange(1, 6))], 2)


def _agent(source: random.Random, blocks: _Blocks, at: float, history: list[int], depth: int) -> Iterator[Draw]:
    for _ in range(min(60, 2 + int(source.expovariate(1 / 12)))):
        yield at, list(history), source.randrange(50, 400)
        history = history + blocks.new(source.randrange(1, 4))
        if depth and source.random() < 0.08:
            yield from _agent(source, blocks, at + 1, history + blocks.new(1), depth - 1)
        at += 2 + source.expovariate(1 / 8)


def chat(source: random.Random, blocks: _Blocks, seconds: float = SECONDS, rate: float = 1.5) -> Iterator[Draw]:
    system = blocks.new(1)
    at = 0.0
    while at < seconds:
        at += source.expovariate(rate)
        history, now = system + blocks.new(1 + int(source.expovariate(1 / 12))), at
        turn = 0
        while True:
            yield now, list(history), source.randrange(50, 800)
            turn += 1
            if source.random() > min(0.9, 0.3 + 0.08 * turn):
                break
            history = history + blocks.new(1 + int(source.expovariate(1 / 3)))
            now += source.lognormvariate(4.8, 0.9)


def rag(source: random.Random, blocks: _Blocks, seconds: float = SECONDS) -> Iterator[Draw]:
    system = blocks.new(2)
    documents, size = 4000, [source.randrange(2, 8) for _ in range(4000)]
    weights = [1 / (rank + 1) for rank in range(documents)]
    known: dict[tuple[int, ...], list[int]] = {}
    at = 0.0
    while at < seconds:
        at += source.expovariate(2.0)
        chosen = sorted(set(source.choices(range(documents), weights, k=4)))
        prompt = list(system)
        for end in range(1, len(chosen) + 1):
            path = tuple(chosen[:end])  # a document's blocks depend on all that comes before it
            if path not in known:
                known[path] = blocks.new(size[path[-1]])
            prompt += known[path]
        yield at, prompt + blocks.new(1), source.randrange(50, 300)


def batch(source: random.Random, blocks: _Blocks, seconds: float = SECONDS, rate: float = 3.0) -> Iterator[Draw]:
    at = 0.0
    while at < seconds:
        template = blocks.new(source.randrange(4, 20))
        for _ in range(source.randrange(100, 800)):
            yield at, template + blocks.new(source.randrange(1, 10)), source.randrange(20, 200)
            at += source.expovariate(rate)


def _reader(source: random.Random, blocks: _Blocks, seconds: float = SECONDS) -> Iterator[Draw]:
    at = 0.0
    while at < seconds:
        at += source.expovariate(0.5)
        yield at, blocks.new(source.randrange(50, 150)), 200


def scan(source: random.Random, blocks: _Blocks) -> Iterator[Draw]:
    yield from chat(source, blocks)
    yield from _reader(source, blocks)


def mixed(source: random.Random, blocks: _Blocks) -> Iterator[Draw]:
    yield from chat(source, blocks, rate=1.0)
    yield from batch(source, blocks, rate=1.0)
    yield from _reader(source, blocks, seconds=SECONDS / 3)


WORKLOADS: dict[str, Callable[[random.Random, _Blocks], Iterable[Draw]]] = {
    "agents": agents,
    "batch": batch,
    "chat": chat,
    "mixed": mixed,
    "rag": rag,
    "scan": scan,
}
NAMES = sorted([*WORKLOADS, "quiet", "tenants"])


def generate(name: str, seed: int = 0) -> Trace:
    source, blocks = random.Random(f"{name} {seed}"), _Blocks()
    if name in ("quiet", "tenants"):
        source = random.Random(f"quiet {seed}")
        requests = [_request(draw, "quiet") for draw in chat(source, blocks, rate=0.4)]
        if name == "tenants":
            requests += [_request(draw, "loud") for draw in _reader(source, blocks)]
    elif name in WORKLOADS:
        requests = list(map(_request, WORKLOADS[name](source, blocks)))
    else:
        raise ValueError(f"no workload {name!r}: expected one of {', '.join(NAMES)}")
    return Trace(f"{name} (generated)", sorted(requests, key=lambda request: request.at), BLOCK)


def _request(draw: Draw, tenant: str = "") -> Request:
    at, prompt, answer = draw
    keys = [key_of(tenant, number) for number in prompt]
    return Request(at, len(prompt) * BLOCK + 100, answer, keys, tenant)
