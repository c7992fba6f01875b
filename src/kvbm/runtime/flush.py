"""The end of an engine: blocks that are on their way to disk get there, within a deadline.

A block needs several steps of the engine to reach the disk: it is copied to host memory, confirmed, queued, written and
confirmed again. An engine takes no steps once it ends, and loses every block that is between two of them. Where the
leader and its workers share a process, :func:`flush` takes these steps in place of the engine. Where they do not, no
answer of a worker reaches the leader after the engine's last step: vLLM goes on stepping while the leader has work, and
ends its workers after that. :func:`unwritten` tells what is left in either case.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from kvbm.plans import Report, StepPlan
from kvbm.runtime.leader import Leader

# How long the end of an engine waits for the disk. Less than the 5 s after which vLLM kills an engine process that it
# has told to end (VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS), as the rest of the teardown needs some of them too.
FLUSH_SECONDS = 3.0
_POLL_SECONDS = 0.001


class LocalWorker(Protocol):
    """A worker in the process of its leader."""

    @property
    def keeping(self) -> bool: ...

    def take_step(self, plan: StepPlan) -> Report | None:
        """Carry out a plan without loads and stores, and tell what has ended."""


def flush(
    leader: Callable[[], Leader | None],
    workers: Sequence[LocalWorker],
    apply: Callable[[Sequence[Report]], None],
    deadline: float,
) -> bool:
    """Step ``workers``, which are all ranks, until what the leader keeps is confirmed. False at the ``deadline``.

    ``leader`` is asked again after every step: it is gone when a report could not be taken in.
    """
    while (current := leader()) is not None and current.keeping:
        if time.monotonic() >= deadline:
            return False
        queued = _queued_blocks(current)
        spill = current.spill()
        plan = StepPlan(spills=[] if spill is None else [spill], keeps=current.take_verdicts())
        reports = [report for worker in workers if (report := worker.take_step(plan))]
        apply(reports)
        if plan or reports or _queued_blocks(current) != queued:
            continue
        if not any(worker.keeping for worker in workers):
            return True  # the answers that the leader lacks were lost with a step whose results it never saw
        time.sleep(_POLL_SECONDS)
    return True


def unwritten(leader: Leader, in_time: bool, confirmable: bool) -> str:
    """Which blocks the next engine will not find on disk, and why, as a sentence for the log; empty if there are none.

    ``in_time``: the flush did not run into its deadline. ``confirmable``: workers could answer during the flush.
    """
    spills, counts = leader.spills, leader.counts
    if spills is None or not spills.is_persistent:
        return ""
    # With the filter on, a block that comes to host memory is not bound for the disk yet.
    copied = 0 if spills.is_filtered else leader.unconfirmed_store_blocks
    at_exit = {
        "being copied to host memory": copied,
        "queued for the disk": spills.queued_blocks,
        "being written": spills.pending_blocks,
    }
    sentences = []
    if total := sum(at_exit.values()):
        if not confirmable:
            reason = "the engine ended its workers before they had confirmed these blocks"
        elif not in_time:
            reason = f"the disk did not take them within {FLUSH_SECONDS:g} s"
        else:
            reason = "the engine did not deliver the results of its last steps"
        sentences.append(f"{total} blocks were lost at exit ({_listed(at_exit.items())}): {reason}")
    since_start = {
        "skipped because the disk was behind (KVBM_MAX_PENDING_SPILLS)": counts.refused_spill_blocks,
        "not written because the disk failed": counts.failed_spill_blocks,
    }
    if listed := _listed(since_start.items()):
        sentences.append(f"since the start, blocks were passed over at least once: {listed}")
    return "; ".join(sentences)


def _queued_blocks(leader: Leader) -> int:
    return 0 if leader.spills is None else leader.spills.queued_blocks


def _listed(counts: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts if count)
