"""The host tier's memory: there when asked for, refused when it cannot be had, given back."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvbm.tiers.host import numa
from kvbm.tiers.host import slab as host
from kvbm.tiers.host.slab import HostMemoryError, HostSlab, available_memory


def resident() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_all_memory_is_there_before_the_first_block_comes_and_goes_back_at_the_end():
    before = resident()
    slab = HostSlab(64 << 20).carve(16, 4 << 20)
    assert resident() - before > 60 << 20
    slab.close()
    assert resident() - before < 30 << 20


def test_the_memory_can_be_written_to_its_last_byte():
    slab = HostSlab(5 * 4096).carve(5, 4096)
    ctypes.memset(slab.address, 7, 5 * 4096)
    assert ctypes.string_at(slab.address + 5 * 4096 - 1, 1) == b"\x07"
    slab.close()


def test_more_than_the_machine_has_is_refused_with_the_figure_that_would_fit():
    with pytest.raises(HostMemoryError) as refused:
        HostSlab(1 << 60)
    text = str(refused.value)
    fits = float(re.search(r"up to ([\d.]+) GB a rank would fit", text)[1])
    assert "DYN_KVBM_CPU_CACHE_GB" in text
    assert 0 < fits <= available_memory() / 1e9


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Makes control groups: a folder, and what is in its files."""
    monkeypatch.setattr(host, "_GROUPS", tmp_path)
    read = Path.read_text

    def make(entries, **folders):
        monkeypatch.setattr(Path, "read_text", lambda path: entries if path.name == "cgroup" else read(path))
        for name, files in folders.items():
            folder = tmp_path / name.replace("_", "/")
            folder.mkdir(parents=True, exist_ok=True)
            for file, text in files.items():
                (folder / f"memory.{file}").write_text(f"{text}\n")

    return make


def test_a_control_group_counts_as_the_machine(groups):
    groups("0::/a\n", a={"max": 1_000_000_000, "current": 400_000_000})
    assert available_memory() == 600_000_000
    with pytest.raises(HostMemoryError, match=r"0\.57 GB can be had"):
        HostSlab(590_000_000)


def test_what_a_control_group_has_cached_of_files_can_be_had(groups):
    """An engine has just read its weights: in a container they count as memory in use."""
    lines = "anon 100000000\nshmem 50000000\nactive_file 200000000\ninactive_file 500000000"
    groups("0::/a\n", a={"max": 1_000_000_000, "current": 900_000_000, "stat": lines})
    assert available_memory() == 800_000_000


def test_the_tightest_of_the_control_groups_around_it_counts(groups):
    outer = {"max": 700_000_000, "current": 200_000_000}
    groups("0::/a/b\n", a=outer, a_b={"max": "max", "current": 200_000_000})
    assert available_memory() == 500_000_000
    groups("0::/a/not/to/be/seen/from/here\n")
    assert available_memory() == 500_000_000


def test_control_groups_of_the_first_version_count_too(groups):
    files = {"limit_in_bytes": 900_000_000, "usage_in_bytes": 500_000_000, "stat": "total_inactive_file 100000000"}
    groups("5:cpu,cpuacct:/x\n4:memory:/docker/1\n0::/\n", memory=files)
    assert available_memory() == 500_000_000


def test_without_a_limit_it_is_what_the_machine_has(groups):
    groups("0::/a\n", a={"max": "max", "current": 1})
    assert available_memory() > 1_000_000_000


def test_slots_that_do_not_fit_are_an_error():
    slab = HostSlab(8192)
    with pytest.raises(ValueError, match="3 slots of 4096 bytes do not fit into 8192 bytes"):
        slab.carve(3, 4096)
    slab.close()


def test_progress_is_logged_while_a_large_slab_fills(monkeypatch, caplog):
    clock = iter(range(0, 1000, 3))
    monkeypatch.setattr(host, "_PIECE", 2 << 20)
    monkeypatch.setattr(host.time, "monotonic", lambda: next(clock))
    with caplog.at_level(logging.INFO, "kvbm"):
        HostSlab(16 << 20).carve(1, 4096).close()
    lines = [record.getMessage() for record in caplog.records]
    assert any(re.match(r"host tier: 0\.0 of 0\.0 GB ready \(\d+ s\)", line) for line in lines)
    assert lines[-1].startswith("host tier: 0.02 GB ready in")


class _SlowLibc:
    """Every call takes until ``go``."""

    def __init__(self):
        self.calls, self.began, self.go = [], threading.Event(), threading.Event()
        self.memset = lambda *_: None

        def madvise(address, size, advice):
            self.calls.append(address)
            self.began.set()
            assert self.go.wait(60)
            return 0

        self.madvise = madvise


def test_a_slab_that_still_fills_is_closed_soon(monkeypatch):
    libc = _SlowLibc()
    monkeypatch.setattr(host, "_PIECE", 2 << 20)
    monkeypatch.setattr(host.ctypes, "CDLL", lambda *_, **__: libc)
    slab = HostSlab(256 << 20)
    assert libc.began.wait(60)
    closing = threading.Thread(target=slab.close)
    closing.start()
    assert slab._is_stopping.wait(60)
    libc.go.set()
    closing.join(60)
    assert len(libc.calls) <= len(os.sched_getaffinity(0))  # a piece for each thread, of 128


def test_a_process_ends_while_its_slab_still_fills():
    """The interpreter waits for the threads of a ThreadPoolExecutor at exit, and for theirs only."""
    script = "from kvbm.tiers.host import slab\nfrom test_host import _SlowLibc\nlibc = _SlowLibc()\n"
    script += "slab.ctypes.CDLL = lambda *_, **__: libc\nkept = slab.HostSlab(4 << 20)\nassert libc.began.wait(60)\n"
    paths = os.pathsep.join([str(Path(host.__file__).parents[3]), str(Path(__file__).parent)])
    subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": paths}, timeout=50, check=True)


def test_pinning_covers_every_slot_once_in_pieces_of_whole_slots(monkeypatch):
    monkeypatch.setattr(host, "_PIN_PIECE", 10_000)
    slab = HostSlab(7 * 4096).carve(7, 4096)
    pinned, unpinned = [], []
    slab.pin(lambda address, size: pinned.append((address - slab.address, size)), unpinned.append)
    assert pinned == [(0, 8192), (8192, 8192), (16384, 8192), (24576, 4096)]
    first = slab.address
    slab.close()
    assert [address - first for address in unpinned] == [0, 8192, 16384, 24576]


def test_a_machine_with_one_node_needs_no_placement(tmp_path, monkeypatch):
    (tmp_path / "node0").mkdir()
    monkeypatch.setattr(numa, "_NODES", tmp_path)
    assert numa.node_of_pci("0000:17:00.0") is None


def test_a_mapping_can_be_asked_for_from_a_node():
    slab = HostSlab(4 << 20, node=0)
    slab.carve(1, 4096).close()
    assert numa.prefer(0, 4096, 0) is False  # nothing is mapped there: refused, not fatal
