"""The coordinator's port: nobody takes it between the choice and its use."""

import socket
import sys

import pytest

from jax_dist.launch.ranks import reserved_port


def _bind(port: int, *options: int) -> socket.socket:
    listener = socket.socket()
    for option in options:
        listener.setsockopt(socket.SOL_SOCKET, option, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is chosen, not held")
def test_only_who_means_this_port_gets_it():
    with reserved_port() as port:
        with pytest.raises(OSError, match="already in use"):
            _bind(port)
        with _bind(port, socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # as gRPC does
            pass
        with _bind(port, socket.SO_REUSEADDR):  # as most servers do
            pass


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is chosen, not held")
def test_the_system_gives_it_to_nobody():
    with reserved_port() as port:
        others = [_bind(0, socket.SO_REUSEADDR, socket.SO_REUSEPORT) for _ in range(200)]
        given = [other.getsockname()[1] for other in others]
        for other in others:
            other.close()

    assert port not in given


def test_two_launchers_get_two_ports():
    with reserved_port() as one, reserved_port() as two:
        assert one != two
