"""A connection between two processes of a job, which carries small messages.

When a process ends, however it ends, its kernel closes the connection: the other side learns it at
once, where a heartbeat takes its time.
"""

import json
import socket
import struct
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]  # what JSON can say; "is" tells the kind

_GREETING = b"jax_dist"  # comes first, so that a stranger is known
_LENGTH = struct.Struct("!I")
_LONGEST = 1 << 24  # bytes; who announces more talks of something else
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}  # seconds, and a count


class Stranger(Exception):
    """The other side is no process of ours."""


class Closed(Exception):
    """The process on the other side has ended."""


class Lost(Exception):
    """The network between the two has failed; the process may be alive."""


class Line:
    """One end of the connection."""

    def __init__(self, connection: socket.socket):
        self._socket = connection
        self._unread = b""
        self._greeted = False
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Some networks forget connections on which nothing is said.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._to_say = _GREETING

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> bool:
        """Whether there was somebody to send to."""
        text = json.dumps(message).encode()
        data, self._to_say = self._to_say + _LENGTH.pack(len(text)) + text, b""
        try:
            self._socket.sendall(data)
        except OSError:
            return False
        return True

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
        self._read(None)
        return list(iter(self._next, None))

    def close(self) -> None:
        self._socket.close()

    def _read(self, timeout: float | None) -> None:
        self._socket.settimeout(timeout)
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
        finally:
            if self._socket.fileno() >= 0:
                self._socket.settimeout(None)  # for `send`
        if not data:
            raise Closed
        self._unread += data

    def _next(self) -> Message | None:
        if not self._greeted:
            if not self._unread.startswith(_GREETING[: len(self._unread)]):
                raise Stranger
            if len(self._unread) < len(_GREETING):
                return None
            self._unread, self._greeted = self._unread[len(_GREETING) :], True
        if len(self._unread) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._unread)
        if length > _LONGEST:
            raise Stranger
        end = _LENGTH.size + length
        if len(self._unread) < end:
            return None
        text, self._unread = self._unread[_LENGTH.size : end], self._unread[end:]
        return json.loads(text)
