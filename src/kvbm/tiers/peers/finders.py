"""The finder of an engine, from its settings: neighbours, addresses, files and etcd."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from kvbm.config import Config
from kvbm.tiers.peers.client import Identity, Peer
from kvbm.tiers.peers.finder import Source
from kvbm.tiers.peers.finding.finder import FleetFinder
from kvbm.tiers.peers.finding.member_lists import (
    ETCD,
    FILE,
    AddressList,
    EtcdList,
    FileList,
    MemberList,
    NeighbourList,
)

UNUSED_SECONDS = 120.0  # after which the connection to a member that is asked no more is closed


class FilterClient:
    """Asks members for the changes of their filters. Keeps a connection to each."""

    def __init__(self, me: Identity) -> None:
        self._me = me
        self._peers: dict[str, tuple[Peer, float]] = {}  # by address; when it was last asked
        self._lock = threading.Lock()

    def ask(self, source: Source, epoch: int, number: int) -> bytes:
        """Raises PeerError."""
        now = time.monotonic()
        with self._lock:
            peer, _ = self._peers.get(source.address, (None, 0.0))
            old = []
            if peer is None:
                peer = Peer(source, self._me)
                old = [address for address, (_, used) in self._peers.items() if now - used > UNUSED_SECONDS]
            unused = [self._peers.pop(address)[0] for address in old]
            self._peers[source.address] = peer, now
        for each in unused:
            each.close()
        try:
            return peer.changes(epoch, number, self._me.seconds)
        except BaseException:
            with self._lock:
                self._peers.pop(source.address, None)
            peer.close()
            raise


def make_finder(config: Config, me: Identity, directory: Path) -> FleetFinder:
    """``directory``: of the Unix sockets of this machine."""
    return FleetFinder(member_lists(config, me, directory), me.fingerprint, FilterClient(me).ask)


def member_lists(config: Config, me: Identity, directory: Path) -> list[MemberList]:
    """Everything that KVBM_PEERS names, and the neighbours."""
    lists: list[MemberList] = [NeighbourList(directory, me.machine)]
    addresses = []
    for word in config.peers.replace(",", " ").split():
        if word == ETCD:
            lists.append(EtcdList(config.etcd_endpoints, config.dynamo_namespace, me.fingerprint))
        elif word.startswith(FILE):
            lists.append(FileList(Path(word.removeprefix(FILE))))
        else:
            addresses.append(word)
    return [*lists, AddressList(addresses)] if addresses else lists
