"""`kvbm doctor` looks at a real fleet: who answers, which blocks fit, and why others do not answer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvbm.doctor.base import Examination
from kvbm.doctor.peers import Peers

sys.path.append(str(Path(__file__).parents[1] / "tiers" / "peers"))
from peer_member import CACHE, SECRET, Member


@pytest.fixture
def fleet(tmp_path):
    made: list[Member] = []

    def start(**settings) -> Member:
        made.append(Member(tmp_path, **settings))
        return made[-1]

    yield start
    for member in made:
        member.close()


def findings(folder, peers, **more):
    environ = {
        "KVBM_PEERS_ENABLED": "1", "KVBM_PEERS": peers, "KVBM_PEER_SECRET": SECRET, "KVBM_PEER_DIR": str(folder), **more
    }  # fmt: skip
    case = Examination("", environ=environ)
    assert case.config is not None, case.settings
    return [(finding.name, finding.level, finding.text) for finding in Peers().run(case)]


def test_members_that_fit_and_one_that_does_not(fleet, tmp_path):
    first, other = fleet(), fleet(cache={**CACHE, "weights": "5678"})
    found = findings(tmp_path, f"{first.server.address},{other.server.address},127.0.0.1:1")
    reached = [text for name, level, text in found if (name, level) == ("peer-reachable", "good")]
    assert len(reached) == 4  # each at its socket and at its port
    assert all("its blocks come over mapped memory" in text for text in reached)
    (text,) = [text for name, _, text in found if name == "peer-unreachable"]
    assert text.startswith("127.0.0.1:1: 127.0.0.1:1 cannot be reached")
    assert any("weights" in text and "do not read each other" in text for name, _, text in found)


def test_another_secret_is_named(fleet, tmp_path):
    member = fleet()
    found = findings(tmp_path, member.server.address, KVBM_PEER_SECRET="another secret altogether")
    (text,) = [text for name, level, text in found if (name, level) == ("peer-unreachable", "bad")]
    assert "does not know the secret" in text


def test_nothing_to_look_at(tmp_path):
    assert [name for name, _, _ in findings(tmp_path / "none", "")] == ["peers-none"]
    assert list(Peers().run(Examination("", environ={}))) == []
    assert findings(tmp_path, "file:/nonexistent/peers")[0][0] == "peers-list"


def test_a_secret_that_cannot_be_read_is_named(tmp_path):
    found = findings(tmp_path, "h:1", KVBM_PEER_SECRET="", KVBM_PEER_SECRET_FILE=str(tmp_path / "missing"))
    assert found[0][:2] == ("peers-secret", "bad")
    assert "cannot be read" in found[0][2]
