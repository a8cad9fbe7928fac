"""What the checker costs: time beside `ast.parse` of every file.

    python benchmarks/checker.py --folder ~/jax --folder ~/scenic --folder ~/flax
    python benchmarks/checker.py --folder ~/jax --fixit ~/fixit/bin/python --every 10

The baseline is a program that parses each file and does nothing else. All are commands, so that all
pay for the start of Python and for fresh memory. They take turns, round by round, so that a slow
moment of the machine hits all of them. Printed are ratios of CPU time (user and system, children
included) and of the time that passes: the median over rounds, and the least and the greatest in
brackets. The baseline stands there twice: the second row shows the noise. Notebooks are passed
over, since `ast` does not parse them. With `--fixit`, fixit with its one rule `NoStaticIfCondition`
reads each `--every`-th file, and so does the checker; start-up counts, so that a small folder says
little.
"""

import argparse
import atexit
import dataclasses
import functools
import os
import pathlib
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

Measures = dict[str, Callable[[], object]]
Seconds = dict[str, list[float]]  # one number a round
_PASSED = " | passed"  # behind a name: the time that passes, in the place of CPU time

_LINT = (sys.executable, "-m", "jax_dist", "lint", "--exit-zero", "--quiet")
# What any tool that is built on `ast` must spend if it has no prefilter. Some corpora hold files
# that cannot be parsed.
_PARSE = """
import ast, sys, warnings
warnings.simplefilter("ignore")
for path in open(sys.argv[1]).read().splitlines():
    with open(path, "rb") as file:
        data = file.read()
    try:
        ast.parse(data)
    except (SyntaxError, ValueError):
        pass
"""
_SMALL = "import jax\n\n\ndef step(x):\n    return x\n\n\nstep = jax.pmap(step, axis_name='i')\n"


@dataclasses.dataclass(frozen=True)
class Goal:
    """A claim: the median of `one / other` is at most `most` (or at least `least`)."""

    text: str
    one: str
    other: str
    most: float | None = None
    least: float | None = None

    def verdict(self, seconds: Seconds) -> str:
        """One line: the claim, what was measured, and whether it holds."""
        ratio = statistics.median(_ratios(seconds, self.one, self.other))
        held = ratio <= self.most if self.most is not None else ratio >= (self.least or 0)
        bound = f"at most {self.most}" if self.most is not None else f"at least {self.least}"
        return f"{'holds' if held else 'FAILS'}  {self.text}: {ratio:.2f} ({bound})"


def cpu_seconds(measures: Measures, rounds: int) -> Seconds:
    """CPU time of each, its children's included; and, by the name with `_PASSED`, what passes.

    They take turns; the order changes by round.
    """
    seconds: Seconds = {name + more: [] for name in measures for more in ("", _PASSED)}
    names = list(measures)
    for round_ in range(rounds):
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            start, now = _spent(), time.perf_counter()
            measures[name]()
            seconds[name].append(_spent() - start)
            seconds[name + _PASSED].append(time.perf_counter() - now)
    return seconds


def _spent() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def python_files(folders: Sequence[str]) -> list[pathlib.Path]:
    """All `*.py` under the folders, in order; links and caches are passed over."""
    return [
        path
        for folder in folders
        for path in sorted(pathlib.Path(folder).rglob("*.py"))
        if path.is_file() and not path.is_symlink() and "__pycache__" not in path.parts
    ]


def command(*arguments: str, fine: Sequence[int] = (0, 1)) -> Callable[[], object]:
    """Runs a command and drops what it prints; an exit code that is not `fine` stops us."""

    def run() -> None:
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        done = subprocess.run(arguments, env=_environment(), **pipes)
        if done.returncode not in fine:
            raise SystemExit(f"{' '.join(arguments)}\n{done.stderr.decode()}")

    return run


