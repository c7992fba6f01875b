"""Counts blocks that do not fit a packed slot. When packing loses more than it gains, warns and notes it."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from kvbm.config import Config
from kvbm.core.counts import Counts, do_not_suit_packing
from kvbm.plans import Hello
from kvbm.runtime.packing_notes import Note, write_note
from kvbm.tiers.bounded import Call, reason_of

logger = logging.getLogger("kvbm")


class Unpackable:
    """Without :meth:`remember` it only warns."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._has_warned = False
        self._config: Config | None = None
        self._names: set[str] = set()
        self.writing: Call[None] | None = None

    def remember(self, config: Config, hellos: Iterable[Hello]) -> None:
        """Leave a note for the next start of these ranks."""
        self._config = config
        self._names = {hello.packing_note for hello in hellos if hello.packing_note}

    def add(self, blocks: int) -> None:
        counts = self._counts
        counts.unpackable_blocks += blocks
        total = counts.unpackable_blocks + counts.offloaded_blocks
        if not self._has_warned and do_not_suit_packing(counts.unpackable_blocks, total):
            self._has_warned = True
            logger.warning(
                "%d of %d blocks do not fit a packed slot and are not kept, so what follows them in their prompts is "
                "not found. Slots have one size until the engine ends. Restart it with KVBM_PACK=off.",
                counts.unpackable_blocks, total,
            )  # fmt: skip
            if self._config is not None and self._names:
                # On a thread: the directory may be on a disk that hangs.
                note = Note(counts.unpackable_blocks, counts.offloaded_blocks)
                config, names = self._config, self._names
                self.writing = Call(lambda: _write(config, names, note), "the note on packing")


def _write(config: Config, names: Iterable[str], note: Note) -> None:
    try:
        for name in names:
            path = write_note(config, name, note)
            logger.warning("With KVBM_PACK=auto the next start does not pack blocks of this model; see %s", path)
    except Exception as error:
        logger.warning("The next start packs blocks again, because KVBM cannot note that: %s", reason_of(error))
