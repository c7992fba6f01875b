"""What if the session policy multiplied the value of a block by what its recomputation costs at its depth?

    python benchmarks/policy_depth.py TRACE [--slots N ...]

A token at position ``p`` costs ``1 + p / span`` times what the first one does: attention looks back at all before it.
Prints, with and without that factor, the prefix hits of all blocks and the part of the prefill's cost that they save.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from kvbm.core.policy import POLICIES, SessionAware
from kvbm.core.policy.group import Group
from kvbm.core.policy.waiting import Waiting
from kvbm.simulate.engine import SimulatedEngine
from kvbm.simulate.sweep import HIDDEN_SIZE, Source, machine_of, settings_of
from kvbm.tiers import host

SPAN_TOKENS = 4 * HIDDEN_SIZE
SLOTS = [3_000, 10_000, 30_000]


class Weighted(Waiting):
    weights: dict[int, float]  # by the number of a group

    def _values(self, part: slice, ages: np.ndarray) -> np.ndarray:
        weights = [self.weights.get(group.id, 1.0) for group in self._members[part]]
        return super()._values(part, ages) * np.array(weights)


class ByDepth(SessionAware):
    span_blocks: float

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._candidates.__class__ = Weighted
        self._weights: dict[int, float] = {}
        self._candidates.weights = self._weights  # type: ignore[attr-defined]

    def _make(self, keys: Any, slots: np.ndarray, start: int, stop: int, *given: Any) -> Group:
        group = super()._make(keys, slots, start, stop, *given)
        self._weights[group.id] = 1 + (start + stop) / 2 / self.span_blocks
        return group

    def _split(self, group: Group, slots: np.ndarray) -> Group:
        front = super()._split(group, slots)
        self._weights[front.id] = self._weights.get(group.id, 1.0)
        return front


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("trace", type=Path, help="a file in Mooncake's format")
    parser.add_argument("--slots", type=int, nargs="+", default=SLOTS, help="of the host tier")
    options = parser.parse_args()
    trace = Source((options.trace,), whole_blocks=True).open()
    machine = machine_of(trace)
    span = ByDepth.span_blocks = SPAN_TOKENS / trace.block_tokens

    def cost(blocks: np.ndarray) -> float:
        return float((blocks + blocks**2 / 2 / span).sum())

    wanted = np.array([len(request.keys) for request in trace.requests], float)
    for word, policy in (("as it is", SessionAware), ("times the cost at its depth", ByDepth)):
        POLICIES["session"] = policy
        for slots in options.slots:
            sizes = {host.TIER.name: slots}
            config = settings_of(trace, {host.TIER.policy_setting: "session"}, sizes)
            engine = SimulatedEngine(trace, config, sizes, machine)
            engine.run()
            found = np.array([sum(each.values()) for each in engine.found], float)
            hits, saved = found.sum() / wanted.sum(), cost(found) / cost(wanted)
            print(f"{word:<30}{slots:>8,} slots: hits {hits:.4f}, prefill saved {saved:.4f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
