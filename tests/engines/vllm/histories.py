"""Random histories of requests in a clockwork engine (clockwork.py)."""

from __future__ import annotations

import pytest
from engines import numbers

FAULTS = ("", "slow", "slow-store:every=3", "load:every=5", "store:every=3", "load:every=7,store:every=4,slow:every=3")


def live(engine, source, seed, resets=0.1):
    """Requests with shared prefixes come, go and are aborted, and caches are emptied. Every answer is right, every
    block kept is right, and at the end nothing is held."""
    families = [numbers(seed * 10 + i, 60) for i in range(3)]
    running: list[str] = []
    for i in range(source.randrange(10, 25)):
        family, length = source.choice(families), source.randrange(1, 60)
        prompt = family[:length] + numbers(seed * 1000 + i, source.choice((0, 1, 9)))
        engine.add(f"r{i}", prompt, source.choice((1, 5, 20)), cache_salt=source.choice((None, None, "salt")))
        running.append(f"r{i}")
        for _ in range(source.randrange(12)):
            engine.turn()
        chance = source.random()
        if chance < 0.15:
            engine.abort(running.pop(source.randrange(len(running))))
        elif chance < 0.15 + resets:
            engine.scheduler.reset_prefix_cache()
        elif chance < 0.2 + resets:
            engine.scheduler.reset_prefix_cache(reset_connector=True)
        elif chance < 0.25 + resets:
            assert engine.scheduler.reset_prefix_cache(
                reset_running_requests=True, reset_connector=source.random() < 0.5
            )
        if source.random() < 0.3:
            engine.check_pool()
    engine.run()
    engine.check()
    engine.check_idle()


def some_fast(histories, count):
    """The others run at length. These run with every release."""
    return [
        pytest.param(*history, marks=pytest.mark.long if i >= count else pytest.mark.matrix)
        for i, history in enumerate(histories)
    ]
