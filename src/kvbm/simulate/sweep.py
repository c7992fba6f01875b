"""Many replays of one trace side by side: sizes, settings, advice."""

from __future__ import annotations

from kvbm.config import Config, load
from kvbm.simulate.engine import Machine
from kvbm.simulate.trace import Trace


def settings_of(trace: Trace, given=None) -> Config:
    return load({**trace.settings, **(given or {})}, environ={}, files=())


def machine_of(trace: Trace) -> Machine:
    return Machine(trace.block_bytes, 10000.0, {})
