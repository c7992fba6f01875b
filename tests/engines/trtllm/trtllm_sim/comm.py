"""Broadcast and allgather between the ranks, in place of MPI.

Rank 0 has a pipe to every other rank. A rank that dies is left out from then on; under MPI it would take the job with
it, so this is kinder than the engine, and what makes it possible to look at the ranks that live.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any


class Comm:
    def __init__(self, rank: int, ranks: int, pipes: dict[int, Connection]) -> None:
        self.rank = rank
        self.ranks = ranks
        self.lost: set[int] = set()
        self._pipes = pipes  # of rank 0: to every other rank; of the others: to rank 0

    def broadcast(self, value: Any = None) -> Any:
        """What rank 0 says, on every rank."""
        if self.rank:
            return self._pipes[0].recv()
        for rank in list(self._pipes):
            self._send(rank, value)
        return value

    def allgather(self, value: Any) -> dict[int, Any]:
        """What every live rank says, by rank, on every rank."""
        if self.rank:
            self._pipes[0].send(value)
            return self._pipes[0].recv()  # type: ignore[no-any-return]
        values = {0: value}
        for rank, pipe in list(self._pipes.items()):
            try:
                values[rank] = pipe.recv()
            except (EOFError, OSError):
                self._lose(rank)
        self.broadcast(values)
        return values

    def _send(self, rank: int, value: Any) -> None:
        try:
            self._pipes[rank].send(value)
        except OSError:
            self._lose(rank)

    def _lose(self, rank: int) -> None:
        self.lost.add(rank)
        self._pipes.pop(rank, None)
