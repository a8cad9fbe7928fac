"""What the processes of a job tell each other, beside what goes over devices."""

import dataclasses
import json

from jax_dist import _notes

_CUT = 1 << 16  # characters of one text; the traceback of a large exception may have millions


@dataclasses.dataclass(frozen=True)
class Hello:
    """To rank 0, first of all."""

    rank: int
    processes: int  # how many it was told that there are
    machine: str  # one text for each machine, or container
    pid: int


@dataclasses.dataclass(frozen=True)
class Joined:
    """From rank 0: all are here."""

    machine: str
    pid: int


@dataclasses.dataclass(frozen=True)
class Refused:
    """From rank 0: they cannot be brought together."""

    text: str


@dataclasses.dataclass(frozen=True)
class Failed:
    """To rank 0: this process has failed."""

    what: str  # as in "ValueError: its text"
    traceback: str
    code: int  # the exit code


@dataclasses.dataclass(frozen=True)
class Finished:
    """To rank 0: this process is done, and waits for the others."""


@dataclasses.dataclass(frozen=True)
class SomeFinished:
    """From rank 0: say so if you wait in JAX for those that have finished."""


@dataclasses.dataclass(frozen=True)
class Stuck:
    """To rank 0: this process waits in JAX, and has not moved since others have finished."""

    stack: str


@dataclasses.dataclass(frozen=True)
class Leave:
    """From rank 0: all are done."""


@dataclasses.dataclass(frozen=True)
class End:
    """From rank 0: all shall end."""

    culprit: int | None  # the rank to blame
    text: str  # behind "stopping because"
    code: int  # the exit code
    stacks: bool  # whether to show what each thread is doing


@dataclasses.dataclass(frozen=True)
class Ping:
    """From rank 0, now and then."""


@dataclasses.dataclass(frozen=True)
class Pong:
    """The answer: this process runs."""


@dataclasses.dataclass(frozen=True)
class Stalled:
    """To rank 0: a watchdog has waited in vain."""

    seconds: float


@dataclasses.dataclass(frozen=True)
class Where:
    """From rank 0: where do you stand?"""


@dataclasses.dataclass(frozen=True)
class Status:
    """The answer: where a process stands."""

    step: int  # the number of the last one that began; 0 before the first
    inside: bool  # whether it has not ended
    seconds: float  # since then
    in_jax: bool
    stack: str
    watched: bool = True

    def __str__(self) -> str:
        if not self.watched:
            where = "without a watchdog"
        elif self.step == 0:
            where = f"before its first step for {self.seconds:.0f} s"
        elif self.inside:
            where = f"in step {self.step} for {self.seconds:.0f} s"
        else:
            where = f"after step {self.step} for {self.seconds:.0f} s"
        return f"{where}, {'waiting in JAX' if self.in_jax else 'not waiting in JAX'}"


Message = (
    Hello
    | Joined
    | Refused
    | Failed
    | Finished
    | SomeFinished
    | Stuck
    | Leave
    | End
    | Ping
    | Pong
    | Stalled
    | Where
    | Status
)
_KINDS = {kind.__name__: kind for kind in Message.__args__}


def dump(message: Message) -> bytes:
    """As it goes over a connection. Texts that are too long are cut in the middle.

    >>> load(dump(Refused(text=100_000 * "x"))).text[32_768:32_800]
    ' ... [34464 characters left out]'
    """
    fields = {name: _cut(value) for name, value in dataclasses.asdict(message).items()}
    return json.dumps([type(message).__name__, fields]).encode("ascii")


def load(data: bytes) -> Message | None:
    """None where it is no message of ours."""
    try:
        name, fields = _notes.decode(data)
    except (ValueError, TypeError):
        return None
    kind = _KINDS.get(name) if isinstance(name, str) else None
    return None if kind is None else _notes.read(fields, kind)


def _cut(value: object) -> object:
    if not isinstance(value, str) or len(value) <= _CUT:
        return value
    half = _CUT // 2
    return f"{value[:half]} ... [{len(value) - _CUT} characters left out] ... {value[-half:]}"
