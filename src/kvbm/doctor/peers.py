"""Checks of a fleet: whether this machine reaches the others, and whether their blocks fit together."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import kvbm
from kvbm.doctor.base import Examination, refusal
from kvbm.observe.findings import bad, good, note
from kvbm.observe.snapshot import Finding
from kvbm.tiers.peers import doctor as fleet

_CURES = {
    "secret": "Set the same KVBM_PEER_SECRET_FILE on both machines.",
    "gone": "Check that the engine runs with KVBM_PEER_LISTEN at this address, and that no firewall is in between.",
    "late": "Check the network, and whether the other machine is overloaded.",
    "version": "Install the same release of KVBM on both machines.",
}


class Peers:
    name = "peers"

    def run(self, case: Examination) -> Iterator[Finding]:
        config = case.config
        if config is None or not config.peers_enabled:
            return
        is_remote = bool(config.peers or config.peer_listen)
        if is_remote and importlib.util.find_spec("cryptography") is None:
            yield bad(
                "peers-need-cryptography",
                "KVBM_PEERS and KVBM_PEER_LISTEN need the package cryptography, which is not installed.",
                "pip install 'kvbm[peers]'",
            )
            return
        try:
            reached, unreached, problems = fleet.look(config)
        except ValueError as error:
            yield bad("peers-secret", f"{error}.", "Until then, the engine does not start with peers.")
            return
        if case.snapshot is None and (problem := _cannot_listen(config.peer_listen)):
            yield bad(
                "peer-listen",
                f"KVBM_PEER_LISTEN={config.peer_listen}: this machine cannot listen there ({problem}).",
                "Choose an address of this machine and a free port. Every engine on a host needs its own.",
            )
        for problem in problems:
            yield bad(
                "peers-list",
                f"A list of KVBM_PEERS={config.peers} cannot be read: {problem}.",
                "Correct KVBM_PEERS, or ETCD_ENDPOINTS if it names etcd.",
            )
        for address, kind, why in unreached:
            yield bad("peer-unreachable", f"{address}: {why}.", _CURES.get(kind, "See the log of that engine."))
        for member in reached:
            state = ", whose engine is dead" if member.facts.about.orphan else ""
            speed = f"answers in {member.seconds * 1e3:.1f} ms; its blocks come over {member.path}"
            yield good("peer-reachable", f"{member.address}{state} {speed}.")
            if member.facts.release != kvbm.__version__:
                yield note(
                    "peer-release",
                    f"{member.address} runs KVBM {member.facts.release}, this is {kvbm.__version__}.",
                    "Engines of different releases may refuse each other.",
                )
        yield from _compare(reached)
        if not reached and not unreached and not problems:
            yield note("peers-none", "No other engine is known: no neighbour runs here, and KVBM_PEERS names none.")


def _cannot_listen(address: str) -> str:
    host, _, port = address.rpartition(":")
    refused = refusal(host.strip("[]"), int(port)) if port.isdecimal() else None
    return "" if refused is None else refused.strerror or str(refused)


def _compare(members: list[fleet.Reached]) -> Iterator[Finding]:
    """Which of the members can read from each other: those with equal fingerprints."""
    if len(members) < 2:
        return
    first, *others = members
    for other in others:
        ours, theirs = first.facts.fingerprint, other.facts.fingerprint
        different = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
        if different:
            text = ", ".join(f"{name} {ours.get(name)!r} and {theirs.get(name)!r}" for name in different)
            yield note(
                "peer-fingerprint",
                f"{first.address} and {other.address} do not read each other's blocks: {text}.",
                "Start both with the same model, weights, dtype, block size and parallelism if they should.",
            )
    if all(other.facts.fingerprint == first.facts.fingerprint for other in others):
        yield good("peer-fingerprints", f"All {len(members)} engines that answer have the same fingerprint.")
