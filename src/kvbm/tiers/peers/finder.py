"""Where blocks of other engines may be: the contract between finding them and reading them.

A :class:`Finder` names the engines to ask. Reading needs no more of it: every engine that is named is authenticated,
says what it really holds, and every block that comes from it is verified. A finder that is wrong costs a question.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import msgspec

from kvbm.core.catalog import Hint
from kvbm.core.keys import Key

MAX_CANDIDATES = 4  # engines asked for one prompt


class Source(msgspec.Struct, frozen=True, array_like=True):
    """An engine that serves its blocks. A field that the finder does not know is empty."""

    address: str  # "host:port" (IPv6 in brackets), or "unix:/path" on this machine
    member: str = ""  # names the engine's place in the fleet; its successor has the same name
    machine: str = ""  # equal on one machine: kvbm.tiers.host.shared.machine()
    fingerprint: str = ""  # digest of the cache: other caches are not asked
    generation: str = ""  # of its server process: another one has other blocks


class Finder(Protocol):
    """Names sources. The leader's lookup threads call :meth:`candidates`: it may compute, and never waits for a
    network. No call raises because a member is gone or a hint is wrong."""

    def candidates(self, keys: Sequence[Key], start: int, hint: Hint | None) -> Sequence[Source]:
        """The sources to ask for ``keys[start:]``, the best first, at most :data:`MAX_CANDIDATES`."""

    def members(self) -> Sequence[Source]:
        """Every source that is known now, for metrics and for the doctor."""

    def announce(self, own: Source, held: Collection[Key]) -> None:
        """This engine serves from now on, at ``own``. ``held``: its blocks, as they are at any moment."""

    def close(self) -> None: ...
