"""From start to start: a model whose blocks do not fit packed slots is not packed again, and no start fails over it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from kvbm import config as settings
from kvbm.core.counts import Counts
from kvbm.plans import Hello
from kvbm.runtime.packing_notes import FOLDER, Note, find_note, note_name, notes, write_note
from kvbm.runtime.unpackable import Unpackable

NAME = note_name("org/Some-Model", "4*bfloat16[1:8] packed 2:4096:128:79")


def config(**values):
    return settings.load(extra=values, environ={}, files=[])


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvbm" / FOLDER


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """Neither folder can be made, for root too."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    return config(disk_cache_gb=1, disk_cache_dir=str(tmp_path / "file"))


def test_a_note_is_found_by_the_next_start_and_by_no_other_model(home):
    assert find_note(config(), NAME) is None
    path = write_note(config(), NAME, Note(200, 300))
    assert path == home / NAME
    assert "some-model" in NAME
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert find_note(config(), NAME) == path
    assert find_note(config(), note_name("org/Some-Model", "4*bfloat16[1:8] packed 3:4096:128:79")) is None
    assert find_note(config(), note_name("org/other", "4*bfloat16[1:8] packed 2:4096:128:79")) is None
    write_note(config(), NAME, Note(400, 300))
    assert [(found, note.unpackable, note.kept) for found, note in notes(config())] == [(path, 400, 300)]
    assert os.listdir(home) == [NAME]


def test_a_disk_tier_keeps_the_note_because_it_outlives_a_container(home, tmp_path):
    disk = config(disk_cache_gb=1, disk_cache_dir=str(tmp_path / "disk"))
    path = write_note(disk, NAME, Note(1, 2))
    assert path == tmp_path / "disk" / FOLDER / NAME
    assert find_note(disk, NAME) == path
    assert find_note(config(), NAME) is None
    assert find_note(disk, write_note(config(), "kvbm-other", Note(1, 2)).name) == home / "kvbm-other"


def test_a_disk_that_takes_no_note_leaves_the_users_cache(home, tmp_path):
    (tmp_path / "file").touch()
    disk = config(disk_cache_gb=1, disk_cache_dir=str(tmp_path / "file"))
    assert write_note(disk, NAME, Note(1, 2)) == home / NAME


@pytest.mark.parametrize("name", ["../kvbm-up", "kvbm-a/b", "other", ""])
def test_a_rank_cannot_name_another_file(home, name):
    with pytest.raises(ValueError, match="not the name of a note"):
        write_note(config(), name, Note(1, 2))


GARBAGE = {
    "garbage": b"\xff{",
    "no text": b'{"unpackable":1,"kept":1,"date":"\xff"}',
    "too deep": b'{"x":' + b"[" * 4000,
}


@pytest.mark.parametrize("kind", [*GARBAGE, "link", "fifo", "open"])
def test_what_may_be_planted_or_is_no_note_is_not_found(home, tmp_path, kind):
    path = write_note(config(), NAME, Note(1, 2))
    if kind in GARBAGE:
        path.write_bytes(GARBAGE[kind])
    elif kind == "open":
        path.chmod(0o666)
    else:
        path.rename(tmp_path / "elsewhere")
        os.mkfifo(path, 0o600) if kind == "fifo" else path.symlink_to(tmp_path / "elsewhere")
    assert find_note(config(), NAME) is None


def over_the_share(config, *names):
    counts = Counts()
    unpackable = Unpackable(counts)
    unpackable.remember(config, [Hello(rank, 1, "", [], packing_note=name) for rank, name in enumerate(names)])
    for _ in range(3):
        unpackable.add(60)
    if unpackable.writing is not None:
        unpackable.writing.result(60)
    return counts


def test_the_leader_notes_it_once_when_more_than_a_share_does_not_fit(home, caplog):
    caplog.set_level("WARNING", "kvbm")
    counts = over_the_share(config(), NAME, NAME)
    assert counts.unpackable_blocks == 180
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("60 of 60 blocks do not fit a packed slot and are not kept, so what follows them in their")
    assert first.endswith("Restart it with KVBM_PACK=off.")
    assert second == f"With KVBM_PACK=auto the next start does not pack blocks of this model; see {home / NAME}"
    ((_, note),) = notes(config())
    assert (note.unpackable, note.kept) == (60, 0)


def test_few_blocks_that_do_not_fit_leave_no_note(home):
    counts = Counts()
    unpackable = Unpackable(counts)
    unpackable.remember(config(), [Hello(0, 1, "", [], packing_note=NAME)])
    unpackable.add(10)  # of the first ten blocks: these are too few to tell
    counts.offloaded_blocks = 500_000
    unpackable.add(90)
    assert unpackable.writing is None
    assert not home.exists()


def test_without_a_directory_to_write_to_there_is_a_sentence_and_no_error(nowhere, caplog):
    caplog.set_level("WARNING", "kvbm")
    over_the_share(nowhere, NAME)
    assert (
        caplog.records[-1].getMessage().startswith("The next start packs blocks again, because KVBM cannot note that")
    )
    assert find_note(nowhere, NAME) is None


def test_without_a_home_there_is_no_note(monkeypatch, caplog):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert find_note(config(), NAME) is None
    over_the_share(config(), NAME)
    assert "cannot note that" in caplog.text
