"""Repeated runs of a program, to see which of its programs the cache finds again."""

import dataclasses
import os
import pathlib
import pickle
import re
import secrets
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

from jax_dist._cache import record
from jax_dist._cache.explain import Cause, explain, get_argument_types
from jax_dist._cache.record import ProgramRecord
from jax_dist.launch import run_to_end

HIT, UNWRITTEN = "stable, written, hit", "stable, never written"
UNSTABLE, PARTIAL = "unstable", "not in every run"

_MADE_UP = re.compile(r"0x[0-9a-f]+|[0-9a-f]{6,}|\d+")
# What a program may have in common with itself in another run, the strictest first.
_IDENTITIES: tuple[Callable[[ProgramRecord], Hashable], ...] = (
    lambda program: program.key,
    # The name may have an address, as "step_0x7f31" has.
    lambda program: (_MADE_UP.sub("#", program.name), get_argument_types(program)),
    lambda program: program.name,
)


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramVerdict:
    """The verdict on a program, or on several programs of one function that have the same one."""

    function: str  # such as "jit_step"
    verdict: str  # HIT, UNWRITTEN, UNSTABLE or PARTIAL
    causes: tuple[Cause, ...]
    programs: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class CacheReport:
    """The verdicts on all programs of a command, and how its last run ended."""

    runs: int  # fewer than two if the first failed
    exit_code: int | None  # negative: the signal that ended it; None: it took too long
    output: str  # standard output and error
    verdicts: tuple[ProgramVerdict, ...]

    @property
    def is_clean(self) -> bool:
        """True if the runs ended well, and the second loaded all its programs: at least one."""
        has_hits = bool(self.verdicts) and all(item.verdict == HIT for item in self.verdicts)
        return self.exit_code == 0 and has_hits


def verify(
    command: Sequence[str], directory: pathlib.Path, *, timeout: float | None = None
) -> CacheReport:
    """Run a command in two fresh processes, and compare what they compile.

    The first run has an empty cache in `directory`, and the second should find all its programs
    there. Each has another hash seed, so that the order of a set varies.

    Raises:
      OSError: the command cannot be started.
    """
    cache = directory / "cache"
    cache.mkdir()
    inherited_paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    search_path = os.pathsep.join([_write_plugin(directory), *inherited_paths])
    environment = os.environ | {"PYTHONPATH": search_path, record.CACHE: str(cache)}
    runs: list[list[ProgramRecord]] = []
    code, output = None, directory / "output"
    for number in range(2):
        records = directory / f"records-{number}"
        records.mkdir()
        seed = secrets.randbelow(2**31) + 1  # 0 would turn the shuffling of sets off
        environment |= {"PYTHONHASHSEED": str(seed), record.RECORDS: str(records)}
        code = run_to_end(command, environment, output, timeout)
        runs.append(_read_records(records, cache))
        if code != 0:
            break
    verdicts = judge(*runs) if len(runs) == 2 else ()
    return CacheReport(len(runs), code, output.read_text(errors="replace"), verdicts)


def _write_plugin(directory: pathlib.Path) -> str:
    """Write the JAX plugin that records programs, and return the path for Python's search."""
    library, plugins = directory / "library", directory / "path/jax_plugins"
    library.mkdir()
    plugins.mkdir(parents=True)
    package = pathlib.Path(__file__).parents[1]
    (library / package.name).symlink_to(package)  # this package and nothing beside it
    (plugins / "jax_dist_record.py").write_text(record.PLUGIN.format(library=str(library)))
    return str(plugins.parent)


def _read_records(records: pathlib.Path, cache: pathlib.Path) -> list[ProgramRecord]:
    """Return the programs that a run recorded, in the order of their compilation."""
    programs = [pickle.loads(path.read_bytes()) for path in sorted(records.glob("*.pickle"))]
    is_written = lambda program: (cache / f"{program.key}-cache").is_file()
    return [dataclasses.replace(p, is_written=is_written(p)) for p in programs]


def judge(
    first_run: Sequence[ProgramRecord], second_run: Sequence[ProgramRecord]
) -> tuple[ProgramVerdict, ...]:
    """Return the verdict on each program of two runs, the first of which had an empty cache.

    Programs are matched by process and `_IDENTITIES`, the strictest first.
    """
    counterparts: dict[int, ProgramRecord] = {}  # of the second run, by index in the first run
    unmatched = list(second_run)
    for identify in _IDENTITIES:
        for index, program in enumerate(first_run):
            identity = (program.process, identify(program))
            candidates = (p for p in unmatched if (p.process, identify(p)) == identity)
            counterpart = None if index in counterparts else next(candidates, None)
            if counterpart is not None:
                counterparts[index] = counterpart
                unmatched.remove(counterpart)
    verdicts = [_judge_pair(p, counterparts.get(index)) for index, p in enumerate(first_run)]
    verdicts += [_judge_pair(program, None) for program in unmatched]
    counts = Counter(verdicts)
    return tuple(dataclasses.replace(verdict, programs=n) for verdict, n in counts.items())


def _judge_pair(program: ProgramRecord, counterpart: ProgramRecord | None) -> ProgramVerdict:
    """Return the verdict on a program, by the same program of the other run, if there is one."""
    if counterpart is None:
        return ProgramVerdict(program.name, PARTIAL, (Cause("not-in-every-run"),))
    # The records use a private cache, so the key does not show another directory of the user.
    directory, new_directory = (p.settings["cache directory"] for p in (program, counterpart))
    if program.key != counterpart.key or directory != new_directory:
        return ProgramVerdict(program.name, UNSTABLE, explain(program, counterpart))
    if program.is_written:  # under this key, by the first run: the second one found it
        return ProgramVerdict(program.name, HIT, ())
    cause = "rank" if program.process != 0 else "unknown"  # JAX lets only process 0 write
    if any("custom_call" in line.code and "callback" in line.code for line in program.lines):
        cause = "host-callback"
    return ProgramVerdict(program.name, UNWRITTEN, (Cause(cause),))