@functools.cache
def _environment() -> dict[str, str]:
    """As when installed: modules are compiled once, wherever they come from."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": tempfile.mkdtemp(prefix="pyc-")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    atexit.register(shutil.rmtree, environment["PYTHONPYCACHEPREFIX"], ignore_errors=True)
    return environment


def whole_folders(folders: Sequence[str], work: pathlib.Path) -> Measures:
    """The baseline twice, and the checker."""
    files = work / "files"
    files.write_text("\n".join(map(str, python_files(folders))))
    parse = command(sys.executable, "-c", _PARSE, str(files))
    settings = work / "jax-dist.toml"
    settings.write_text('extend-exclude = ["*.ipynb"]\n')
    folders = ["--config", str(settings), *folders]
    return {
        "ast.parse": parse,
        "ast.parse again": parse,
        "lint": command(*_LINT, *folders),
    }


def start_up(work: pathlib.Path) -> Measures:
    """A small file beside no program at all."""
    small = work / "small.py"
    small.write_text(_SMALL)
    measures = {
        "python -c pass": command(sys.executable, "-c", "pass"),
        "lint of one file": command(*_LINT, str(small)),
        "migrate of one file": command(sys.executable, "-m", "jax_dist", "migrate", str(small)),
    }
    for measure in measures.values():
        measure()  # compiles the modules
    return measures


def beside_fixit(folders: Sequence[str], work: pathlib.Path, every: int, fixit: str) -> Measures:
    """Copies each `every`-th file, so that both tools see one folder."""
    sample = work / "sample"
    for number, path in enumerate(python_files(folders)[::every]):
        (sample / str(number)).mkdir(parents=True)
        shutil.copy(path, sample / str(number) / path.name)
    (sample / ".fixit.toml").write_text(
        '[tool.fixit]\nroot = true\ndisable = ["fixit.rules"]\n'
        'enable = ["fixit.rules:NoStaticIfCondition"]\n'
    )
    size = sum(path.stat().st_size for path in sample.rglob("*.py"))
    print(f"beside fixit: {len(list(sample.rglob('*.py')))} files, {size / 1e6:.2f} MB")
    rule = (fixit, "-m", "fixit", "--quiet", "lint")
    return {
        "lint": command(*_LINT, str(sample)),
        "lint again": command(*_LINT, str(sample)),
        # Its codes are added up: 1 for findings, 2 for files that it cannot parse.
        "fixit, one rule": command(*rule, str(sample), fine=(0, 1, 2, 3)),
    }


def print_table(title: str, seconds: Seconds, baseline: str) -> None:
    print(f"\n{title}, beside {baseline}: seconds of CPU, ratio, and ratio of the time that passes")
    for name, each in seconds.items():
        if not name.endswith(_PASSED):
            spreads = (
                _spread(_ratios(seconds, name + more, baseline + more)) for more in ("", _PASSED)
            )
            print(f"  {name:<24}{statistics.median(each):8.3f} s{'':3}{'   '.join(spreads)}")


def _spread(ratios: Sequence[float]) -> str:
    text = f"{statistics.median(ratios):7.2f} [{min(ratios):.2f}..{max(ratios):.2f}]"
    return f"{text:<22}"


def _ratios(seconds: Seconds, one: str, other: str) -> list[float]:
    return [a / b for a, b in zip(seconds[one], seconds[other], strict=True)]


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    folders = [os.path.abspath(folder) for folder in options.folder]
    verdicts: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        work = pathlib.Path(name)
        seconds = cpu_seconds(start_up(work), max(options.rounds, 5))
        print_table("start-up", seconds, "python -c pass")
        took = statistics.median(seconds["lint of one file"])
        held = "holds" if took <= 0.15 else "FAILS"
        verdicts.append(f"{held}  start-up: {took:.3f} s (at most 0.15 s)")
        if folders:
            files = python_files(folders)
            size = sum(path.stat().st_size for path in files) / 1e6
            seconds = cpu_seconds(whole_folders(folders, work), options.rounds)
            print_table(f"{len(files)} files, {size:.1f} MB", seconds, "ast.parse")
            verdicts += [goal.verdict(seconds) for goal in _WHOLE]
        if options.fixit:
            measures = beside_fixit(folders, work, options.every, options.fixit)
            seconds = cpu_seconds(measures, options.rounds)
            print_table("beside fixit", seconds, "lint")
            verdicts.append(_FIXIT.verdict(seconds))
    print("\n" + "\n".join(verdicts))
    return 0 if all(verdict.startswith("holds") for verdict in verdicts) else 1


_WHOLE = (Goal("the command beside ast.parse of all, CPU time", "lint", "ast.parse", most=0.8),)
_FIXIT = Goal("fixit with one rule beside lint", "fixit, one rule", "lint", least=100)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", action="append", default=[], help="may be given several times")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fixit", metavar="PYTHON", help="a Python that has fixit")
    parser.add_argument("--every", type=int, default=10, help="fixit sees each n-th file")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
