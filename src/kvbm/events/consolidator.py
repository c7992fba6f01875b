"""A process beside the engine that merges its block events with those of KVBM's tiers.

    python -m kvbm.events.consolidator --engine tcp://127.0.0.1:20081 --output tcp://127.0.0.1:57001 --mode dedup

vLLM does not need it, because vLLM's publisher carries the events of all tiers. It serves engines whose publisher
cannot, and deployments that expect it. It is a separate process, so that its work does not delay the engine.

Input: two frames [topic, payload] or three [topic, number, payload]; payload is msgpack [time, [events], rank].
Output: three frames ["", number, payload], every 50 ms if there are events.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import zmq

from kvbm.events.merge import Merge

logger = logging.getLogger("kvbm")

FLUSH_SECONDS = 0.05
# Messages in a queue, of an input or for a subscriber. Beyond it ZeroMQ drops messages, as with vLLM's publisher.
MAX_WAITING = 100_000


class Consolidator:
    """``inputs``: endpoint -> name of its stream. Binds its output; raises zmq.ZMQError if it cannot."""

    def __init__(self, inputs: dict[str, str], output: str, mode: str) -> None:
        self._context = zmq.Context()
        self._out = self._context.socket(zmq.PUB)
        self._out.set_hwm(MAX_WAITING)
        self._out.setsockopt(zmq.LINGER, 0)
        self._in: dict[zmq.Socket[bytes], str] = {}
        self._poller = zmq.Poller()
        try:
            self._out.bind(output)
            for endpoint, stream in inputs.items():
                socket = self._context.socket(zmq.SUB)
                self._in[socket] = stream
                socket.set_hwm(MAX_WAITING)
                socket.subscribe(b"")
                socket.connect(endpoint)
                self._poller.register(socket, zmq.POLLIN)
        except zmq.ZMQError:
            self.close()
            raise
        self._numbers: dict[str, int] = {}  # the last message of each stream
        self._ranks: defaultdict[int, Merge] = defaultdict(partial(Merge, mode))
        self._pending: defaultdict[int, list[dict[str, object]]] = defaultdict(list)
        self._sent = 0
        self._decode = msgspec.msgpack.Decoder().decode
        self._encode = msgspec.msgpack.Encoder().encode

    def run(self, is_over: Callable[[], bool]) -> None:
        due = time.monotonic() + FLUSH_SECONDS
        while not is_over():
            for socket, _ in self._poller.poll(max(0, int((due - time.monotonic()) * 1000))):
                self._receive(socket)
            if time.monotonic() >= due:
                self._flush()
                due = time.monotonic() + FLUSH_SECONDS

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        stream = self._in[socket]
        for _ in range(1000):  # then it reads the other streams
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                _, events, *rest = self._decode(frames[-1])
                rank = int(rest[0] or 0) if rest else 0
                if len(frames) > 2:
                    self._count(stream, int.from_bytes(frames[1], "big"))
                self._pending[rank] += self._ranks[rank].apply(stream, events)
            except (msgspec.DecodeError, ValueError, TypeError) as error:
                logger.warning("skipped an invalid message of %s: %s", stream, error)

    def _count(self, stream: str, number: int) -> None:
        """Lost messages may have been removals, so the stream's blocks are dropped: a missing block is harmless."""
        last = self._numbers.get(stream)
        self._numbers[stream] = number
        if last is None or number == last + 1:
            return
        logger.warning("messages %d to %d of %s are missing: its blocks are dropped", last + 1, number - 1, stream)
        for rank, merge in self._ranks.items():
            self._pending[rank] += merge.clear(stream)

    def _flush(self) -> None:
        for rank, events in self._pending.items():
            if events:
                payload = self._encode([time.time(), events, rank])
                self._out.send_multipart([b"", self._sent.to_bytes(8, "big"), payload])
                self._sent += 1
        self._pending.clear()

    def close(self) -> None:
        for socket in (*self._in, self._out):
            socket.close(linger=0)
        self._context.term()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", metavar="ENDPOINT", action="append", default=[], help="of the engine's events")
    parser.add_argument("--kvbm", metavar="ENDPOINT", help="of KVBM's events, if it is another one")
    parser.add_argument("--output", metavar="ENDPOINT", required=True, help="of the merged events")
    parser.add_argument("--mode", choices=("dedup", "passthrough"), default="dedup")
    parser.add_argument("--parent", type=int, metavar="PID", help="end with this process")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=os.environ.get("KVBM_LOG_LEVEL", "INFO").upper(), format="%(levelname)s %(message)s")
    inputs = {endpoint: f"engine {i}" if i else "engine" for i, endpoint in enumerate(options.engine)}
    if options.kvbm:
        inputs[options.kvbm] = "kvbm"
    try:
        consolidator = Consolidator(inputs, options.output, options.mode)
    except zmq.ZMQError as error:
        logger.error(
            "no consolidated events: cannot listen on %s (%s). The port is DYN_KVBM_LEADER_ZMQ_PUB_PORT + 1000; every "
            "engine on a host needs its own.", options.output, error,
        )  # fmt: skip
        return 1
    logger.info(
        "KV Event Consolidator fully started: %s of %s, publish to %s",
        options.mode, ", ".join(inputs), options.output,
    )  # fmt: skip
    try:
        consolidator.run(lambda: options.parent is not None and os.getppid() != options.parent)
    except KeyboardInterrupt:
        pass
    finally:
        consolidator.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
