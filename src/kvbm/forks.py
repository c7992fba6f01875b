"""Sockets and locks that belong to one process: a child made by fork closes its copies at once.

A child that keeps a copy of a listening socket keeps the port taken after the death of its parent, and clients wait for
an answer that never comes. Closing a copy leaves the parent's socket as it is; a shutdown would end both. So it is with
the file of a lock: closing a copy does not unlock it, and a child that keeps one keeps the lock.
"""

from __future__ import annotations

import io
import os
import socket
import weakref
from typing import TypeVar

_T = TypeVar("_T", socket.socket, io.FileIO)
_opened: weakref.WeakSet[socket.socket | io.FileIO] = weakref.WeakSet()


def close_in_children(opened: _T) -> _T:
    _opened.add(opened)
    return opened


def _close() -> None:
    for copy in list(_opened):
        copy.close()


os.register_at_fork(after_in_child=_close)
