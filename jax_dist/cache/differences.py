"""What differs between two records, program by program, and why."""

import dataclasses
import os
from typing import TypeAlias

from jax_dist.cache.causes import CauseFinding
from jax_dist.cache.explanation import explained
from jax_dist.cache.matching import matched
from jax_dist.cache.records import Record, load

Recorded: TypeAlias = Record | str | os.PathLike[str]


@dataclasses.dataclass(frozen=True, slots=True)
class KeyDifference:
    """One program whose keys differ."""

    function: str  # its name in the first run
    components: tuple[str, ...]  # of the key, which are not the same
    findings: tuple[CauseFinding, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class RunComparison:
    """What differs between two runs."""

    same: int  # programs that have one key
    differences: tuple[KeyDifference, ...]
    only_first: tuple[str, ...]  # functions that the second run did not compile
    only_second: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        """For machines."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.same} with the same key, {len(self.differences)} with another"]
        for difference in self.differences:
            lines += ["", f"{difference.function}: {', '.join(difference.components)} differ"]
            texts = "\n".join(str(finding) for finding in difference.findings)
            lines += [f"  {line}" for line in texts.splitlines()]
        lines += [f"only in the first: {name}" for name in self.only_first]
        lines += [f"only in the second: {name}" for name in self.only_second]
        return "\n".join(lines)


def diff(a: Recorded, b: Recorded) -> RunComparison:
    """Reports the programs whose keys differ between two runs, which component differs, and why.

    Args:
      a: the record of the first run, or the path of one.
      b: that of the second.

    Returns:
      For each program with a different key: the components, the causes, and the lines.

    Raises:
      RecordError: a file is not a record.
      OSError: a file cannot be read.

    >>> import jax, numpy as np
    >>> from jax_dist.cache.recorder import record
    >>> def run(table):
    ...     def look_up(x):
    ...         return x + table
    ...     with record() as recorder:
    ...         _ = jax.jit(look_up)(np.ones(3))
    ...     return recorder.record
    >>> [found] = diff(run(np.arange(3.0)), run(np.arange(3.0) + 1)).differences
    >>> found.function, found.components, found.findings[0].cause.code
    ('jit_look_up', ('computation',), 'JXD401')
    """
    pairs = matched(_record(a).compiles, _record(b).compiles)
    both = [(one, other) for one, other in pairs if one is not None and other is not None]
    differences = tuple(
        KeyDifference(one.key.function, one.key.differing(other.key), explained(one, other))
        for one, other in both
        if one.key.name != other.key.name
    )
    return RunComparison(
        same=len(both) - len(differences),
        differences=differences,
        only_first=tuple(one.key.function for one, other in pairs if one and not other),
        only_second=tuple(other.key.function for one, other in pairs if other and not one),
    )


def _record(recorded: Recorded) -> Record:
    return recorded if isinstance(recorded, Record) else load(recorded)
