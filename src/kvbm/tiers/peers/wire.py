"""The conversation between an engine and the server of another one.

On one machine it runs over a Unix socket, whose both ends compare the user of the other. Over TCP both ends prove that
they know the shared secret before anything else is said, and every frame from then on is encrypted and authenticated
with AES-GCM under keys of this connection (X25519, so a secret that leaks later opens no recorded connection). A frame
is bound to its place in the conversation: one that is changed, left out, repeated or from another connection does not
decrypt. A frame with a part of a block is also bound to the key of the block, the fingerprint of the cache and the
generation of the slot: to decrypt it is to verify it.

Messages are msgpack, never pickle. All frames have a bound.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import select
import socket
import struct
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import msgspec

from kvbm.core.keys import KEY_BYTES, Key

VERSION = 1
MAX_FRAME_BYTES = 8 << 20
PIECE_BYTES = 512 << 10  # of a block that is encrypted at once: ciphertext stays in the processor's cache
TAG_BYTES = 16
SLICE_SECONDS = 0.1  # how often a transfer that waits looks whether it was given up
_FIRST_FRAME_BYTES = 4096  # before the other end has proved anything
_LENGTH = struct.Struct("<I")
_TIME = struct.Struct("@ll")


class PeerError(Exception):
    """The other end is gone, late, not authentic or refuses. ``kind`` goes into the counts."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=True):
    version: int
    nonce: bytes
    public: bytes


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag=True):
    nonce: bytes
    public: bytes
    proof: bytes


class Proof(msgspec.Struct, frozen=True, array_like=True, tag=True):
    proof: bytes


