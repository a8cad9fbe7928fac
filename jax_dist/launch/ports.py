"""A port for the coordinator."""

import contextlib
import socket
import sys
from collections.abc import Iterator

LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port of the loopback interface that no other program gets as long as the block runs.

    On Linux it is bound here, though nobody listens, and so the system gives it to nobody. Rank 0,
    which is told, can bind it as well, since gRPC asks for SO_REUSEADDR, as servers do. On other
    systems the port was free a moment ago, which is all that can be said.

    >>> with reserved_port() as port:
    ...     1024 < port < 65536
    True
    """
    with socket.socket() as holder:
        if sys.platform == "linux":
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((LOOPBACK, 0))
        port = holder.getsockname()[1]
        if sys.platform != "linux":
            holder.close()
        yield port
