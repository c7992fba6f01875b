"""Fixtures of the peer tier's tests."""

from __future__ import annotations

import pytest
from peer_member import Member


@pytest.fixture
def run_dir(tmp_path):
    directory = tmp_path / "peers"
    directory.mkdir(mode=0o700)
    return directory


@pytest.fixture
def member(run_dir, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp,self")  # for NIXL, on the way of another machine
    member = Member(run_dir)
    yield member
    member.close()
