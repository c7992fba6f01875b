"""The way between leader and workers past the engine: plans down, reports up.

For engines that carry nothing outside of a step (TensorRT-LLM). vLLM carries both in its own step metadata and step
output, as they are encoded in :mod:`kvbm.plans`. On one machine leader and workers talk through sockets that only their
user can reach (``local``). The engine's own threads call, and no call waits for the other side.

Plans reach every rank, and reports the leader, in the order they were sent, none twice and none missing, however late.
Where that cannot be kept the rank is *lost*, for good: the leader is told so, and what the rank still owed has failed
(:meth:`kvbm.runtime.leader.Leader.fail_rank`). Nothing is ever dropped in silence, because a plan that vanishes is a
request that waits forever.
"""

from kvbm.runtime.channel.base import (
    TIMING,
    Agreement,
    ChannelError,
    HandshakeTimeoutError,
    Timing,
    agree,
)
from kvbm.runtime.channel.zmq_leader import ZmqLeader
from kvbm.runtime.channel.zmq_worker import ZmqWorker

# Messages that either end keeps for the other. Engines run in lockstep with their ranks, a few steps
# ahead at most: a rank that has left thousands of plans untaken has stopped.
WINDOW = 8192

__all__ = [
    "TIMING",
    "WINDOW",
    "Agreement",
    "ChannelError",
    "HandshakeTimeoutError",
    "Timing",
    "ZmqLeader",
    "ZmqWorker",
    "agree",
]
