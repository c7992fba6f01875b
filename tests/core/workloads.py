"""Streams of requests of kinds that deployments see, and their replay through a pool and its policy.

A request is the time of its arrival, the keys of its prefix and what is known when it ends. Sessions that are over are
marked, for tests of hints.
"""

import heapq
import random
from typing import NamedTuple

from kvbm.core.policy import Turn, make_policy
from kvbm.core.pool import Pool


class Request(NamedTuple):
    time: float
    keys: list[bytes]
    output: int = 100
    is_last: bool = False  # of its session
    session: int = 0


def _sessions(seed, seconds, rate, session):
    """Sessions that begin at random; each is a generator of (pause, keys, output, is_last)."""
    rng = random.Random(seed)
    queue, number, at = [], 0, 0.0
    while at < seconds:
        at += rng.expovariate(rate)
        number += 1
        heapq.heappush(queue, (at, number, session(rng, number)))
    while queue:
        time, number, turns = heapq.heappop(queue)
        for pause, keys, output, is_last in turns:
            yield Request(time, keys, output, is_last, number)
            if not is_last:
                heapq.heappush(queue, (time + pause, number, turns))
            break


def _key(*parts):
    return repr(parts).encode()


def chat(seed=1, seconds=2000, rate=1.0):
    """Conversations with a common system prompt and think times of minutes."""

    def session(rng, number):
        blocks = rng.randint(2, 30)
        while True:
            keys = [_key("system", i) for i in range(3)] + [_key(number, i) for i in range(blocks)]
            is_last = rng.random() < 0.55
            yield rng.lognormvariate(4.6, 0.8), keys, rng.randint(20, 800), is_last
            blocks += rng.randint(1, 4)

    return list(_sessions(seed, seconds, rate, session))


def agents(seed=2, seconds=1500, rate=0.3):
    """Loops of many quick tool calls over a long common prompt, which grow and end."""

    def session(rng, number):
        blocks, calls = rng.randint(5, 15), rng.randint(3, 25)
        for call in range(calls):
            keys = [_key("tools", i) for i in range(20)] + [_key(number, i) for i in range(blocks)]
            yield rng.expovariate(1 / 6), keys, rng.randint(5, 60), call == calls - 1
            blocks += rng.randint(1, 5)

    return list(_sessions(seed, seconds, rate, session))


def rag(seed=3, requests=6000, documents=600):
    """Questions about documents, some of which are popular; the question itself never returns."""
    rng = random.Random(seed)
    at = 0.0
    for number in range(requests):
        at += rng.expovariate(2.0)
        document = min(int(rng.paretovariate(0.9)), documents)
        keys = [_key("head", 0)] + [_key("doc", document, i) for i in range(5 + document % 17)]
        yield Request(at, [*keys, *(_key("question", number, i) for i in range(2))], 150, True, number)


def batch(seed=4, requests=4000):
    """A job that asks several templates of many rows, each row once and in order."""
    rng = random.Random(seed)
    for number in range(requests):
        template = rng.randrange(6)
        keys = [_key("template", template, i) for i in range(8)] + [_key("row", number, i) for i in range(6)]
        yield Request(number * 0.2, keys, 40, True, number)


def scan(seed=5, requests=4000, rows=150):
    """The same prompts again and again in the same order, more than fit, among short conversations."""
    talk = iter(chat(seed, requests * 0.25, 0.3))
    at = next(talk)
    for number in range(requests):
        while at is not None and at.time <= number * 0.25:
            yield at
            at = next(talk, None)
        yield Request(number * 0.25, [_key("scan", number % rows, i) for i in range(12)], 10, False, -1 - number % rows)


def noise(seed=6, requests=4000):
    """Nothing ever returns but for the popular."""
    rng = random.Random(seed)
    for number in range(requests):
        keys = [_key("once", number if rng.random() < 0.7 else rng.randrange(200), i) for i in range(10)]
        yield Request(number * 0.3, keys, 10, True, number)


def shift(seed=7):
    """Quick agents, then slow conversations: what was learned of the first is wrong for the second."""
    first = agents(seed, 700)
    end = first[-1].time
    return first + [request._replace(time=end + request.time) for request in chat(seed, 2000)]


WORKLOADS = {"chat": chat, "agents": agents, "rag": rag, "batch": batch, "scan": scan, "noise": noise, "shift": shift}


def replay(requests, size, name, turn_of=None, make=make_policy):
    """The share of blocks that were found, as production drives a pool: load, store, end of turn."""
    now = [0.0]
    pool = Pool(size, make(name, size, lambda: now[0]))
    hits = total = 0
    for request in requests:
        now[0] = request.time
        found = serve(pool, request, turn_of)
        hits += found
        total += len(request.keys)
    return hits / total


def serve(pool, request, turn_of=None, tenant=None):
    keys = request.keys
    slots = pool.match(keys)
    pool.pin(slots)
    pool.unpin(slots)
    pool.touch(keys)
    room = pool.available - sum(map(pool.is_evictable, keys))
    fresh = [key for key in keys if not pool.holds(key)][: max(room, 0)]
    written = pool.reserve(fresh, None if tenant is None else [tenant] * len(fresh))
    pool.commit(written or [])
    turn = Turn(len(slots), request.output)
    pool.end_turn(keys, turn if turn_of is None else turn_of(request, turn))
    return len(slots)
