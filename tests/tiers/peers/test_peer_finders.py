"""The finder of neighbours and of a list."""

from __future__ import annotations

import threading
from pathlib import Path

from kvbm.core.catalog import Hint
from kvbm.tiers.peers.finder import MAX_CANDIDATES, Source
from kvbm.tiers.peers.finders import StaticFinder


def test_every_thread_sees_the_neighbours_from_the_first_question_on(tmp_path, monkeypatch):
    (tmp_path / "1234.sock").touch()
    looking, glob = threading.Barrier(2, timeout=60), Path.glob

    def slow(path, pattern):
        looking.wait()  # the other thread asks now
        return glob(path, pattern)

    monkeypatch.setattr(Path, "glob", slow)
    finder, found = StaticFinder([], tmp_path), []
    first = threading.Thread(target=lambda: found.append(finder.candidates([], 0, None)))
    first.start()
    second = threading.Thread(target=lambda: found.append(finder.candidates([], 0, None)))
    looking.wait()
    second.start()
    for thread in (first, second):
        thread.join(60)
    assert found == [[Source(f"unix:{tmp_path / '1234.sock'}")]] * 2


def test_a_hint_comes_first_and_this_engine_never(tmp_path):
    finder = StaticFinder(["10.0.0.1:1", "10.0.0.2:1"], tmp_path)
    finder.announce(Source("10.0.0.1:1", generation="1234"), ())
    (tmp_path / "1234.sock").touch()
    (tmp_path / "5678.sock").touch()
    addresses = [source.address for source in finder.candidates([], 0, Hint("10.0.0.9:1"))]
    assert addresses == ["10.0.0.9:1", f"unix:{tmp_path / '5678.sock'}", "10.0.0.2:1"]
    many = StaticFinder([f"10.0.0.{i}:1" for i in range(9)], tmp_path)
    assert len(many.candidates([], 0, None)) == MAX_CANDIDATES
