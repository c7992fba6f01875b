"""What the ranks tell each other at their start.

MPI's allgather waits without a limit for every rank. So each rank takes part in each exchange, in the same order,
whatever has failed on it or kept it out: a rank that leaves its start early makes up for the exchanges that it has not
come to. The other ranks then wait for it in the channel, which has a limit (DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvbm.config import Config
from kvbm.engines.trtllm import compat
from kvbm.tiers import registry

logger = logging.getLogger("kvbm")

WEIGHTS, PACKING = "weights", "packing"
# What a rank says in an exchange that it does not come to: no digest, and why blocks are not packed.
_ABSENT = {WEIGHTS: "", PACKING: "it has left its start"}


class Exchanges:
    """Those of one rank. Use in a ``with`` around the whole start."""

    def __init__(self, config: Config, ranks: int) -> None:
        self._ranks = ranks
        # By the settings alone, which all ranks share.
        wanted = {WEIGHTS: registry.outlives_engine(config), PACKING: config.pack == "auto"}
        self._left = [topic for topic in (WEIGHTS, PACKING) if wanted[topic]]

    def gather(self, own: str, topic: str) -> Sequence[str]:
        """The texts of all ranks, by rank."""
        self._left.remove(topic)
        return compat.gather_over_ranks(own, self._ranks, topic)

    def __enter__(self) -> Exchanges:
        return self

    def __exit__(self, *exception: object) -> None:
        while self._left:
            topic = self._left[0]
            try:
                self.gather(_ABSENT[topic], topic)
            except Exception:
                logger.debug("the ranks could not exchange %s", topic, exc_info=True)
