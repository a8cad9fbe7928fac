"""A connection between two processes of a job, opened by a token, and what goes over it.

What comes in is bytes from somebody who may be a stranger. What goes out is a message of a known
kind, or Stranger, Closed or Lost: nothing else may get past here.
"""

import contextlib
import dataclasses
import hmac
import json
import secrets
import selectors
import socket
import struct

from jax_dist import _notes
from jax_dist._exceptions import cut


@dataclasses.dataclass(frozen=True)
class Message:
    """What goes over a connection; those who send a kind of it define it, as a dataclass."""


def _dump(message: Message) -> bytes:
    """As it goes over a connection. Texts that are too long are cut in the middle.

    >>> @dataclasses.dataclass(frozen=True)
    ... class _Told(Message):
    ...     text: str
    >>> _load(_dump(_Told(text=100_000 * "x"))).text[32_768:32_800]
    ' ... [34464 characters left out]'
    """
    fields = dataclasses.asdict(message)
    for name, text in fields.items():
        if isinstance(text, str):
            fields[name] = cut(text)
    return json.dumps([_name(type(message)), fields]).encode("ascii")


def _load(data: bytes) -> Message | None:
    """None where it is no message of ours."""
    try:
        name, fields = _notes.decode(data)
    except (ValueError, TypeError):
        return None
    kind = next((kind for kind in Message.__subclasses__() if _name(kind) == name), None)
    return None if kind is None else _notes.read(fields, kind)


def _name(kind: type[Message]) -> str:
    return kind.__name__.removeprefix("_")


# --- A connection between two processes of a job, which carries small messages
#
# Both sides prove that they know the token of the job without sending it: each sends a random
# number and answers the other's with a hash of both, keyed by the token. So nobody else gets in,
# not even after listening to an earlier greeting. Later messages are neither secret nor signed.
#
# When a process ends, for whatever reason, its kernel closes the connection: the other side learns
# this immediately, where a heartbeat would take a while.


_NAME, _VERSION = b"jax_dist", b" 2\n"
_NONCE, _PROOF = 16, 32  # bytes
_LENGTH = struct.Struct("!I")
_LONGEST = 1 << 22  # bytes of a message
_LONGEST_FIRST = 1 << 12  # of one from somebody who is not known yet
_SENDING = 5.0  # seconds, for a process that does not read
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}  # seconds, and a count


class Stranger(Exception):
    """The other side is no process of this job."""


class Closed(Exception):
    """The process on the other side has ended."""


class Lost(Exception):
    """The network between the two has failed; the process may be alive."""


class Channel:
    """One end of the connection.

    Attributes:
      is_open: whether the other side has shown that it knows the token.
      origin: the other side's address, as in "10.0.0.7:41234".
    """

    def __init__(self, connection: socket.socket, token: bytes, *, is_host: bool):
        """`is_host`: whether the other side has come here, and not this one there."""
        self.is_open: bool = False
        self.origin: str = "nowhere"
        with contextlib.suppress(OSError):  # it has gone again
            host, port = connection.getpeername()[:2]
            self.origin = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._socket, self._token = connection, token
        self._own_role, self._other_role = (b"host", b"guest") if is_host else (b"guest", b"host")
        self._longest = _LONGEST_FIRST if is_host else _LONGEST
        self._own_nonce = secrets.token_bytes(_NONCE)
        self._other_nonce: bytes | None = None
        self._is_broken = False
        self._unread = b""
        self._unsent = b""  # until the other side has greeted
        connection.settimeout(_SENDING)
        with contextlib.suppress(OSError):  # it has gone again, as the first read will tell
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Some networks forget connections on which nothing is said.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if hasattr(socket, name):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._send(_NAME + _VERSION + self._own_nonce)

    def fileno(self) -> int:
        return self._socket.fileno()

    def trust(self) -> None:
        """The other side is who it should be, and may send long messages."""
        self._longest = _LONGEST

    def send(self, message: Message) -> bool:
        """Whether there was somebody to send to."""
        data = _dump(message)
        data = _LENGTH.pack(len(data)) + data
        if self._other_nonce is None:
            self._unsent += data
            return True
        return self._send(data)

    def greet(self, timeout: float) -> None:
        """Waits until the other side has shown that it knows the token; raises as `receive`."""
        while not self.is_open:
            self._read(timeout)
            self._take_greeting()

    def receive(self, timeout: float | None = None) -> Message:
        """The next message, waited for.

        Raises:
          TimeoutError: none came in time.
          Closed: and none will come.
          Lost: and none can come.
          Stranger: what came was something else.
        """
        while True:
            message = self._next()
            if message is not None:
                return message
            self._read(timeout)

    def received(self) -> list[Message]:
        """All messages that are here, once there is something to read; raises as `receive`."""
        try:
            self._read(None)
        except TimeoutError:  # it was nothing
            return []
        return list(iter(self._next, None))

    def close(self) -> None:
        self._socket.close()

    def _send(self, data: bytes) -> bool:
        if not self._is_broken:
            try:
                self._socket.sendall(data)
            except OSError:  # perhaps in the middle of a message: there is no way on
                self._is_broken = True
        return not self._is_broken

    def _read(self, timeout: float | None) -> None:
        """`timeout` None: there is something to read."""
        if timeout is not None:
            with selectors.DefaultSelector() as selector:
                selector.register(self, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise TimeoutError
        try:
            data = self._socket.recv(1 << 16)
        except ConnectionResetError:
            raise Closed from None
        except TimeoutError as error:
            if error.errno is not None:  # of the network: ETIMEDOUT
                raise Lost from None
            raise
        except OSError as error:
            raise Lost from error
        if not data:
            raise Closed
        self._unread += data

    def _next(self) -> Message | None:
        if not self._take_greeting() or len(self._unread) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._unread)
        if length > self._longest:
            raise Stranger(f"it announces a message of {length} bytes")
        end = _LENGTH.size + length
        if len(self._unread) < end:
            return None
        message = _load(self._unread[_LENGTH.size : end])
        self._unread = self._unread[end:]
        if message is None:
            raise Stranger("what it says is no message of a job")
        return message

    def _take_greeting(self) -> bool:
        """Whether all of it is here, and right."""
        if self._other_nonce is None:
            start = _NAME + _VERSION
            if self._unread[: len(_NAME)] != _NAME[: len(self._unread)]:
                raise Stranger("it is no process of jax_dist")
            if self._unread[: len(start)] != start[: len(self._unread)]:
                raise Stranger("it has another version of jax_dist")
            self._other_nonce = self._taken(len(start) + _NONCE)[len(start) :] or None
            if self._other_nonce is None:
                return False
            self._send(self._proof(self._own_role, self._own_nonce, self._other_nonce))
            self._send(self._unsent)
        if not self.is_open:
            proof = self._taken(_PROOF)
            if not proof:
                return False
            expected = self._proof(self._other_role, self._other_nonce, self._own_nonce)
            if not hmac.compare_digest(proof, expected):
                raise Stranger("it does not know the token of this job")
            self.is_open = True
        return True

    def _taken(self, size: int) -> bytes:
        """The next bytes, if all of them are here; else none."""
        if len(self._unread) < size:
            return b""
        data, self._unread = self._unread[:size], self._unread[size:]
        return data

    def _proof(self, role: bytes, own: bytes, other: bytes) -> bytes:
        return hmac.digest(self._token, role + own + other, "sha256")
