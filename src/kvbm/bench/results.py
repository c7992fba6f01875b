"""The results of a benchmark: every answer, and a summary."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from kvbm.bench.client import Sample as Sample

FORMAT = 1
_OWN_HITS, _TIER_HITS = "engine_cache_hit_tokens", "external_cache_hit_tokens"  # of `Run.server`


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One target at one rate. Times in seconds; None without a sample."""

    sent: int
    answered: int
    failed: int
    without_text: int  # answered without text, so without a time to first token
    unfinished: int  # still running when the run ended
    late: int  # questions sent after their time
    seconds: float  # from the first request to the last answer
    requests_per_second: float
    input_tokens_per_second: float
    output_tokens_per_second: float
    cached_percent: float | None  # of all prompt tokens, where the server reports them
    ttft_mean: float | None
    ttft_p50: float | None
    ttft_p90: float | None
    ttft_p99: float | None
    ttft_max: float | None
    tokens_per_second_of_a_request: float | None  # after its first token
    latency_mean: float | None
    gap_mean: float | None = None  # between two tokens of a request
    gap_p50: float | None = None
    gap_p99: float | None = None
    errors: dict[str, int] = {}  # the text of a failure -> how many requests failed so, the first failure first


class Run(msgspec.Struct, frozen=True, kw_only=True):
    target: str
    url: str
    qps: float  # the requested rate; 0 for a trace
    summary: Summary
    samples: list[Sample]
    server: dict[str, float] = {}  # the server's own counters during the run, by name

    @property
    def hit_percent(self) -> float | None:
        """Prompt tokens from a cache, of the server's count or else of its answers; None if it reports neither."""
        prompt = self.server.get("prompt_tokens")
        if not prompt or _OWN_HITS not in self.server:
            return self.summary.cached_percent
        return 100 * (self.server[_OWN_HITS] + self.server.get(_TIER_HITS, 0.0)) / prompt

    def describe_hits(self) -> str:
        prompt = self.server.get("prompt_tokens")
        if not prompt or _OWN_HITS not in self.server:
            cached = sum(sample.cached_tokens for sample in self.samples)
            return f"{cached:,} prompt tokens from a cache" if cached else "the server reports no hits"
        own, loaded = self.server[_OWN_HITS], self.server.get(_TIER_HITS, 0.0)
        return (
            f"of {prompt:,.0f} prompt tokens, {loaded:,.0f} ({loaded / prompt:.0%}) were loaded by the KV connector "
            f"and {own:,.0f} ({own / prompt:.0%}) were in the engine's own cache"
        )


class Result(msgspec.Struct, frozen=True, kw_only=True):
    taken: str  # UTC
    command: list[str]
    model: str
    workload: dict[str, Any]
    machine: dict[str, Any]
    runs: list[Run]
    format: int = FORMAT


def short_hits(server: Mapping[str, float], samples: Sequence[Sample]) -> str:
    """For the line of a run under way: as `Run.describe_hits`; empty without a hit that is known."""
    prompt = server.get("prompt_tokens")
    if prompt and _OWN_HITS in server:
        loaded, own = server.get(_TIER_HITS, 0.0) / prompt, server[_OWN_HITS] / prompt
        return f", hits: {loaded:.0%} loaded, {own:.0%} in the engine's cache"
    prompt = sum(sample.prompt_tokens for sample in samples)
    cached = sum(sample.cached_tokens for sample in samples)
    return f", hits: {cached / prompt:.0%}" if cached else ""


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that ``percent`` percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(1, math.ceil(len(ordered) * percent / 100)) - 1]


def summarise(samples: Iterable[Sample], unfinished: int = 0, late: int = 0) -> Summary:
    every = list(samples)
    answered = [sample for sample in every if not sample.error]
    ttfts = [sample.ttft for sample in answered if sample.ttft is not None]
    seconds = max((s.finished for s in every), default=0.0) - min((s.started for s in every), default=0.0)
    prompt = sum(sample.prompt_tokens for sample in answered)
    output = sum(sample.output_tokens for sample in answered)
    speeds = [
        (sample.output_tokens - 1) / sample.generation_seconds
        for sample in answered
        if sample.output_tokens > 1 and sample.generation_seconds
    ]
    cached = sum(sample.cached_tokens for sample in answered)
    gaps = [gap for sample in answered for gap in sample.gaps]
    failures = sorted((sample for sample in every if sample.error), key=lambda sample: sample.started)
    latencies = [sample.finished - sample.started for sample in answered]

    def rate(count: float) -> float:
        return count / seconds if seconds else 0.0

    return Summary(
        sent=len(every) + unfinished,
        answered=len(answered),
        failed=len(every) - len(answered),
        without_text=len(answered) - len(ttfts),
        unfinished=unfinished,
        late=late,
        seconds=seconds,
        requests_per_second=rate(len(answered)),
        input_tokens_per_second=rate(prompt),
        output_tokens_per_second=rate(output),
        cached_percent=100 * cached / prompt if prompt and cached else None,
        ttft_mean=_mean(ttfts),
        ttft_p50=percentile(ttfts, 50) if ttfts else None,
        ttft_p90=percentile(ttfts, 90) if ttfts else None,
        ttft_p99=percentile(ttfts, 99) if ttfts else None,
        ttft_max=max(ttfts, default=None),
        tokens_per_second_of_a_request=_mean(speeds),
        latency_mean=_mean(latencies),
        gap_mean=_mean(gaps),
        gap_p50=percentile(gaps, 50) if gaps else None,
        gap_p99=percentile(gaps, 99) if gaps else None,
        errors=dict(Counter(sample.error for sample in failures)),
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Result).decode


def to_json(result: Result) -> bytes:
    return msgspec.json.format(_encode(result), indent=1) + b"\n"


def from_json(data: bytes) -> Result:
    """Raises msgspec.DecodeError for invalid data and for an unknown format."""
    result = _decode(data)
    if result.format != FORMAT:
        raise msgspec.DecodeError(f"the result has format {result.format}; this release reads format {FORMAT}")
    return result


def csv(run: Run) -> str:
    """The samples in the format of LMBenchmark's output files, for its plots."""
    names = "prompt_tokens,generation_tokens,ttft,generation_time,user_id,question_id,launch_time,finish_time"
    lines = [names]
    for sample in run.samples:
        if not sample.error and sample.ttft is not None:
            lines.append(
                f"{sample.prompt_tokens},{sample.output_tokens},{sample.ttft},{sample.generation_seconds},"
                f"{sample.user},{sample.round},{sample.started},{sample.finished}"
            )
    return "\n".join(lines) + "\n"