class Who(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The client's first message: its cache. A cache that differs is answered with :class:`Refused`."""

    version: int
    fingerprint: dict[str, str | int]
    generation: str = ""  # of its own server, if it has one


class About(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The server's answer. Over a Unix socket the files follow: the board, then each rank's slab."""

    member: str
    machine: str
    generation: str
    path: str  # of its Unix socket
    slots: int
    slot_bytes: list[int]  # by rank
    orphan: bool = False  # its engine is dead
    nixl: bool = False  # it can push


class Ask(msgspec.Struct, frozen=True, array_like=True, tag=True):
    keys: bytes


class Answer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    found: bytes  # a byte for each key, 1 if the block is there


class Lease(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The client copies these blocks from the slab that it maps."""

    rank: int
    keys: bytes


class Leased(msgspec.Struct, frozen=True, array_like=True, tag=True):
    slots: list[int]  # -1: not there
    generations: list[int]
    sums: list[int]


class Read(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The server sends these blocks: a :class:`Block` for each, then its pieces, and one more at the end."""

    rank: int
    keys: bytes


class Block(msgspec.Struct, frozen=True, array_like=True, tag=True):
    generation: int  # 0: this block is not there, and no piece follows
    is_last_good: bool = True  # False: the block before was withdrawn while it was sent


class Push(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The server writes these blocks to the client's memory, over NIXL."""

    rank: int
    keys: bytes
    addresses: list[int]
    metadata: bytes  # of the client's agent


class Pushed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    sums: list[int]  # 0: the block is not there, or was withdrawn while it was sent


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    kind: str
    why: str


class Dismiss(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A successor takes over from a server without an engine. The answer has one byte."""

    member: str
    fingerprint: str
    any_engine: bool  # its memory is needed, whatever it holds


class Probe(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`kvbm doctor` asks who the server is. The answer is :class:`Facts`."""


class Facts(msgspec.Struct, frozen=True, array_like=True, tag=True):
    release: str  # of KVBM
    fingerprint: dict[str, str | int]
    about: About


class Changes(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The client has the server's filter of keys as of this change, see :class:`kvbm.core.key_filter.Update`."""

    epoch: int
    number: int


class Filter(msgspec.Struct, frozen=True, array_like=True, tag=True):
    update: bytes  # msgpack of an Update, or of nil when nothing has changed


Message = (
    Hello | Challenge | Proof | Who | About | Ask | Answer | Lease | Leased | Read | Block | Push | Pushed | Refused
    | Dismiss | Changes | Filter | Probe | Facts
)  # fmt: skip
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Message)
_encode = msgspec.msgpack.Encoder().encode


def digest(fingerprint: Mapping[str, str | int]) -> str:
    """Names a cache: equal digests mean exchangeable bytes on every rank."""
    text = msgspec.json.encode(dict(sorted(fingerprint.items())))
    return hashlib.sha256(b"kvbm peers\0" + text).hexdigest()[:32]


def join_keys(keys: list[Key]) -> bytes:
    return b"".join(keys)


def split_keys(joined: bytes) -> list[Key]:
    if len(joined) % KEY_BYTES:
        raise PeerError("malformed", "a list of keys has a wrong length")
    return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]


def bound_to(key: Key, fingerprint: str, rank: int, generation: int) -> bytes:
    """What a block is encrypted with: it decrypts as this block of this cache only."""
    return b"%s|%s|%d|%d" % (key, fingerprint.encode(), rank, generation)


class Channel:
    """One connection. One thread at a time uses it.

    ``seconds``: without progress for so long, the connection is over. ``is_abandoned`` is asked while it waits. After
    any error the caller closes the connection: nothing that comes later is read.
    """

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self.socket = connection
        self.seconds = seconds
        self.is_abandoned: Callable[[], bool] | None = None
        self._sealer: Any = None
        self._opener: Any = None
        self._sent = self._received = 0
        self._scratch = bytearray(PIECE_BYTES + TAG_BYTES)
        connection.settimeout(None)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, _TIME.pack(0, int(SLICE_SECONDS * 1e6)))

    def encrypt(self, sending: bytes, receiving: bytes) -> None:
        aesgcm = _aesgcm()
        self._sealer, self._opener = aesgcm(sending), aesgcm(receiving)

    # -- messages -----------------------------------------------------------------------------------------------------

    def wait(self, seconds: float) -> bool:
        """Whether something comes within that time; the end of the connection counts."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def send(self, message: Any) -> None:
        data = _encode(message)
        if self._sealer is not None:
            data = self._sealer.encrypt(self._next_sent(), data, None)
        self._send_all(_LENGTH.pack(len(data)) + data)

    def receive(self, *kinds: type) -> Any:
        """The next message. Raises PeerError when it is of no kind in ``kinds``, and for a :class:`Refused`."""
        head = bytearray(_LENGTH.size)
        self._receive_into(memoryview(head))
        (length,) = _LENGTH.unpack(head)
        is_known = self._opener is not None or self.socket.family == socket.AF_UNIX
        if length > (MAX_FRAME_BYTES if is_known else _FIRST_FRAME_BYTES):
            raise PeerError("malformed", f"a frame of {length} bytes")
        data = bytearray(length)
        self._receive_into(memoryview(data))
        if self._opener is not None:
            data = self._open(bytes(data), None)
        try:
            message = _decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise PeerError("malformed", f"a message that is not understood: {error}") from None
        if isinstance(message, Refused) and Refused not in kinds:
            raise PeerError(message.kind, message.why)
        if not isinstance(message, kinds):
            raise PeerError("malformed", f"a message {type(message).__name__} that was not expected")
        return message

    # -- blocks -------------------------------------------------------------------------------------------------------

    def send_block(self, block: memoryview, bound: bytes) -> None:
        scratch = memoryview(self._scratch)
        for at in range(0, len(block), PIECE_BYTES):
            piece = block[at : at + PIECE_BYTES]
            sealed = scratch[: len(piece) + TAG_BYTES]
            if writes_into():
                self._sealer.encrypt_into(self._next_sent(), piece, bound, sealed)
            else:
                sealed = self._sealer.encrypt(self._next_sent(), piece, bound)
            self._send_all(sealed)

    def receive_block(self, target: memoryview, bound: bytes) -> None:
        """Raises PeerError when it is not the block that ``bound`` names; ``target`` holds garbage then."""
        scratch = memoryview(self._scratch)
        for at in range(0, len(target), PIECE_BYTES):
            piece = target[at : at + PIECE_BYTES]
            sealed = scratch[: len(piece) + TAG_BYTES]
            self._receive_into(sealed)
            try:
                if writes_into():
                    self._opener.decrypt_into(self._next_received(), sealed, bound, piece)
                else:
                    piece[:] = self._opener.decrypt(self._next_received(), sealed, bound)
            except Exception:
                raise PeerError("damaged", "a block does not decrypt: damaged, replayed or of another cache") from None

    # -- bytes --------------------------------------------------------------------------------------------------------

    def _open(self, data: bytes, bound: bytes | None) -> Any:
        try:
            return self._opener.decrypt(self._next_received(), data, bound)
        except Exception:
            raise PeerError("damaged", "a frame does not decrypt: damaged, replayed or out of order") from None

    def _next_sent(self) -> bytes:
        self._sent += 1
        return self._sent.to_bytes(12, "little")

    def _next_received(self) -> bytes:
        self._received += 1
        return self._received.to_bytes(12, "little")

    def _receive_into(self, view: memoryview) -> None:
        at, silent = 0, 0.0
        while at < len(view):
            try:
                count = self.socket.recv_into(view[at:], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                count = -1
            except OSError as error:
                raise PeerError("gone", f"the connection is gone: {error.strerror}") from None
            if count == 0:
                raise PeerError("gone", "the connection was closed")
            # Counted in slices, not by the clock: a process that gets no turn must not take the peer for silent.
            silent = 0.0 if count > 0 else silent + SLICE_SECONDS
            at += max(count, 0)
            if silent > self.seconds:
                raise PeerError("late", f"no answer for {self.seconds:g} s")
            if at < len(view):
                self._look_up()

    def _send_all(self, data: bytes | memoryview) -> None:
        view, silent = memoryview(data), 0.0
        while view:
            try:
                view = view[self.socket.send(view, socket.MSG_NOSIGNAL) :]
                silent = 0.0
            except BlockingIOError:
                silent += SLICE_SECONDS
                if silent > self.seconds:
                    raise PeerError("late", f"nothing taken for {self.seconds:g} s") from None
                self._look_up()
            except OSError as error:
                raise PeerError("gone", f"the connection is gone: {error.strerror}") from None

    def _look_up(self) -> None:
        if self.is_abandoned is not None and self.is_abandoned():
            raise PeerError("abandoned", "the load was given up")

    def close(self) -> None:
        self.socket.close()


# -- authentication ---------------------------------------------------------------------------------------------------


def authenticate_client(channel: Channel, secret: str) -> None:
    """Prove the secret and have it proved; encrypt from then on. Raises PeerError."""
    private, public = _key_pair()
    nonce = os.urandom(32)
    channel.send(Hello(VERSION, nonce, public))
    answer: Challenge = channel.receive(Challenge)
    shared, transcript = _agree(private, answer.public, secret, nonce, public, answer.nonce, answer.public)
    if not hmac.compare_digest(answer.proof, _prove(secret, b"server", transcript)):
        raise PeerError("secret", "the other end does not know the secret: set the same KVBM_PEER_SECRET on both")
    channel.send(Proof(_prove(secret, b"client", transcript)))
    channel.encrypt(_derive(shared, transcript, b"to server"), _derive(shared, transcript, b"to client"))


def authenticate_server(channel: Channel, secret: str) -> None:
    """The other end's counterpart. A recorded conversation fails here: its proof is for another nonce."""
    hello: Hello = channel.receive(Hello)
    if hello.version != VERSION:
        raise PeerError("version", f"the client speaks version {hello.version}, this release {VERSION}")
    private, public = _key_pair()
    nonce = os.urandom(32)
    shared, transcript = _agree(private, hello.public, secret, hello.nonce, hello.public, nonce, public)
    channel.send(Challenge(nonce, public, _prove(secret, b"server", transcript)))
    proof: Proof = channel.receive(Proof)
    if not hmac.compare_digest(proof.proof, _prove(secret, b"client", transcript)):
        raise PeerError("secret", "a client does not know the secret, or repeats what it has recorded")
    channel.encrypt(_derive(shared, transcript, b"to client"), _derive(shared, transcript, b"to server"))


def _agree(private: Any, other: bytes, secret: str, *said: bytes) -> tuple[bytes, bytes]:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

    try:
        shared = private.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError as error:
        raise PeerError("malformed", f"no public key: {error}") from None
    transcript = hashlib.sha256(b"kvbm peers %d\0" % VERSION + b"".join(hashlib.sha256(s).digest() for s in said))
    return hmac.digest(_stretch(secret), shared, "sha256"), transcript.digest()


def _key_pair() -> tuple[Any, bytes]:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    private = X25519PrivateKey.generate()
    return private, private.public_key().public_bytes_raw()


def _prove(secret: str, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(_stretch(secret), b"proof " + role + transcript, "sha256")


def _derive(shared: bytes, transcript: bytes, purpose: bytes) -> bytes:
    return hmac.digest(shared, b"key " + purpose + transcript, "sha256")[:16]


@cache
def _stretch(secret: str) -> bytes:
    """Takes 40 ms once, so that guessing secrets against a recorded proof is slow."""
    return hashlib.scrypt(secret.encode(), salt=b"kvbm peers", n=1 << 14, r=8, p=1, dklen=32)


@cache
def _aesgcm() -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM


@cache
def writes_into() -> bool:
    """Whether this release of cryptography encrypts into memory of the caller; older ones copy once more."""
    return hasattr(_aesgcm(), "encrypt_into")
