"""Rules of deliberate faults, for tests.

``KVBM_INJECT_FAULTS`` holds rules separated by commas, each ``kind[:rank=R][:every=N]``. Those
that begin with ``disk-`` may also have ``[:errno=NAME][:seconds=S]``; :mod:`kvbm.testing.disk_faults` lists them. These
are for copies:

- ``load``: every N-th block to be loaded does not arrive, and garbage lies in its place;
- ``store``: every N-th store fails after it has written garbage;
- ``zeros``: loads put zeros in place of the blocks and claim success. Nothing can notice that but the model's own
  output: it is the control that shows a comparison of tokens would see wrong KV;
- ``slow``: every N-th load begins a tenth of a second late;
- ``slow-store``: every N-th store begins a second late, or when the engine is about to overwrite its blocks: where that
  is not said in time, the wrong bytes are kept.
"""

from __future__ import annotations

import errno
from typing import NamedTuple

COPY_KINDS = ("load", "store", "zeros", "slow", "slow-store")
DISK_KINDS = ("disk-read", "disk-write", "disk-slow-read", "disk-slow-write", "disk-flip", "disk-torn")
KINDS = COPY_KINDS + DISK_KINDS


class Fault(NamedTuple):
    kind: str
    rank: int | None
    every: int
    errno: int | None = None
    seconds: float | None = None

    def strikes(self, kind: str, rank: int, count: int) -> bool:
        return kind == self.kind and self.rank in (None, rank) and count % self.every == 0


def parse(text: str) -> list[Fault]:
    faults = []
    for rule in filter(None, (part.strip() for part in text.split(","))):
        kind, *options = rule.split(":")
        values = dict(option.partition("=")[::2] for option in options)
        try:
            every, rank = int(values.pop("every", "1")), values.pop("rank", None)
            fault = Fault(kind, None if rank is None else int(rank), every)
            if kind in DISK_KINDS:
                number, seconds = values.pop("errno", None), values.pop("seconds", None)
                fault = fault._replace(
                    errno=None if number is None else getattr(errno, number),
                    seconds=None if seconds is None else float(seconds),
                )
        except (ValueError, AttributeError):
            fault = None
        if fault is None or values or kind not in KINDS or fault.every < 1:
            raise ValueError(
                f"KVBM_INJECT_FAULTS: {rule!r} is not kind[:rank=R][:every=N], with [:errno=NAME][:seconds=S] for a "
                f"disk, and kind one of {', '.join(KINDS)}"
            )
        faults.append(fault)
    return faults
