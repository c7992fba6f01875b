"""What travels in the engine's own step metadata, from the leader to every rank."""

from __future__ import annotations

import msgspec

from kvbm.plans import StepPlan


class StepMeta(msgspec.Struct, frozen=True, array_like=True):
    """One step. Its plan has no loads: those come over the channel."""

    plan: StepPlan = StepPlan()
    # How many messages the leader has sent over the channel so far: those of this step are about to arrive.
    messages: int = 0
    # Which request each store of the plan belongs to: store -> request.
    owners: dict[int, int] = {}


encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(StepMeta).decode


def decode(data: object) -> StepMeta:
    """Raises when the bytes are no step: both ends are one installation, so that is a fault of the program."""
    return _decode(data) if isinstance(data, bytes) and data else StepMeta()
