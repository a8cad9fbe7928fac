"""Checks that JAX's persistent compilation cache works for a program, or says why not."""

import argparse
import json
import re
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from jax_dist._usage import MisuseError
from jax_dist.cli import terminal
from jax_dist.cli.terminal import Exit

if TYPE_CHECKING:
    from jax_dist.cache.verification import CacheVerification, VerificationRun

_EPILOG = """\
exit codes: 0 all is well, 1 something was found, 2 the command was invalid

example:
  jax-dist cache verify -- python train.py      does every program hit the cache, and if not, why?
"""
_VERIFY = """\
Checks that the persistent cache works for a program, or says why not.

Runs the program in fresh interpreters, with a private, empty cache and another hash seed each time.
The first run fills the cache; each later run should find everything that it compiles there. For
each miss, prints the cause, the place in the program, and what to do.
"""
_AFTER = """\
exit codes: 0 all programs were stable, written and found again,
            1 one was not, or the command failed,
            2 the command or an option is invalid

examples:
  jax-dist cache verify -- python train.py --steps 2
  jax-dist cache verify --runs 5 --json -- python train.py
"""
_TAIL = 20  # lines of a program that failed
_GREEN, _RED, _CYAN, _PLAIN = "\x1b[32m", "\x1b[1;31m", "\x1b[36m", "\x1b[0m"
_CODE = re.compile(r"^JXD\d+")
_HELP = re.compile(r"^help:", re.MULTILINE)


def add_parser(commands: Any) -> None:
    subcommands = terminal.add_group(
        commands, "cache", __doc__, _EPILOG, help="check that a program hits the compilation cache"
    )
    parser = terminal.add_command(
        subcommands,
        "verify",
        _verify,
        _VERIFY,
        _AFTER,
        help="check that a program hits the cache, or say why not",
        usage="jax-dist cache verify [options] -- COMMAND ...",
    )
    terminal.flag(parser, "--json", help="print JSON")
    runs = "number of runs (3; at least 2: one to fill the cache, one to hit it)"
    count = terminal.count(1000, least=2)
    parser.add_argument("--runs", type=count, default=3, metavar="N", help=runs)
    parser.add_argument(
        "--timeout", type=terminal.seconds, metavar="SECONDS", help="time limit of each run"
    )
    terminal.add_color(parser)


def _verify(options: argparse.Namespace, *, out: TextIO, err: TextIO) -> Exit:
    from jax_dist.cache import verification  # only here: `--help` need not wait for the cache
    from jax_dist.migrate.verify import recording

    if not options.program:
        raise MisuseError("verify needs a command: jax-dist cache verify -- python train.py")
    try:
        with (
            terminal.ProgressLine(err, "runs done") as progress,
            tempfile.TemporaryDirectory(prefix="jax-dist-verify-") as folder,
        ):
            found = verification.verify(
                options.program,
                Path(folder),
                Path(recording.__file__).with_name("bootstrap.py"),
                runs=options.runs,
                timeout=options.timeout,
                progress=progress,
            )
    except OSError as error:
        raise MisuseError(f"{options.program[0]} cannot be started: {error.strerror}") from error
    except ValueError as error:  # a record of another version
        raise MisuseError(str(error)) from error
    if options.json:
        print(json.dumps(found.to_dict(), indent=2), file=out)
    else:
        colour = terminal.wants_colour(options.color, out)
        out.writelines(f"{line}\n" for line in _verdict_lines(found, colour=colour))
    err.writelines(f"{line}\n" for line in _failed_runs(found.runs))
    return Exit.OK if found.is_clean else Exit.FINDINGS


def _verdict_lines(found: "CacheVerification", *, colour: bool) -> Iterator[str]:
    def painted(text: str, with_: str) -> str:
        return f"{with_}{text}{_PLAIN}" if colour else text

    width = max((len(each.function) for each in found.functions), default=0)
    hits = [each for each in found.functions if each.is_hit]
    misses = [each for each in found.functions if not each.is_hit]
    for each in (*hits, *misses):  # one reads the end of a long table
        verdict = painted(each.verdict, _GREEN if each in hits else _RED)
        times = f" ({each.programs} programs)" if each.programs > 1 else ""
        yield f"{each.function:{width}}  {verdict}{times}"
        for finding in each.findings:
            text = _CODE.sub(lambda code: painted(code[0], _RED), str(finding))
            text = _HELP.sub(lambda help_: painted(help_[0], _CYAN), text)
            yield textwrap.indent(text, "    ")
    hit, programs = (sum(each.programs for each in some) for some in (hits, found.functions))
    if programs:
        noun = "program is" if programs == 1 else "programs are"
        yield f"{hit} of {programs} {noun} found again, in {len(found.runs)} runs."
    elif all(run.exit_code == 0 for run in found.runs):
        yield (
            "Nothing was compiled, so nothing is proved: does the command run Python, without -E, "
            "-I or -S, and does that import jax?"
        )


def _failed_runs(runs: tuple["VerificationRun", ...]) -> Iterator[str]:
    for number, each in enumerate(runs, start=1):
        match each.exit_code:
            case 0:
                continue
            case None:
                ended = "was stopped after --timeout"
            case code if code > 0:
                ended = f"ended with exit code {code}"
            case code:
                ended = f"was ended by signal {-code}"
        yield from each.output.splitlines()[-_TAIL:]
        yield f"jax-dist cache verify: run {number} {ended}"
