"""Checks that the persistent cache works for a program, or says why not.

Runs the program in fresh interpreters, with a private, empty cache and another hash seed each time.
The first run fills the cache; each later run should find everything that it compiles there. For
each miss, prints the cause, the place in the program, and what to do.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from jax_dist.commands import terminal
from jax_dist.commands.terminal import Exit

if TYPE_CHECKING:
    from jax_dist.cache.comparison import (
        CacheVerification,
        VerificationRun,
        Verified,
    )

HELP = "check that a program hits the cache, or say why not"
USAGE = "jax-dist cache verify [options] -- COMMAND ..."
EPILOG = """\
exit codes: 0 all programs were stable, written and found again,
            1 one was not, or the command failed,
            2 the command or an option is invalid

examples:
  jax-dist cache verify -- python train.py --steps 2
  jax-dist cache verify --runs 5 --json -- python train.py
  jax-dist cache verify --keep runs -- python train.py
  jax-dist cache diff runs/records-0 runs/records-1
"""

_TAIL = 20  # lines of a program that failed
_GREEN, _RED, _CYAN, _PLAIN = "\x1b[32m", "\x1b[1;31m", "\x1b[36m", "\x1b[0m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `verify` takes in front of the command."""
    parser.add_argument(
        "--runs", type=_runs, default=3, metavar="N", help="number of runs (3; at least 2)"
    )
    parser.add_argument(
        "--timeout", type=terminal.seconds, metavar="SECONDS", help="time limit of each run"
    )
    parser.add_argument("--keep", metavar="FOLDER", help="keep cache, records and output there")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    terminal.add_color(parser)


def _runs(text: str) -> int:
    number = int(text)
    if number < 2:
        raise argparse.ArgumentTypeError("must be 2 or more: one to fill the cache, one to hit it")
    return number


def run(options: argparse.Namespace, *, out: TextIO, err: TextIO) -> Exit:
    """Runs the command behind --, judges and prints."""
    from jax_dist._usage import MisuseError

    if not options.program:
        raise MisuseError("verify needs a command: jax-dist cache verify -- python train.py")
    if options.keep is None:
        with tempfile.TemporaryDirectory(prefix="jax-dist-verify-") as folder:
            found = _verify(options, Path(folder), err)
    else:
        found = _verify(options, _new_folder(options.keep), err)
    if options.json:
        print(json.dumps(found.to_dict() | {"is_clean": found.is_clean}, indent=2), file=out)
    else:
        colour = terminal.wants_colour(options.color, out)
        out.writelines(f"{line}\n" for line in _lines(found, colour=colour))
    err.writelines(f"{line}\n" for line in _failures(found.runs))
    return Exit.OK if found.is_clean else Exit.FINDINGS


def _new_folder(name: str) -> Path:
    from jax_dist._usage import MisuseError

    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MisuseError(f"--keep {name}: {error.strerror}") from error
    if any(folder.iterdir()):
        raise MisuseError(f"--keep {name}: the folder is not empty")
    return folder.resolve()


def _verify(options: argparse.Namespace, folder: Path, err: TextIO) -> "CacheVerification":
    from jax_dist._usage import MisuseError
    from jax_dist.cache import comparison  # it loads jax, which `--help` need not wait for
    from jax_dist.codemod.verify import recording

    progress = terminal.ProgressLine(err, "runs done")
    try:
        return comparison.verify(
            options.program,
            folder,
            Path(recording.__file__).with_name("bootstrap.py"),
            runs=options.runs,
            timeout=options.timeout,
            progress=progress,
        )
    except OSError as error:
        raise MisuseError(f"{options.program[0]} cannot be started: {error.strerror}") from error
    finally:
        progress.close()


def _lines(found: "CacheVerification", *, colour: bool) -> Iterator[str]:
    from jax_dist.cache.comparison import ProgramVerdict

    width = max((len(each.function) for each in found.functions), default=0)
    # What is well comes first, for one reads the end of a long table.
    for each in sorted(found.functions, key=lambda each: each.verdict is not ProgramVerdict.HIT):
        is_well = each.verdict is ProgramVerdict.HIT
        verdict = _painted(each.verdict, _GREEN if is_well else _RED, colour=colour)
        times = f" ({each.programs} programs)" if each.programs > 1 else ""
        yield f"{each.function:{width}}  {verdict}{times}"
        yield from (f"    {line}" for line in _why(each, colour=colour))
    yield from _summary(found)


def _why(each: "Verified", *, colour: bool) -> Iterator[str]:
    for finding in each.findings:
        cause = finding.cause
        code = _painted(cause.code, _RED, colour=colour) + " " if cause.code else ""
        yield f"{code}{cause.name}: {cause.why}"
        yield from (f"  {detail}" for detail in finding.details)
        yield f"{_painted('help:', _CYAN, colour=colour)} {cause.remedy}"


def _summary(found: "CacheVerification") -> Iterator[str]:
    from jax_dist.cache.comparison import ProgramVerdict

    programs = sum(each.programs for each in found.functions)
    hit = sum(each.programs for each in found.functions if each.verdict is ProgramVerdict.HIT)
    if programs:
        noun = "program is" if programs == 1 else "programs are"
        yield f"{hit} of {programs} {noun} found again, in {len(found.runs)} runs."
    elif all(run.exit_code == 0 for run in found.runs):
        yield (
            "Nothing was compiled, so nothing is proved: does the command run Python, without -E, "
            "-I or -S, and does that import jax?"
        )


def _failures(runs: tuple["VerificationRun", ...]) -> Iterator[str]:
    for number, each in enumerate(runs, start=1):
        if each.exit_code != 0:
            yield from each.output.splitlines()[-_TAIL:]
            yield f"jax-dist cache verify: run {number} {_ended(each.exit_code)}"


def _ended(code: int | None) -> str:
    if code is None:
        return "was stopped after --timeout"
    return f"ended with exit code {code}" if code >= 0 else f"was ended by signal {-code}"


def _painted(text: str, colour_code: str, *, colour: bool) -> str:
    return f"{colour_code}{text}{_PLAIN}" if colour else text
