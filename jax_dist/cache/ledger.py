"""Which programs did not compile: one small file each, beside the entries of the cache.

Only what fails again for certain is noted: XLA refused the program. Never what depends on the
moment: an interrupt, memory that was taken, a service that was away. What XLA calls internal may be
either; it counts from the second run on.
"""

import contextlib
import dataclasses
import json
import pathlib
import re
import time
from typing import Any

from jax_dist._errors import FailedBeforeError, message
from jax_dist.cache.store import replace

_SUFFIX = "-failure"
_CERTAIN = ("INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED", "FAILED_PRECONDITION", "OUT_OF_RANGE")
_PERHAPS = ("INTERNAL",)
_OF_THE_MOMENT = re.compile(
    r"out of memory|RESOURCE_EXHAUSTED|UNAVAILABLE|DEADLINE|CANCELLED|No space left|signal",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """A program that did not compile."""

    function: str
    key: str
    reason: str  # as XLA says it, beginning with its code
    seconds: float  # until it failed
    at: str  # UTC, as 2026-11-21 14:40
    times: int

    @property
    def certain(self) -> bool:
        """Whether it is not tried again."""
        return self.reason.startswith(_CERTAIN) or self.times > 1

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def read(folder: pathlib.Path) -> list[Failure]:
    """All that is noted in a folder, by key."""
    noted = (_load(path) for path in sorted(folder.glob(f"*{_SUFFIX}")))
    return [failure for failure in noted if failure is not None]


def raise_if_failed(folder: pathlib.Path, key: str) -> None:
    """Raises FailedBeforeError where an earlier run could not compile the program."""
    failure = _load(_path(folder, key))
    if failure is not None and failure.certain:
        raise FailedBeforeError(_skipped(failure))


def note(
    folder: pathlib.Path, function: str, key: str, seconds: float, error: Exception, *, again: bool
) -> bool:
    """Notes a failure, if it is of a kind that comes again; says whether it did.

    Args:
      folder: of the cache.
      function: what did not compile.
      key: its key in the cache.
      seconds: how long that took.
      error: what XLA raised.
      again: it failed before in this process, which is no further proof.
    """
    reason = str(error)
    if _OF_THE_MOMENT.search(reason) or not reason.startswith((*_CERTAIN, *_PERHAPS)):
        return False
    before = _load(_path(folder, key))
    times = 0 if before is None else before.times
    failure = Failure(
        function=function,
        key=key,
        reason=reason,
        seconds=round(seconds, 3),
        at=time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        times=times if times and again else times + 1,
    )
    data = json.dumps(failure.to_dict(), sort_keys=True).encode()
    try:
        replace(_path(folder, key), data)
    except OSError:  # a full disk; what the user must see is why it did not compile
        return False
    return True


def forget(folder: pathlib.Path, key: str) -> None:
    """Takes a note away, if there is one."""
    with contextlib.suppress(OSError):  # none, or read-only
        _path(folder, key).unlink()


def _path(folder: pathlib.Path, key: str) -> pathlib.Path:
    return folder / f"{key}{_SUFFIX}"


def _load(path: pathlib.Path) -> Failure | None:
    try:
        return Failure(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):  # none, or not one that we wrote
        return None


def _skipped(failure: Failure) -> str:
    first = failure.reason.splitlines()[0]
    return message(
        what=f"{failure.function} is not compiled",
        which=[f"on {failure.at} UTC it failed, after {failure.seconds:.1f} s: {first}"],
        why="the same program, for the same devices and flags, fails again",
        do="Change it; or, if what it needs is there now, set JAX_DIST_RETRY_FAILED=1, or "
        "enable(retry=True). `jax-dist cache failures` lists them all.",
    )
