"""Two machines: network namespaces with a cable between them, and a process namespace each. Needs root."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from kvbm.tiers.peers.client import NIXL, SOCKET
from kvbm.tiers.peers.nixl_path import api

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="network namespaces need root and iproute2"),
]

HERE = Path(__file__).resolve()
SLOT_BYTES, BLOCKS = 1 << 20, 32
ADDRESSES = ("10.213.7.1", "10.213.7.2")


def ip(*words) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def machines():
    """The names of two network namespaces."""
    names = [f"kvbm{os.getpid()}{end}" for end in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def start(machine, *words, **pipes) -> subprocess.Popen:
    """This file as a program on a machine, with process numbers of its own: no memory can be shared."""
    command = ["ip", "netns", "exec", machine, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "UCX_TLS": "tcp,self"}
    return subprocess.Popen([*command, sys.executable, str(HERE), *words], env=environment, text=True, **pipes)


def received_bytes(machine) -> int:
    command = ["ip", "netns", "exec", machine, "cat", "/sys/class/net/cable/statistics/rx_bytes"]
    return int(subprocess.check_output(command, text=True))


@pytest.mark.parametrize(
    "way", [SOCKET, pytest.param(NIXL, marks=pytest.mark.skipif(api() is None, reason="needs NIXL"))]
)
def test_blocks_cross_the_cable_whole(machines, way):
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        source = start(machines[0], "source", folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            address = source.stdout.readline().strip()
            assert address.startswith(ADDRESSES[0])
            before = received_bytes(machines[1])
            reader = start(machines[1], "reader", address, way, stdout=subprocess.PIPE)
            found = json.loads(reader.communicate(timeout=120)[0].splitlines()[-1])
            crossed = received_bytes(machines[1]) - before
        finally:
            source.stdin.close()
            source.wait(60)
    assert (found["bad"], found["wrong"]) == ([], 0), found
    assert found["path"] == way
    assert crossed > BLOCKS * SLOT_BYTES


def main() -> None:
    from peer_member import Member, Reader, content

    from kvbm.tiers.peers.finder import Source

    if sys.argv[1] == "source":
        member = Member(sys.argv[2], BLOCKS, SLOT_BYTES, listen=f"{ADDRESSES[0]}:0")
        member.store(*range(BLOCKS))
        print(member.server.address, flush=True)
        sys.stdin.read()
        member.close()
        return
    reader = Reader([Source(sys.argv[2])], BLOCKS, SLOT_BYTES, elsewhere=False, ways=(sys.argv[3],))
    began = time.monotonic()
    operation = reader.read(range(BLOCKS))
    wrong = sum(reader.block(i) != content(i, SLOT_BYTES) for i in range(BLOCKS))
    print(json.dumps({"bad": operation.bad, "reason": operation.reason, "wrong": wrong,
                      "path": reader.store._peers[0].path, "seconds": time.monotonic() - began}))  # fmt: skip
    reader.close()


if __name__ == "__main__":
    main()
