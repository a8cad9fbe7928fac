"""`agree`: every process has the same, or every process hears who has what."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jax_dist.errors import DisagreementError, message
from jax_dist.multihost import coordination
from jax_dist.multihost.coordination import Meeting, Place
from jax_dist.multihost.fingerprints import Fingerprint, differences, fingerprint
from jax_dist.multihost.ranks import do as ranks_do

program_timeout = 300.0
"""The seconds to wait for the others before a new program runs; `initialize` sets it.

Long, for a process may come late to its first program, from loading its data.
"""

_SHOWN = 20  # differences in one message


def agree(tag: str, tree: Any = None, values: bool = False, timeout: float = 60.0) -> None:  # noqa: FBT001, FBT002  # the issue says so
    """Makes sure that all processes are here, with the same tree.

    Every process calls it, in the same order. Compared are the tag, the containers of the tree and
    the paths in it, and of each leaf the shape, dtype and weak type; numbers, strings and other
    leaves that are no arrays by value. No device takes part: the processes write what they have
    into JAX's coordination service, so that a difference is found before a collective would hang
    over it. After an error the job can go on.

    It takes a few milliseconds: use it at the start, and not in each step. In one process it
    returns immediately.

    Args:
      tag: names this place in the program.
      tree: what all should have.
      values: whether the values of arrays count, too: bit for bit, so a NaN equals itself. Of an
        array that is cut over the processes they do not.
      timeout: the seconds to wait for the others.

    Raises:
      DisagreementError: in every process, with the same text: what each of them has, path by path,
        or which call each of them is at.
      MissingRanksError: a DisagreementError, too: not all came in time. Those that come later raise
        the same.

    >>> import numpy as np
    >>> agree("batch", {"x": np.zeros((2, 4)), "seed": 7})
    """
    agree_on(f"agree({tag!r})", fingerprint(tree, values=values), timeout=timeout)


def agree_on(
    name: str,
    own: Fingerprint,
    *,
    timeout: float,
    ranks: Sequence[int] | None = None,
    do: str = "Look for a branch on the rank, or for data that is shared out unevenly.",
    give: bytes | None = None,
) -> dict[int, bytes]:
    """The same for a fingerprint, among some processes, which then may tell each other more.

    Args:
      name: what this process is at.
      own: what it has.
      timeout: the seconds to wait for the others.
      ranks: who has to agree; all by default.
      do: what the user is told to do.
      give: what this process tells the others once they agree; all give something, or none does.

    Returns:
      What each rank gives.
    """
    here = coordination.place(ranks)
    if here is None:
        return {} if give is None else {0: give}
    with Meeting(here, name, timeout) as meeting:
        header = json.dumps([name, own.digest()]).encode()
        headers = {rank: tuple(json.loads(each)) for rank, each in meeting.gather(header).items()}
        if len(set(headers.values())) > 1:
            raise _disagreement(meeting, here, headers, own, do)
        return {} if give is None else meeting.add(give)


def _disagreement(
    meeting: Meeting,
    here: Place,
    headers: Mapping[int, tuple[str, str]],
    own: Fingerprint,
    do: str,
) -> DisagreementError:
    """The same text everywhere: made of what the first rank of each group has written."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, header in headers.items():
        groups.setdefault(header, []).append(rank)
    names = list(dict.fromkeys(name for name, _ in headers.values()))
    if len(names) > 1:
        whose = {name: [r for r, header in headers.items() if header[0] == name] for name in names}
        return DisagreementError(
            message(
                what="The processes are at different places",
                which=[
                    f"{ranks_do(ranks, 'is', 'are')} at {name}" for name, ranks in whose.items()
                ],
                why="each of these needs all processes, in the same order",
                do=do,
            )
        )
    speaks = here.rank in [ranks[0] for ranks in groups.values()]
    written = meeting.add(own.dump() if speaks else None)
    known = [
        (ranks, Fingerprint.load(written[ranks[0]]))
        for ranks in groups.values()
        if ranks[0] in written
    ]
    found = differences(known)
    more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    return DisagreementError(
        message(
            what=f"The processes disagree at {names[0]}",
            which=[*found[:_SHOWN], *more],
            why="what goes over devices must be the same in all processes",
            do=do,
        )
    )
