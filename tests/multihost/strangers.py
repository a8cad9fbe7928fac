"""Who may come to the port where processes meet, and what they say; and rank 0 among them."""

import contextlib
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from jobs import free_port

from jax_dist import errors
from jax_dist.multihost import rendezvous
from jax_dist.multihost.channel import Channel
from jax_dist.multihost.rendezvous import RendezvousPlan


def plans(*ranks: int, processes: int = 3, timeout: float = 2.0) -> list[RendezvousPlan]:
    """Of processes that meet at one address here."""
    address = f"127.0.0.1:{free_port()}"
    return [RendezvousPlan(address, address, processes, rank, timeout) for rank in ranks]


def meet(*plans: RendezvousPlan) -> list[str]:
    """What each gets: the ranks that it has channels to, or the error."""
    results = [""] * len(plans)

    def go(number: int, plan: RendezvousPlan) -> None:
        try:
            peers = rendezvous.meet(plan)
        except errors.JoinError as error:
            results[number] = str(error)
        else:
            results[number] = f"met {sorted(peers)}"
            for peer in peers.values():
                peer.channel.close()

    threads = [threading.Thread(target=go, args=each) for each in enumerate(plans)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@contextlib.contextmanager
def rank_0(plan: RendezvousPlan) -> Iterator[list[str]]:
    """Rank 0 waits while the block runs; afterwards, the list holds what it got."""
    result: list[str] = []
    thread = threading.Thread(target=lambda: result.extend(meet(plan)))
    thread.start()
    try:
        yield result
    finally:
        thread.join()


def connect(plan: RendezvousPlan) -> socket.socket:
    """To rank 0, as soon as it listens."""
    for _ in range(1000):
        with contextlib.suppress(OSError):
            return socket.create_connection(rendezvous.split(plan.address), timeout=10)
        time.sleep(0.01)
    raise AssertionError("rank 0 does not listen")


def _frame(message: object) -> bytes:
    text = message if isinstance(message, bytes) else json.dumps(message).encode()
    return struct.pack("!I", len(text)) + text


def _hello(**changes: object) -> bytes:
    hello = {"rank": 1, "processes": 2, "machine": "m", "pid": 1} | changes
    return _frame(["Hello", {key: value for key, value in hello.items() if value != "left out"}])


WITHOUT_A_GREETING = {
    "nothing": b"",
    "random bytes": random.Random(0).randbytes(100_000),
    "a browser": b"GET / HTTP/1.1\r\n\r\n",
    "an older version": b"jax_dist" + _frame({"is": "hello", "rank": 1, "processes": 2}),
    "half a greeting": b"jax_dist 2\n" + bytes(7),
    "no proof": b"jax_dist 2\n" + bytes(16) + bytes(32) + _hello(),
}

AFTER_A_GREETING = {  # by somebody who knows the protocol, and the token
    "nonsense": _frame(b"{nonsense"),
    "not text": _frame(b"\xff\xfe{}"),
    "deep": _frame(4000 * b"["),
    "a list": _frame([1]),
    "another message": _frame(["Leave", {}]),
    "no rank": _hello(rank="left out"),
    "a word": _hello(rank="1"),
    "true": _hello(rank=True),
    "none": _hello(rank=None),
    "rank 99": _hello(rank=99),
    "rank -5": _hello(rank=-5),
    "a huge rank": _hello(rank=10**30),
    "no processes": _hello(processes=0),
    "a long hello": _hello(machine=100_000 * "m"),
    "a gigabyte is announced": struct.pack("!I", 1 << 30),
}


def speak(connection: socket.socket, data: bytes, *, token: bytes, greets: bool) -> None:
    """Says it, after a proper greeting or without; who is cut off in the middle is."""
    if greets:
        Channel(connection, token, is_host=False).greet(10)
    with contextlib.suppress(OSError):
        connection.sendall(data)


def ranks_meet_beside(strangers: Sequence[bytes], *, token: bytes, greets: bool) -> bool:
    """Whether two ranks meet while others connect and say something else."""
    first, second = (replace(plan, token=token) for plan in plans(0, 1, processes=2, timeout=60))
    with rank_0(first) as result, contextlib.ExitStack() as stack:
        for data in strangers:
            speak(stack.enter_context(connect(first)), data, token=token, greets=greets)
        others = meet(second)
    return (result, others) == (["met [1]"], ["met [0]"])
