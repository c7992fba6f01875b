"""What one start of an engine leaves for the next: which models do not suit packing.

A note is a small file, named after the model and its packed layout. The leader writes it when packing has lost too many
blocks. With ``KVBM_PACK=auto``, a rank that finds the note does not pack. The name leaves out the weights: hashing them
takes seconds, which an engine without persistent tiers does not spend, and a superfluous note costs no block.

Notes lie in the directory of the disk tier, if there is one, because it outlives a container; else in the user's cache
(``XDG_CACHE_HOME``, ``~/.cache``). They are read from both. An engine that can write to neither has no notes. Ranks on
several machines need a common directory: otherwise those of the leader's machine alone find its notes.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvbm.config import Config
from kvbm.tiers import registry
from kvbm.tiers.directory import CacheRefused, distrust_file, open_private, private_directory, readable_name

FOLDER = "kvbm-unpackable"
_NAME = re.compile(r"kvbm-[a-z0-9.-]{1,80}")
_MAX_BYTES = 4096


class Note(msgspec.Struct, frozen=True):
    unpackable: int  # blocks that did not fit, until the note was written
    kept: int
    date: str = msgspec.field(default_factory=lambda: time.strftime("%Y-%m-%d"))


def note_name(model: str, packed_layout: str) -> str:
    return readable_name(f"{model}\0{packed_layout}".encode(), model)


def folders(config: Config) -> list[Path]:
    roots = [root for tier in registry.wanted(config) if (root := tier.cache_root(config)) is not None]
    with contextlib.suppress(RuntimeError):  # no home
        cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
        roots.append((cache if cache.is_absolute() else Path.home() / ".cache") / "kvbm")
    return [root / FOLDER for root in roots]


def find_note(config: Config, name: str) -> Path | None:
    return next((path for path, _ in notes(config) if path.name == name), None)


def notes(config: Config) -> Iterator[tuple[Path, Note]]:
    """The notes of this user. Skips what cannot be read, or could have been planted."""
    for folder in folders(config):
        with contextlib.suppress(OSError):
            directory = open_private(folder)
            try:
                for name in sorted(filter(_NAME.fullmatch, os.listdir(directory))):
                    with contextlib.suppress(OSError, ValueError, RecursionError):
                        yield folder / name, _read(name, directory)
            finally:
                os.close(directory)


def _read(name: str, directory: int) -> Note:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    with os.fdopen(fd, "rb") as file:
        if why := distrust_file(os.fstat(fd)):
            raise CacheRefused(f"{name} {why}")
        return msgspec.json.decode(file.read(_MAX_BYTES), type=Note)


def write_note(config: Config, name: str, note: Note) -> Path:
    """Write to the first folder that takes it. Raises the error of the last one when none does."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a note")
    problem: OSError = FileNotFoundError("there is neither a disk tier nor a home directory")
    for folder in folders(config):
        new = folder / f".{name}.{os.getpid()}"
        try:
            private_directory(folder, "XDG_CACHE_HOME")
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(msgspec.json.encode(note) + b"\n")
            os.replace(new, folder / name)
            return folder / name
        except OSError as error:
            problem = error
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
    raise problem
