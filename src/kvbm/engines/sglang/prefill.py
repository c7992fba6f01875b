"""How fast SGLang computes prompts, as its scheduler sees it.

SGLang does not pass it to a storage backend, but the backend lives in the scheduler's process. :func:`watch_prefill`
wraps the scheduler's method that processes the result of a batch. A batch begins when it is launched, or when the batch
before it ends if that is later: with overlapping steps SGLang launches a batch while the GPU computes the one before.
So neither idle time nor the decoding step before a prompt counts.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

logger = logging.getLogger("kvbm")

MAX_BATCHES = 64  # not taken yet
MAX_STEPS = 16  # likewise
# Launching kernels takes most of the time of a short batch. It tells the price of a token if it is a whole prompt, and
# not if it is the end of a long one. SGLang asks no storage for fewer tokens than the second number.
LONG_TOKENS, SHORT_TOKENS = 2048, 256


class Batch(NamedTuple):
    """A batch that computed prompts."""

    tokens: int
    seconds: float
    before: int  # tokens in front of them, on average
    is_bound: bool  # the seconds hold other work too: they are the most that the tokens took


class PrefillClock:
    """What batches took. The scheduler's thread adds, any thread takes."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:  # the clock of ScheduleBatch.launch_ts
        self._now = now
        self._ended = 0.0
        self._decoded = False  # the last batch
        self._batches: deque[Batch] = deque(maxlen=MAX_BATCHES)
        self._steps: deque[float] = deque(maxlen=MAX_STEPS)

    def end_batch(self, batch: Any) -> None:
        """SGLang has the result of a batch, of any kind."""
        now, ended, decoded = self._now(), self._ended, self._decoded
        self._ended, self._decoded = now, batch.forward_mode.is_decode()
        seconds = now - max(ended, batch.launch_ts or now)
        if self._decoded and decoded:
            self._steps.append(now - ended)
        stats = batch.prefill_stats  # None: a decoding batch, whatever its mode is
        if self._decoded or stats is None or not batch.forward_mode.is_extend_without_speculative():
            return
        # With data-parallel attention the ranks compute their batches together, and the longest sets the pace.
        tokens = max(batch.extend_num_tokens, *(batch.global_num_tokens or ()), 0)
        own = sum(batch.extend_lens)
        lengths = zip(batch.prefix_lens, batch.extend_lens, strict=True)
        before = sum(prefix * length for prefix, length in lengths) // own if own else 0
        is_loaded = stats.log_host_hit_tokens + stats.log_storage_hit_tokens > 0  # the layers wait for their KV
        is_long = tokens >= LONG_TOKENS or tokens >= max(SHORT_TOKENS, before)
        self._batches.append(Batch(tokens, seconds, before, is_loaded or not is_long))

    def take(self) -> list[Batch]:
        """Batches that were added since the last call."""
        return [self._batches.popleft() for _ in range(len(self._batches))]

    def take_steps(self) -> list[float]:
        """Seconds of decoding steps that were added since the last call."""
        return [self._steps.popleft() for _ in range(len(self._steps))]


@functools.cache
def watch_prefill() -> PrefillClock | None:
    """The clock of this process. None where this release of SGLang has no such method; KVBM_PREFILL_TOKENS_PER_SECOND
    stays the estimate then."""
    try:
        from sglang.srt.managers.scheduler import Scheduler

        process = Scheduler.process_batch_result
    except (ImportError, AttributeError) as error:
        logger.warning(
            "KVBM cannot measure how fast this release of SGLang computes prompts (%s), and takes "
            "KVBM_PREFILL_TOKENS_PER_SECOND for it", error,
        )  # fmt: skip
        return None
    clock = PrefillClock()

    @functools.wraps(process)
    def watched(self: Any, batch: Any, *args: Any, **named: Any) -> Any:
        result = process(self, batch, *args, **named)
        try:
            clock.end_batch(batch)
        except Exception:
            logger.debug("a batch could not be timed", exc_info=True)
        return result

    Scheduler.process_batch_result = watched
    return clock
