"""Sockets that belong to one process: a child made by fork closes its copies at once.

A child that keeps a copy of a listening socket keeps the port taken after the death of its parent, and clients wait for
an answer that never comes. Closing a copy leaves the parent's socket as it is; a shutdown would end both.
"""

from __future__ import annotations

import os
import socket
import weakref

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_children(opened: socket.socket) -> socket.socket:
    _sockets.add(opened)
    return opened


def _close() -> None:
    for copy in list(_sockets):
        copy.close()


os.register_at_fork(after_in_child=_close)
