"""Runs a workload against endpoints, one after the other, with a progress bar."""

from __future__ import annotations

import re
import sys
import threading
import time
from typing import NamedTuple

from kvbm.bench.client import Answer, Endpoint, EndpointError, Sample
from kvbm.bench.results import Run, short_hits, summarise
from kvbm.bench.workload import Ask, MultiRound, Workload, warm_up
from kvbm.observe.format import printable
from kvbm.observe.terminal import progress

TICK = 0.02  # seconds between two polls of the workload
PATIENCE = 120.0  # seconds to wait for the last answers
COUNTERS_EVERY = 2.0  # seconds between two looks at the server's counters during a run

# Counters of a server that show whether the cache was used: Prometheus name -> name in the result.
SERVER_COUNTERS = {
    "vllm:prompt_tokens": "prompt_tokens",
    "vllm:generation_tokens": "generation_tokens",
    "vllm:prefix_cache_hits": "engine_cache_hit_tokens",
    "vllm:external_prefix_cache_hits": "external_cache_hit_tokens",
    "vllm:num_preemptions": "preemptions",
    "kvbm_matched_tokens": "kvbm_matched_tokens",
    "kvbm_offload_blocks_d2h": "kvbm_offload_blocks_d2h",
    "kvbm_onboard_blocks_h2d": "kvbm_onboard_blocks_h2d",
    "kvbm_onboard_blocks_d2d": "kvbm_onboard_blocks_d2d",
    "kvbm_ttft_saved_seconds": "kvbm_ttft_saved_seconds",
}


class Target(NamedTuple):
    name: str
    endpoint: Endpoint


class Interrupted(Exception):  # noqa: N818
    """The user pressed Ctrl-C; ``run`` has the results until then."""

    def __init__(self, run: Run) -> None:
        super().__init__("stopped")
        self.run = run


def run(target: Target, workload: Workload, qps: float, patience: float = PATIENCE) -> Run:
    """Run a workload against one endpoint. Faults of the endpoint are part of the result."""
    before = server_counters(target.endpoint)
    label = f"{target.name:>12} {f'{qps:g} requests/s' if qps else 'trace':16}"
    answers: list[Answer] = []
    running: set[threading.Thread] = set()
    counted: dict[str, float] = {}  # by the server, so far
    sent = 0
    stopped = False
    over = threading.Event()
    epoch = time.monotonic()

    def count() -> dict[str, float]:
        after = server_counters(target.endpoint)
        return {name: after[name] - before.get(name, 0.0) for name in after}

    def watch() -> None:  # in a thread, as a busy server may take seconds to answer
        while not over.wait(COUNTERS_EVERY):
            counted.update(count())

    def ask(what: Ask) -> None:
        answer = target.endpoint.ask(what.prompt, what.max_tokens, what.user, what.round, epoch)
        what.done(answer)
        answers.append(answer)

    def describe() -> str:
        ttfts = [answer.ttft for answer in answers if answer.ttft is not None]
        mean = f"{sum(ttfts) / len(ttfts):.2f} s" if ttfts else "-"
        failed = sum(bool(answer.error) for answer in answers)
        hits = short_hits(counted, answers)
        return f"{sent} sent, {len(running)} running, {failed} failed, mean time to first token {mean}{hits}"

    if before:
        threading.Thread(target=watch, daemon=True).start()
    try:
        with progress(label) as show:
            now = deadline = 0.0
            while not workload.over(now) or (running and now < deadline):
                if not workload.over(now):
                    deadline = now + patience
                    for what in workload.due(now):
                        thread = threading.Thread(target=ask, args=(what,), daemon=True)
                        running.add(thread)
                        thread.start()
                        sent += 1
                running = {thread for thread in running if thread.is_alive()}
                show(now, workload.seconds, describe)
                time.sleep(TICK)
                now = time.monotonic() - epoch
    except KeyboardInterrupt:
        stopped = True
    finally:
        over.set()
    server = count()
    done = list(answers)
    late = workload.questions_late if isinstance(workload, MultiRound) else 0
    samples = sorted((Sample.of(answer) for answer in done), key=lambda sample: sample.started)
    summary = summarise(samples, unfinished=sent - len(done), late=late)
    result = Run(target=target.name, url=target.endpoint.url, qps=qps, summary=summary, samples=samples, server=server)
    mean = f"{summary.ttft_mean:.3f} s" if summary.ttft_mean is not None else "-"
    print(
        f"{printable(label)}  {summary.answered} answered, {summary.failed} failed, mean time to first token {mean}, "
        f"{summary.requests_per_second:.2f} requests/s{short_hits(server, done)}",
        file=sys.stderr,
        flush=True,
    )
    if summary.errors:
        print(f"{printable(label)}  {describe_errors(summary.errors)}", file=sys.stderr, flush=True)
    if stopped:
        raise Interrupted(result)
    return result


def describe_errors(errors: dict[str, int]) -> str:
    """The first failure with its count, and the number of the others."""
    first, count = next(iter(errors.items()))
    others = sum(errors.values()) - count
    more = f"; {others} failed for {len(errors) - 1} other reasons" if others else ""
    return f"{count} failed: {printable(first, 400)}{more}"


def warm(target: Target, count: int = 10) -> None:
    """Send short requests without measuring them. Raises `EndpointError` if none of them gets an answer."""
    problem = ""
    answered = 0
    for i, prompt in enumerate(warm_up(count)):
        answer = target.endpoint.ask(prompt, 16, 0, i, time.monotonic())
        answered += not answer.error
        problem = answer.error or problem
    if count and not answered:
        raise EndpointError(f"{target.endpoint.url} does not answer: {problem}")


def server_counters(endpoint: Endpoint) -> dict[str, float]:
    """Counters of the endpoint's own /metrics page, summed over their labels; empty without such a page."""
    try:
        text = endpoint.get("/metrics", timeout=10)
    except EndpointError:
        return {}
    found: dict[str, float] = {}
    for line in re.finditer(r"^([a-zA-Z_:][\w:]*)(?:{[^\n]*})? ([-+.\deE]+)$", text, re.MULTILINE):
        name = SERVER_COUNTERS.get(line[1].removesuffix("_total"))
        if name is not None:
            found[name] = found.get(name, 0.0) + float(line[2])
    return found
