"""Checks what earlier engines have noted about packed blocks."""

from __future__ import annotations

from collections.abc import Iterator

from kvbm.doctor.base import Examination
from kvbm.observe.findings import note
from kvbm.observe.snapshot import Finding
from kvbm.runtime.packing_notes import notes


class Packing:
    name = "packing"

    def run(self, case: Examination) -> Iterator[Finding]:
        config = case.config
        if config is None or config.pack == "off":
            return
        then = "packs them all the same" if config.pack == "on" else "does not pack them"
        for path, found in notes(config):
            yield note(
                "unpackable-before",
                f"On {found.date} {found.unpackable} of {found.unpackable + found.kept} blocks of {path.name} did not "
                f"fit packed slots. KVBM_PACK={config.pack} {then}.",
                f"Set KVBM_PACK=off for this model. To forget it: rm {path}",
            )
