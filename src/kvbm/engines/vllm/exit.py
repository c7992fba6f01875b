"""The end of vLLM's engine: blocks on their way to a tier that outlives it get there, within a deadline."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from kvbm.engines.guard import Faults
from kvbm.engines.session import Session
from kvbm.engines.vllm.worker import WorkerAdapter
from kvbm.plans import Report
from kvbm.runtime import flush

logger = logging.getLogger("kvbm")


class Exit:
    """Runs once, when vLLM closes the scheduler's connector or the first worker's, whichever comes first."""

    def __init__(self, session: Session, faults: Faults, apply: Callable[[Sequence[Report]], None]) -> None:
        self._session = session
        self._faults = faults
        self._apply = apply
        self._workers: Sequence[WorkerAdapter] = ()  # all workers, where they are in this process
        self._deadline: float | None = None  # once the end has begun
        self._flushed = True  # in time

    def follow(self, workers: Sequence[WorkerAdapter]) -> None:
        """vLLM ends these workers, which are all ranks, before the scheduler: flush while they can still copy."""
        self._workers = workers
        for worker in workers:
            worker.before_close = self.flush

    def flush(self) -> None:
        if self._deadline is not None:
            return
        session = self._session
        with self._faults.engine_lock:
            self._deadline = time.monotonic() + flush.FLUSH_SECONDS
            session.finalize()
            if not self._workers or session.manager is None or not session.manager.outlives_engine:
                return  # nothing to be done, or nothing that would outlive this engine
            try:
                self._flushed = flush.flush(lambda: session.leader, self._workers, self._apply, self._deadline)
            except Exception as error:
                self._flushed = False
                self._faults.record("flushing", error)
            if not self._flushed:
                for worker in self._workers:
                    worker.hurry_stores()

    def close(self) -> float:
        """Flush, and log which blocks are lost. Returns how many seconds the catalogs may take to end."""
        self.flush()
        leader = self._session.leader
        if leader is not None and (lost := flush.unwritten(leader, self._flushed, bool(self._workers))):
            logger.warning("disk tier: %s. The next engine computes these blocks again", lost)
        assert self._deadline is not None
        return max(1.0, self._deadline - time.monotonic())
