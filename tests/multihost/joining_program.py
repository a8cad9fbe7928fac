"""One rank of a job: joins the others and says who it is, and where its job listens."""

import os
import pathlib
import socket
import struct

import jax
from jobs import say

from jax_dist import multihost


def main() -> None:
    multihost.initialize()
    say(f"rank {jax.process_index()} of {jax.process_count()}")
    say(f"listens on {_listening()}")
    multihost.agree("both have looked")


def _listening() -> list[str]:
    """The addresses at which the coordinator's port is open, from the kernel's table."""
    port = int(os.environ["JAX_COORDINATOR_ADDRESS"].rpartition(":")[2])
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in pathlib.Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            address, number = local.split(":")
            if state == "0A" and int(number, 16) == port:  # 0A: listening
                words = [int(address[k : k + 8], 16) for k in range(0, len(address), 8)]
                found.add(socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words)))
    return sorted(address.removeprefix("::ffff:") for address in found)


if __name__ == "__main__":
    main()
