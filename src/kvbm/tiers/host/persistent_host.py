"""The books of a host tier that outlives the engine: which slot holds which block, where the next leader finds it.

A block is entered when its store is published. The ranks have hashed it by then, and record their checksums when the
next plan tells them that it was good (:mod:`kvbm.tiers.host.persistent_slab`): a store that a failed load has tainted
never has a checksum, so not even an index that is out of date can find it.

At start the ranks say which slots hold what the index claims; the rest is forgotten before anybody looks. They also say
what they have compared, and nothing is taken over unless that is what the leader finds.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from kvbm.config import Config
from kvbm.core.manager import BlockManager
from kvbm.plans import Hello
from kvbm.tiers.bounded import Call, reason_of
from kvbm.tiers.disk.index import Fingerprint, Index, cache_directory, common_fingerprint
from kvbm.tiers.host.persistent_slab import DIRECTORY_SETTING, digest, rows_of
from kvbm.tiers.lock import PATIENCE_SECONDS

logger = logging.getLogger("kvbm")


class PersistentHost:
    """Part of the leader: called from its thread, never waits."""

    def __init__(self, manager: BlockManager, index: Index) -> None:
        self._index = index
        manager.tags_stores = True
        manager.near.journal = index

    @classmethod
    def open(
        cls, config: Config, hellos: Sequence[Hello], cache: Fingerprint, manager: BlockManager
    ) -> PersistentHost | None:
        """Take over what is there from before. None, with a sentence, when host memory ends with this engine."""
        near = [hello.tiers[0] for hello in hellos]
        if not all(tier.intact for tier in near):
            return None  # a rank that does not keep its own has said why
        name = common_fingerprint(cache, (hello.layout for hello in hellos))
        if name is None:
            logger.warning("the host tier is not persistent: the ranks have layers of different kinds")
            return None
        pool = manager.near
        directory = cache_directory(config.host_persist_dir, name)
        about: dict[str, str | int] = {
            "ranks": len(hellos),
            "block_bytes": sum(hello.block_bytes for hello in hellos),
        }
        try:
            rows = Call(lambda: rows_of(directory), str(directory)).result()
        except Exception as error:
            logger.warning("the host tier is not persistent: %s", reason_of(error))
            return None
        if any(tier.index != digest(directory, rows, tier.slots) for tier in near):
            logger.warning(
                "the host tier is not persistent: a rank has compared its memory with another index than that in %s: "
                "the ranks do not see the same directory",
                directory,
            )
            return None
        try:
            opening = Call(
                lambda: Index.open(
                    directory,
                    name,
                    pool.size,
                    patience=PATIENCE_SECONDS,
                    about=about,
                    what="host tier",
                    setting=DIRECTORY_SETTING,
                ),
                str(directory),
                Index.close,
            )
            index = opening.result()
        except Exception as error:
            logger.warning("the host tier is not persistent: %s", reason_of(error))
            return None
        try:
            # The stages of a pipeline may have room for more slots than are used: those that all have count.
            bits = [np.unpackbits(np.frombuffer(tier.intact, np.uint8), count=pool.size) for tier in near]
            whole = np.logical_and.reduce(bits)
            compared = {(key, slot) for slot, key in rows if slot < pool.size and whole[slot]}
            entries = list(index.entries())
            lost = [entry[0] for entry in entries if entry not in compared]
            index.remove(lost)
            found = pool.adopt(entry for entry in entries if entry in compared)
            logger.info(
                "host tier: %d of %d blocks are there from before, %d were not whole, in %s",
                found, pool.size, len(lost), directory,
            )  # fmt: skip
            return cls(manager, index)
        except Exception as error:
            logger.warning("the host tier is not persistent: %s: %s", type(error).__name__, error)
            index.close()
            return None

    def close(self) -> None:
        self._index.close()
