"""Authentication and encryption of the channel over TCP: CurveZMQ, with keys that both ends derive from one secret.

The leader's key pair comes from the secret alone. CurveZMQ never sends the public key of the end that listens, and an
end that does not know it cannot complete the handshake; nor can an end that listens without the private key. So a
completed handshake proves the secret in both directions, and every frame after it is encrypted and authenticated with
keys of this connection. scrypt makes guessing a weak secret from recorded traffic slow.
"""

from __future__ import annotations

import hashlib

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

SECRET_SETTING = "KVBM_PEER_SECRET_FILE"
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class Curve:
    """The keys of one channel, and the handshakes that failed for want of them."""

    def __init__(self, secret: str) -> None:
        derived = hashlib.scrypt(secret.encode(), salt=b"kvbm channel 1", n=1 << 14, r=8, p=1, dklen=32)
        self._private = z85.encode(derived)
        self._public = zmq.curve_public(self._private)
        self._monitors: list[zmq.Socket[bytes]] = []
        self.failures = 0  # handshakes

    def protect(self, socket: zmq.Socket[bytes], listens: bool) -> None:
        """Before the socket is bound or connected."""
        if listens:
            socket.curve_server = True
            socket.curve_secretkey = self._private
        else:
            socket.curve_serverkey = self._public
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        self._monitors.append(socket.get_monitor_socket(_FAILED))

    def note_failures(self) -> bool:
        """Whether handshakes have failed since the last call. Never waits."""
        before = self.failures
        for monitor in self._monitors:
            while int(monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN and self.failures < before + 1024:
                recv_monitor_message(monitor, zmq.NOBLOCK)
                self.failures += 1
        return self.failures > before
