"""A directory for the sockets between vLLM's processes. vLLM leaves them in /tmp when it ends; `kvbm serve` gives it a
directory of its own, which the server's process removes at its end."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import stat
import tempfile
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from kvbm.engines.vllm.transfer_config import on_command_line

VARIABLE = "VLLM_RPC_BASE_PATH"  # of vLLM
_PREFIX = "kvbm-vllm-"
_MAX_PATH = 107 - len("/01234567-89ab-cdef-0123-456789abcdef")  # bytes that the name of a socket leaves


def give_directory(environment: MutableMapping[str, str]) -> None:
    """Unless the user has chosen one, or the path would be too long for a socket."""
    longest = Path(tempfile.gettempdir()) / f"{_PREFIX}12345678"
    if VARIABLE not in environment and len(os.fsencode(longest)) <= _MAX_PATH:
        environment[VARIABLE] = tempfile.mkdtemp(prefix=_PREFIX)


def remove_directory_at_exit(argv: Sequence[str]) -> None:
    """In the process of `vllm serve` that the user has started."""
    if on_command_line(argv) is not None and multiprocessing.parent_process() is None:
        atexit.register(remove_directory)


def remove_directory(environment: Mapping[str, str] = os.environ) -> None:
    """The sockets of this user in a directory of ours, and the directory if nothing else is in it."""
    folder = Path(environment.get(VARIABLE, ""))
    if not folder.name.startswith(_PREFIX):
        return
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            found = path.lstat()
            if stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid():
                path.unlink()
        folder.rmdir()
