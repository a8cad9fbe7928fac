"""Compares recorded runs: `diff` two of them, `verify` several runs of one program.

`verify` starts fresh interpreters. The first run meets an empty cache; the others should find in it
whatever the first compiled. Each run has another hash seed, so that what depends on the order of a
set shows.
"""

import dataclasses
import enum
import json
import os
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import TypeAlias

from jax_dist.cache.causes import CauseFinding, finding
from jax_dist.cache.explanation import build, explained, signature
from jax_dist.cache.records import DIRECTORY, CacheOutcome, Compile, Record
from jax_dist.launch.ranks import run_to_end

_PACKAGE = Path(__file__).parents[1]

_Recorded: TypeAlias = Record | str | os.PathLike[str]


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


def diff(a: _Recorded, b: _Recorded) -> RunComparison:
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
    one, other = (each if isinstance(each, Record) else Record.load(each) for each in (a, b))
    pairs = _matched(one.compiles, other.compiles)
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


# --- the same program several times


class ProgramVerdict(enum.StrEnum):
    """What the cache did for one program."""

    HIT = "stable, written, hit"
    MISSED = "stable, written, not hit"
    UNWRITTEN = "stable, never written"
    UNSTABLE = "unstable"
    PARTIAL = "not in every run"


@dataclasses.dataclass(frozen=True, slots=True)
class Verified:
    """The verdict on one program, or on several of one name that fared alike."""

    function: str  # such as "jit_step"
    programs: int
    verdict: ProgramVerdict
    findings: tuple[CauseFinding, ...] = ()  # why not hit


@dataclasses.dataclass(frozen=True, slots=True)
class VerificationRun:
    """How one run of the program ended."""

    hash_seed: int
    exit_code: int | None  # negative: the signal that ended it; None: it was stopped, being late
    output: str  # standard output and error


@dataclasses.dataclass(frozen=True, slots=True)
class CacheVerification:
    """What all runs together show."""

    runs: tuple[VerificationRun, ...]
    functions: tuple[Verified, ...]

    @property
    def is_clean(self) -> bool:
        """Whether all runs ended well, and each program was found again; at least one."""
        ended = all(run.exit_code == 0 for run in self.runs)
        hit = all(each.verdict is ProgramVerdict.HIT for each in self.functions)
        return ended and hit and bool(self.functions)

    def to_dict(self) -> dict[str, object]:
        """For machines."""
        return dataclasses.asdict(self)


