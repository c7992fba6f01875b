"""Looks at the members of a fleet from this machine, for `kvbm doctor`: who they are, and how their blocks come."""

from __future__ import annotations

import contextlib
import time
from typing import NamedTuple

from kvbm.config import Config
from kvbm.tiers.host.shared import machine
from kvbm.tiers.peers.client import MAPPED, SOCKET, Identity, connect
from kvbm.tiers.peers.finder import Source
from kvbm.tiers.peers.finders import member_lists
from kvbm.tiers.peers.open import peer_directory, require_secret
from kvbm.tiers.peers.wire import VERSION, Channel, Facts, PeerError, Probe, Who, authenticate_client

SECONDS = 2.0  # for each member


class Reached(NamedTuple):
    address: str
    facts: Facts
    seconds: float  # of a question and its answer, after the handshake
    path: str


class Unreached(NamedTuple):
    address: str
    kind: str
    why: str


def look(config: Config) -> tuple[list[Reached], list[Unreached], list[str]]:
    """(members that answer, members that do not, lists that cannot be read). Raises ValueError for a wrong secret."""
    me = Identity(Who(VERSION, {}), machine(), require_secret(config))
    found: dict[str, Source] = {}
    problems = []
    for members in member_lists(config, me, peer_directory(config)):
        try:
            found |= {source.address: source for source in members.read()}
        except OSError as error:
            problems.append(str(error))
    reached: list[Reached] = []
    unreached: list[Unreached] = []
    for address in found:
        try:
            reached.append(_probe(address, me))
        except PeerError as error:
            unreached.append(Unreached(address, error.kind, str(error)))
    return reached, unreached, problems


def _probe(address: str, me: Identity) -> Reached:
    connection = connect(address, SECONDS)
    with contextlib.closing(Channel(connection, SECONDS)) as channel:
        if not address.startswith("unix:"):
            if not me.secret:
                raise PeerError("secret", "no secret is set here")
            authenticate_client(channel, me.secret)
        began = time.monotonic()
        channel.send(Probe())
        facts: Facts = channel.receive(Facts)
        seconds = time.monotonic() - began
    return Reached(address, facts, seconds, MAPPED if facts.about.machine == me.machine else SOCKET)
