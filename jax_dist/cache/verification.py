"""Runs one program several times, and says which of its programs are found again.

Each run is a fresh interpreter. The first meets an empty cache; the others should find in it
whatever the first compiled. Each has another hash seed, so that what depends on the order of a set
shows.
"""

import dataclasses
import enum
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

from jax_dist.cache.causes import CauseFinding, finding
from jax_dist.cache.explanation import content, explained, matched, signature
from jax_dist.cache.records import HIT, WRITTEN, Compile, load
from jax_dist.launch import run_to_end

_PACKAGE = Path(__file__).parents[1]


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
    findings: tuple[CauseFinding, ...]  # why not hit

    @property
    def is_hit(self) -> bool:
        return self.verdict is ProgramVerdict.HIT


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
        hit = all(each.is_hit for each in self.functions)
        return ended and hit and bool(self.functions)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"is_clean": self.is_clean}


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

    `folder` is an empty one, for the cache and the records; `bootstrap` the file that Python runs
    first in the program, and that starts `jax_dist.cache.injected`. `progress` is told before each
    run how many are done, of how many. Nothing runs after a run that fails.

    Raises:
      OSError: the command cannot be started.
    """
    path, library, cache = folder / "path", folder / "library", folder / "cache"
    path.mkdir()
    (path / "sitecustomize.py").write_bytes(bootstrap.read_bytes())
    library.mkdir()
    (library / "jax_dist").symlink_to(_PACKAGE)
    inherited = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(path), *inherited]),
        # What a program sees if it looks; the recorder sees to it that nothing else holds.
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    wanted = {
        "package": str(_PACKAGE / "cache" / "injected"),
        "library": str(library),
        "cache": str(cache),
    }
    ended: list[VerificationRun] = []
    records: list[tuple[Compile, ...]] = []
    for number in range(runs):
        progress(number, runs)
        recorded, output = folder / f"records-{number}", folder / f"output-{number}"
        recorded.mkdir()
        seed = number + 1  # 0 would turn the shuffling of sets off
        (path / "settings.json").write_text(json.dumps(wanted | {"folder": str(recorded)}))
        environment["PYTHONHASHSEED"] = str(seed)
        code = run_to_end(command, environment, output, timeout)
        ended.append(VerificationRun(seed, code, output.read_text(errors="replace")))
        records.append(load(recorded))
        if code != 0:
            break
    return CacheVerification(tuple(ended), judged(records))


def judged(records: Sequence[Sequence[Compile]]) -> tuple[Verified, ...]:
    """The verdict on each program of some runs, the first of which met an empty cache."""
    if len(records) < 2:  # one run proves nothing
        return ()
    first = records[0]
    # What one program became in each run; then those that the first run did not compile.
    chains: list[list[Compile | None]] = [[compiled] for compiled in first]
    late: list[list[Compile | None]] = []
    for number, record in enumerate(records[1:], start=1):
        pairs = matched(first, record, *_IDENTITIES)
        for chain, (_, other) in zip(chains, pairs, strict=False):
            chain.append(other)
        late += [[*[None] * number, other] for _, other in pairs[len(first) :]]
    together = Counter(map(_verdict, chains + late))
    return tuple(
        Verified(name, count, verdict, findings)
        for (name, verdict, findings), count in together.items()
    )


def _verdict(
    chain: Sequence[Compile | None],
) -> tuple[str, ProgramVerdict, tuple[CauseFinding, ...]]:
    """What the program is called, what the cache did for it, and why not more."""
    compiled = [each for each in chain if each is not None]
    first, *others = compiled
    name = first.function
    if any(other.key != first.key for other in others):
        findings = [
            found for other in others if other.key != first.key for found in explained(first, other)
        ]
        # Each cause once, with what the first pair of runs shows of it.
        once = {found.cause.name: found for found in reversed(findings)}.values()
        return name, ProgramVerdict.UNSTABLE, tuple(once)[::-1]
    if None in chain:
        return name, ProgramVerdict.PARTIAL, (finding("not-in-every-run"),)
    directories = dict.fromkeys(each.directory for each in compiled)
    if len(directories) > 1:  # the private cache holds still, and would hide it
        found = finding("cache-directory", ", then ".join(list(directories)[:2]))
        return name, ProgramVerdict.MISSED, (found,)
    for each in compiled:
        if each.fate not in (HIT, WRITTEN):
            return name, ProgramVerdict.UNWRITTEN, (finding(each.fate),)
    if all(other.fate == HIT for other in others):
        return name, ProgramVerdict.HIT, ()
    return name, ProgramVerdict.MISSED, (finding("not-found-again"),)


# --- which program of one run is which of another: by key, else by name and shapes, else by build


_MADE_UP = re.compile(r"0x[0-9a-f]+|[0-9a-f]{6,}|\d+")
_IDENTITIES: tuple[Callable[[Compile], Hashable], ...] = (
    lambda one: (one.process, one.key),
    lambda one: (one.process, one.function, signature(one.operations)),
    # As "step_0x7f31" and "step_0x7f9c", which no two processes share.
    lambda one: (one.process, _MADE_UP.sub("#", one.function), signature(one.operations)),
    # The same in all but names; a function of the same shape alone may be another one.
    lambda one: (one.process, *map(content, one.operations)),
    lambda one: (one.process, one.function),
)