def verify(
    command: Sequence[str],
    folder: Path,
    bootstrap: Path,
    *,
    runs: int = 3,
    timeout: float | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> CacheVerification:
    """Runs a command some times, each in a fresh interpreter, and compares what it compiles.

    Args:
      command: the program and its arguments.
      folder: an empty one, for the cache and the records.
      bootstrap: the file that Python runs first in the program, and that starts
        `jax_dist.cache.injected`.
      runs: how often; the first with an empty cache.
      timeout: the seconds after which a run is stopped; None for never.
      progress: told before each run how many are done, and how many there will be.

    Returns:
      How the runs ended, and the verdict on each program. Nothing runs after one that fails.

    Raises:
      OSError: the command cannot be started.
    """
    (folder / "path").mkdir()
    (folder / "path" / "sitecustomize.py").write_bytes(bootstrap.read_bytes())
    ended: list[VerificationRun] = []
    for number in range(runs):
        progress(number, runs)
        ended.append(_run(command, folder, number, timeout))
        if ended[-1].exit_code != 0:
            break
    records = [Record.load(folder / f"records-{number}") for number in range(len(ended))]
    return CacheVerification(tuple(ended), _judged(records))


def _run(
    command: Sequence[str], folder: Path, number: int, timeout: float | None
) -> VerificationRun:
    records, output = folder / f"records-{number}", folder / f"output-{number}"
    records.mkdir()
    cache = folder / "cache"
    wanted = {
        "package": str(_PACKAGE / "cache" / "injected"),
        "root": str(_PACKAGE),
        "folder": str(records),
        "cache": str(cache),
    }
    seed = number + 1  # 0 would turn the shuffling of sets off
    inherited = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    environment = os.environ | {
        "JAX_DIST_RECORD": json.dumps(wanted),
        "PYTHONPATH": os.pathsep.join([str(folder / "path"), *inherited]),
        "PYTHONHASHSEED": str(seed),
        # What a program sees if it looks; the recorder sees to it that nothing else holds.
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    exit_code = run_to_end(command, environment, output, timeout)
    return VerificationRun(seed, exit_code, output.read_text(errors="replace"))


# --- the judge


def _judged(records: Sequence[Record]) -> tuple[Verified, ...]:
    """The verdict on each program of some runs, the first of which met an empty cache."""
    if len(records) < 2:  # one run proves nothing
        return ()
    first = records[0].compiles
    # What one program became in each run; then those that the first run did not compile.
    chains: list[list[Compile | None]] = [[compiled] for compiled in first]
    late: list[list[Compile | None]] = []
    for number, record in enumerate(records[1:], start=1):
        pairs = _matched(first, record.compiles)
        for chain, (_, other) in zip(chains, pairs, strict=False):
            chain.append(other)
        late += [[*[None] * number, other] for _, other in pairs[len(first) :]]
    together = Counter(map(_verdict, chains + late))
    return tuple(dataclasses.replace(each, programs=count) for each, count in together.items())


def _verdict(chain: Sequence[Compile | None]) -> Verified:
    compiled = [each for each in chain if each is not None]
    first, *others = compiled
    name = first.key.function
    if any(other.key.name != first.key.name for other in others):
        findings = [found for other in others for found in explained(first, other)]
        # Each cause once, with what the first pair of runs shows of it.
        once = {found.cause.name: found for found in reversed(findings)}.values()
        return Verified(name, 1, ProgramVerdict.UNSTABLE, tuple(once)[::-1])
    if None in chain:
        return Verified(name, 1, ProgramVerdict.PARTIAL, (finding("not-in-every-run"),))
    directories = dict.fromkeys(each.settings[DIRECTORY] for each in compiled)
    if len(directories) > 1:  # the private cache holds still, and would hide it
        found = finding("moving-directory", ", then ".join(list(directories)[:2]))
        return Verified(name, 1, ProgramVerdict.MISSED, (found,))
    unwritten = next((each for each in compiled if each.outcome is CacheOutcome.UNWRITTEN), None)
    if all(each.outcome is CacheOutcome.HIT for each in others) and unwritten is None:
        return Verified(name, 1, ProgramVerdict.HIT)
    if unwritten is not None and unwritten.reason is not None:
        return Verified(name, 1, ProgramVerdict.UNWRITTEN, (finding(unwritten.reason),))
    return Verified(name, 1, ProgramVerdict.MISSED, (finding("not-found-again"),))


# --- which program of one run is which of another: by key, else by name and shapes, else by build


_MADE_UP = re.compile(r"0x[0-9a-f]+|[0-9a-f]{6,}|\d+")
_IDENTITIES: tuple[Callable[[Compile], Hashable], ...] = (
    lambda one: one.key.name,
    lambda one: (one.key.function, signature(one.operations)),
    # As "step_0x7f31" and "step_0x7f9c", which no two processes share.
    lambda one: (_MADE_UP.sub("#", one.key.function), signature(one.operations)),
    # The same in all but names; a function of the same shape alone may be another one.
    lambda one: tuple(map(build, one.operations)),
    lambda one: one.key.function,
)


def _matched(
    ones: Sequence[Compile], others: Sequence[Compile]
) -> list[tuple[Compile | None, Compile | None]]:
    """Each program of both runs once, in the order of the first; None: the other lacks it."""
    partner: dict[int, int] = {}
    taken: set[int] = set()
    for identity in _IDENTITIES:
        waiting: dict[Hashable, deque[int]] = defaultdict(deque)
        for number, other in enumerate(others):
            if number not in taken:
                waiting[other.process, identity(other)].append(number)
        for number, one in enumerate(ones):
            if number not in partner and (found := waiting[one.process, identity(one)]):
                partner[number] = found.popleft()
                taken.add(partner[number])
    pairs: list[tuple[Compile | None, Compile | None]] = [
        (one, others[partner[number]] if number in partner else None)
        for number, one in enumerate(ones)
    ]
    pairs += [(None, other) for number, other in enumerate(others) if number not in taken]
    return pairs
