"""How long loads from a tier take. A module of its own: the process of the metrics port loads no more of the core."""

from __future__ import annotations

from typing import NamedTuple


class Rate(NamedTuple):
    """How long loads from a tier are expected to take."""

    bytes_per_second: float
    fixed_seconds: float
