"""The way between leader and workers: plans down, reports up.

One contract (``base``), two ways. *In-band* (``inband``): the engine carries the bytes inside its own step metadata and
step output (vLLM). *ZeroMQ* (``zmq_leader``, ``zmq_worker``): leader and workers talk past the engine, for engines that
carry nothing outside of a step (TensorRT-LLM), on one machine through sockets that only their user can reach
(``local``). The engine's own threads call, and no call waits for the other side.

What both promise: plans reach every rank, and reports the leader, in the order they were sent, none twice and none
missing, however late. Where that cannot be kept the rank is *lost*, for good: the leader is told so, and what the rank
still owed has failed (:meth:`kvbm.runtime.leader.Leader.fail_rank`). Nothing is ever dropped in silence, because a plan
that vanishes is a request that waits forever.
"""

from kvbm.runtime.channel.base import (
    TIMING,
    Agreement,
    ChannelError,
    HandshakeTimeoutError,
    LeaderChannel,
    Timing,
    WorkerChannel,
    agree,
)
from kvbm.runtime.channel.inband import InBandLeader, InBandWorker
from kvbm.runtime.channel.zmq_end import ACK_SETTING, HOST_SETTING, PUB_SETTING, TIMEOUT_SETTING
from kvbm.runtime.channel.zmq_leader import ZmqLeader
from kvbm.runtime.channel.zmq_worker import ZmqWorker

# Messages that either end of the ZeroMQ way keeps for the other. Engines run in lockstep with their ranks, a few steps
# ahead at most: a rank that has left thousands of plans untaken has stopped.
WINDOW = 8192

__all__ = [
    "ACK_SETTING",
    "HOST_SETTING",
    "PUB_SETTING",
    "TIMEOUT_SETTING",
    "TIMING",
    "WINDOW",
    "Agreement",
    "ChannelError",
    "HandshakeTimeoutError",
    "InBandLeader",
    "InBandWorker",
    "LeaderChannel",
    "Timing",
    "WorkerChannel",
    "ZmqLeader",
    "ZmqWorker",
    "agree",
]
