"""Many replays of one trace side by side, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from kvbm.config import Config, load
from kvbm.core.cost import Terms
from kvbm.core.rate import Rate
from kvbm.plans import TierName
from kvbm.simulate import hints, synthetic, trace
from kvbm.simulate.engine import Machine, SimulatedEngine
from kvbm.simulate.optimum import optimal_hits, possible_hits
from kvbm.simulate.results import Outcome, outcome
from kvbm.simulate.trace import Trace
from kvbm.tiers import registry

# Of Llama 3.1 8B in 16 bits: 32 layers with 8 heads of 128 numbers each, for keys and values.
BYTES_PER_TOKEN = 131_072
HIDDEN_SIZE = 4096
PREFILL_TOKENS_PER_SECOND = 10_000.0
STEP_TOKENS = 8192

DEFAULT_SIZES = 10


class Source(NamedTuple):
    """How a process gets the trace. ``synthetic``: the name of a generated workload, in place of files."""

    paths: tuple[Path, ...] = ()
    synthetic: str = ""
    block_tokens: int = 0
    whole_blocks: bool = False
    limit: int | None = None
    hints: str = "given"  # a name of :data:`kvbm.simulate.hints.KINDS`

    def open(self) -> Trace:
        if self.synthetic:
            found = synthetic.generate(self.synthetic)
        else:
            found = trace.read(self.paths, self.block_tokens, self.whole_blocks, self.limit)
        return hints.KINDS[self.hints](found)


class Case(NamedTuple):
    """One replay. ``settings``: KVBM's, by variable or key."""

    variant: str
    settings: Mapping[str, str]
    slots: dict[TierName, int]


def settings_of(found: Trace, given: Mapping[str, str], tiers: Iterable[TierName]) -> Config:
    """Those that were recorded with a trace, or else those of this shell; and ``given`` above them. ``tiers`` are on,
    and no others."""
    sizes = {tier.size_setting: str(int(name in tiers)) for name, tier in registry.TIERS.items() if not tier.keyed}
    if found.settings:
        return load({**found.settings, **given, **sizes}, environ={}, files=())
    return load({**given, **sizes})


def machine_of(
    found: Trace,
    bytes_per_token: int = 0,
    prefill_tokens_per_second: float = 0.0,
    device_blocks: int = 0,
    rates: Mapping[TierName, Rate] | None = None,
) -> Machine:
    """Sizes and speeds: those given, those of the record, or those of a model of eight billion weights."""
    block_bytes = found.block_bytes or BYTES_PER_TOKEN * found.block_tokens
    if bytes_per_token:
        block_bytes = bytes_per_token * found.block_tokens
    return Machine(
        block_bytes=block_bytes,
        prefill_tokens_per_second=prefill_tokens_per_second or PREFILL_TOKENS_PER_SECOND,
        rates=rates or {},
        terms=found.terms or Terms(STEP_TOKENS, 1, 4 * HIDDEN_SIZE),
        device_blocks=device_blocks,
    )


def replay(
    found: Trace,
    case: Case,
    machine: Machine,
    progress: Callable[[int], None] | None = None,
    exact: bool = False,
) -> Outcome:
    began = time.perf_counter()
    config = settings_of(found, case.settings, case.slots)
    engine = SimulatedEngine(found, config, case.slots, machine)
    totals = engine.run(progress, exact)
    return outcome(case.variant, dict(case.slots), machine.block_bytes, totals, time.perf_counter() - began)


def optimum(found: Trace, slots: int) -> float:
    """Prefix hit rate of the offline optimum with so many slots in all; 0: with any number."""
    chains = [request.keys for request in found.requests]
    countable = [max(0, (request.tokens - 1) // found.block_tokens) for request in found.requests]
    hits = optimal_hits(chains, slots, countable) if slots else possible_hits(chains, countable)
    return sum(hits) / found.blocks


def default_sizes(found: Trace, count: int = DEFAULT_SIZES) -> list[int]:
    """Slots: all blocks of the trace, a half of them, a quarter, and so on; the smallest first."""
    unique = len({key for request in found.requests for key in request.keys})
    return sorted({max(1, unique >> shift) for shift in range(count)})


# -- processes --------------------------------------------------------------------------------------------------------

# Of this process: the trace, the machine, and a number in shared memory: how many requests have been replayed by all
# processes together.
_here: tuple[Trace, Machine, Any] | None = None


def _begin(source: Source, machine: Machine, replayed: Any) -> None:
    global _here
    _here = source.open(), machine, replayed


def _add(replayed: Any, requests: int) -> None:
    with replayed.get_lock():
        replayed.value += requests


def _replay(case: Case) -> Outcome:
    assert _here is not None
    found, machine, replayed = _here
    done = 0

    def progress(requests: int) -> None:
        nonlocal done
        _add(replayed, requests - done)
        done = requests

    result = replay(found, case, machine, progress)
    progress(len(found.requests))
    return result


def _optimum(slots: int) -> float:
    assert _here is not None
    found, machine, replayed = _here
    result = optimum(found, slots + (found.engine_blocks or machine.device_blocks))
    _add(replayed, len(found.requests))
    return result


class Sweep:
    """Processes that have read the trace. Use as a context."""

    def __init__(self, source: Source, machine: Machine, jobs: int = 0) -> None:
        context = multiprocessing.get_context("spawn")  # forking a process with threads may hang
        self._replayed: Any = context.Value("q", 0)
        self._pool = ProcessPoolExecutor(
            jobs or len(os.sched_getaffinity(0)), context, _begin, (source, machine, self._replayed)
        )

    def __enter__(self) -> Sweep:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def run(
        self, cases: Sequence[Case], optima: Sequence[int], watch: Callable[[int], None] | None = None
    ) -> tuple[list[Outcome], list[float]]:
        """All outcomes, and the optimum for each of these numbers of slots beside the engine's own. ``watch``: is told
        several times a second how many requests have been replayed by then."""
        # The largest first: they take longest, and no process should be left with one at the end.
        order = sorted(range(len(cases)), key=lambda i: -sum(cases[i].slots.values()))
        replays = {i: self._pool.submit(_replay, cases[i]) for i in order}
        bounds = [self._pool.submit(_optimum, slots) for slots in optima]
        for _ in _until_done([*replays.values(), *bounds]):
            if watch is not None:
                watch(self._replayed.value)
        return [replays[i].result() for i in range(len(cases))], [bound.result() for bound in bounds]


def _until_done(futures: Sequence[Future[Any]]) -> Iterator[None]:
    left = set(futures)
    while left:
        done, left = wait(left, timeout=0.2, return_when=FIRST_COMPLETED)
        for future in done:
            future.result()  # raises what the process has raised
        yield
