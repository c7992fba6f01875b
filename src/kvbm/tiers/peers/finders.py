"""The finder of an engine, from its settings: neighbours, addresses, files and etcd."""

from __future__ import annotations

import threading
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


class FilterClient:
    """Asks members for the changes of their filters. Keeps a connection to each."""

    def __init__(self, me: Identity) -> None:
        self._me = me
        self._peers: dict[str, Peer] = {}
        self._lock = threading.Lock()

    def ask(self, source: Source, epoch: int, number: int) -> bytes:
        """Raises PeerError."""
        with self._lock:
            peer = self._peers.get(source.address)
            if peer is None:
                peer = self._peers[source.address] = Peer(source, self._me)
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
