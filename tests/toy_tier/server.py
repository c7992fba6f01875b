"""Blocks under their keys, in memory, and questions about them that are answered by a thread."""

from __future__ import annotations

import threading
from queue import SimpleQueue


class Server:
    """Tests set what goes wrong: ``corrupts`` reads, ``fails`` reads or writes, is ``silent`` when asked."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, bytes], bytes] = {}  # (rank, key) -> checksum and payload
        self.corrupts = False
        self.fails: tuple[str, ...] = ()
        self.silent = False
        self.asked = 0
        self.pending_lookups = 0  # times that a lookup has come before the answer
        self.hints: list = []  # that came with lookups
        self._questions: SimpleQueue = SimpleQueue()
        self._thread: threading.Thread | None = None

    def ask(self, keys, ranks, answers) -> None:
        """Put (key, whether every rank has it) into ``answers`` for each of the keys, later."""
        self.asked += len(keys)
        if self.silent:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._answer, name="kvbm-toy-server", daemon=True)
            self._thread.start()
        self._questions.put((keys, ranks, answers))

    def has(self, key, ranks) -> bool:
        return all((rank, key) in self.blocks for rank in range(ranks))

    def _answer(self) -> None:
        while True:
            keys, ranks, answers = self._questions.get()
            for key in keys:
                answers.put((key, self.has(key, ranks)))
