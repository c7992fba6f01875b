"""How fast SGLang computes prompts, as its scheduler sees it.

SGLang does not pass it to a storage backend, but the backend lives in the scheduler's process, and the scheduler
reports every prefill batch to its log and metrics once the batch has ended. :func:`watch_prefill` wraps that report. A
batch begins when the one before it ends, or when its last request is scheduled if that is later, so idle time does not
count.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("kvbm")

MAX_BATCHES = 64  # not taken yet
# A shorter batch takes most of its time for launching kernels, or for attention to a prefix that was loaded, and would
# make tokens look many times as expensive as those of a long prompt.
MIN_TOKENS = 2048


class PrefillClock:
    """Tokens and seconds of prefill batches. The scheduler's thread adds, any thread takes."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:  # the clock of SGLang's own times
        self._now = now
        self._ended = 0.0
        self._batches: deque[tuple[int, float]] = deque(maxlen=MAX_BATCHES)

    def end_batch(self, requests: Any, tokens: int) -> None:
        """A batch that computed so many prompt tokens has ended."""
        now = self._now()
        scheduled = max((request.time_stats.last_forward_entry_time for request in requests), default=0.0)
        began = max(self._ended, scheduled)
        self._ended = now
        if began > 0 and tokens >= MIN_TOKENS:
            self._batches.append((tokens, now - began))

    def take(self) -> list[tuple[int, float]]:
        """What was added since the last call."""
        return [self._batches.popleft() for _ in range(len(self._batches))]


@functools.cache
def watch_prefill() -> PrefillClock | None:
    """The clock of this process. None where this release of SGLang has no such report; KVBM_PREFILL_TOKENS_PER_SECOND
    stays the estimate then."""
    try:
        from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter

        report = SchedulerMetricsReporter.report_prefill_stats
    except (ImportError, AttributeError) as error:
        logger.warning(
            "KVBM cannot measure how fast this release of SGLang computes prompts (%s), and takes "
            "KVBM_PREFILL_TOKENS_PER_SECOND for it", error,
        )  # fmt: skip
        return None
    clock = PrefillClock()

    @functools.wraps(report)
    def watched(self: Any, *args: Any, **named: Any) -> Any:
        try:
            batch = named["batch"] if "batch" in named else args[0]
            stats = named["prefill_stats"] if "prefill_stats" in named else args[1]
            clock.end_batch(batch.reqs if batch is not None else (), stats.log_input_tokens)
        except Exception:
            logger.debug("a prefill batch could not be timed", exc_info=True)
        return report(self, *args, **named)

    SchedulerMetricsReporter.report_prefill_stats = watched
    return clock
