"""Repeated runs of a program, to see which of its programs the cache finds again."""

import dataclasses
import json
import os
import pathlib
import re
import secrets
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from jax_dist._cache import record
from jax_dist._cache.explain import Cause, explain, get_argument_types
from jax_dist.launch import run_to_end

HIT, UNWRITTEN = "stable, written, hit", "stable, never written"
UNSTABLE, PARTIAL = "unstable", "not in every run"

Program = dict[str, Any]  # as `record` writes it, and "is_written"

_MADE_UP = re.compile(r"0x[0-9a-f]+|[0-9a-f]{6,}|\d+")
_IDENTITIES: tuple[Callable[[Program], Hashable], ...] = (
    lambda program: program["key"],
    # Also "step_0x7f31" and "step_0x7f9c", which no two processes share.
    lambda program: (_MADE_UP.sub("#", program["name"]), get_argument_types(program)),
    lambda program: program["name"],
)


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict on one program, or on several of one name with the same one."""

    function: str  # such as "jit_step"
    verdict: str
    causes: tuple[Cause, ...]
    programs: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """The verdicts, and the end of the last run."""

    runs: int  # less than two if one fails
    exit_code: int | None  # negative: the signal that ended it; None: it took too long
    output: str  # standard output and error
    verdicts: tuple[Verdict, ...]

    @property
    def is_clean(self) -> bool:
        """True if all runs ended well, and each program was found again; at least one."""
        hits = [verdict.verdict == HIT for verdict in self.verdicts]
        return self.exit_code == 0 and bool(hits) and all(hits)


def verify(
    command: Sequence[str], directory: pathlib.Path, *, timeout: float | None = None
) -> Report:
    """Run a command in two fresh processes, and compare what they compile.

    The first run meets an empty cache in `directory`; the other should find all in it, with another
    hash seed, so that the order of a set varies.

    Raises:
      OSError: the command cannot be started.
    """
    library, plugins, cache = (
        directory / name for name in ("library", "path/jax_plugins", "cache")
    )
    for path in (library, plugins, cache):
        path.mkdir(parents=True)
    package = pathlib.Path(__file__).parents[1]
    (library / package.name).symlink_to(package)
    (plugins / "jax_dist_record.py").write_text(record.PLUGIN.format(library=str(library)))
    inherited = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(plugins.parent), *inherited]),
        record.CACHE: str(cache),
    }
    programs: list[list[Program]] = []
    code, output = None, directory / "output"
    for number in range(2):
        records = directory / f"records-{number}"
        records.mkdir()
        seed = secrets.randbelow(2**31) + 1  # 0 would turn the shuffling of sets off
        environment |= {"PYTHONHASHSEED": str(seed), record.RECORDS: str(records)}
        code = run_to_end(command, environment, output, timeout)
        programs.append([json.loads(path.read_bytes()) for path in sorted(records.glob("*.json"))])
        for program in programs[-1]:
            program["is_written"] = (cache / f"{program['key']}-cache").is_file()
        if code != 0:
            break
    verdicts = judge(*programs) if len(programs) > 1 else ()
    return Report(len(programs), code, output.read_text(errors="replace"), verdicts)


def judge(ones: Sequence[Program], others: Sequence[Program]) -> tuple[Verdict, ...]:
    """Return the verdict on each program of two runs, the first of which met an empty cache.

    The programs are matched by key, then by name and argument types, then by name.
    """
    counterparts: dict[int, Program] = {}
    rest = list(others)
    for identify in _IDENTITIES:
        for index, one in enumerate(ones):
            mark = (one["process"], identify(one))
            for other in rest if index not in counterparts else ():
                if (other["process"], identify(other)) == mark:
                    counterparts[index] = other
                    rest.remove(other)
                    break
    verdicts = [_judge_one(one, counterparts.get(index)) for index, one in enumerate(ones)]
    together = Counter([*verdicts, *(_judge_one(other, None) for other in rest)])
    return tuple(dataclasses.replace(verdict, programs=n) for verdict, n in together.items())


def _judge_one(one: Program, other: Program | None) -> Verdict:
    name = one["name"]
    if other is None:
        return Verdict(name, PARTIAL, (Cause("not-in-every-run"),))
    # The private cache hides another directory, which need not be in the key.
    directories = [program["settings"]["cache directory"] for program in (one, other)]
    if one["key"] != other["key"] or directories[0] != directories[1]:
        return Verdict(name, UNSTABLE, explain(one, other))
    if one["is_written"]:
        return Verdict(name, HIT, ())
    calls_back = any("custom_call" in code and "callback" in code for code, _ in one["lines"])
    cause = "host-callback" if calls_back else "rank" if one["process"] else "unknown"
    return Verdict(name, UNWRITTEN, (Cause(cause),))
