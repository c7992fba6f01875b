"""The end of an engine: blocks that are on their way to a persistent tier get there, within a deadline.

A block needs several steps of the engine to reach it: it is copied to host memory, confirmed, queued, written and
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
from kvbm.tiers.edges import Edge

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
    """Step ``workers``, which are all ranks, until all stores and moves are confirmed. False at the ``deadline``.

    ``leader`` is asked again after every step: it is gone when a report could not be taken in.
    """
    while (current := leader()) is not None and current.keeping:
        if time.monotonic() >= deadline:
            return False
        queued = _queued_blocks(current)
        plan = StepPlan(moves=current.plan_moves(), verdicts=current.take_verdicts())
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
    edges = [edge for edge in leader.edges if edge.is_persistent]
    return "; ".join(filter(None, (_unwritten(leader, edge, in_time, confirmable) for edge in edges)))


def _unwritten(leader: Leader, edge: Edge, in_time: bool, confirmable: bool) -> str:
    counts, target = leader.counts, edge.target
    # A block that comes to the near tier is not bound for the next one yet where a filter decides later.
    copied = leader.unconfirmed_store_blocks if edge.admits_all else 0
    at_exit = {
        "being copied to host memory": copied,
        f"queued for the {target}": edge.queued_blocks,
        "being written": edge.pending_blocks,
    }
    sentences = []
    if total := sum(at_exit.values()):
        if not confirmable:
            reason = "the engine ended its workers before they had confirmed these blocks"
        elif not in_time:
            reason = f"the {target} did not take them within {FLUSH_SECONDS:g} s"
        elif edge.queued_blocks == total:
            reason = f"writes to the {target} kept failing"  # the flush does not wait for the end of the pause
        else:
            reason = "the engine did not deliver the results of its last steps"
        sentences.append(f"{total} blocks were lost at exit ({_listed(at_exit.items())}): {reason}")
    since_start = {
        f"skipped because the {target} was behind (KVBM_MAX_PENDING_SPILLS)": counts.refused_move_blocks.get(target, 0),
        f"not written because the {target} failed": counts.failed_move_blocks.get(target, 0),
    }
    if listed := _listed(since_start.items()):
        sentences.append(f"since the start, blocks were passed over at least once: {listed}")
    return "; ".join(sentences)


def _queued_blocks(leader: Leader) -> int:
    return sum(edge.queued_blocks for edge in leader.edges)


def _listed(counts: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts if count)
