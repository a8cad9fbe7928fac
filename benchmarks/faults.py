"""Attacks what writes files, opens ports or ends processes, and counts what survived.

    python benchmarks/faults.py                         half an hour; for every night
    python benchmarks/faults.py --minutes 3 kills junk  some of it, for a while

Nothing is simulated: real processes die, real caches are damaged, real connections are
opened. Each attack has an equal part of the time, and ends with the trial that it is at; with
another seed it draws other moments. Prints the table of SECURITY.md. Exit code 1: something did not
survive.
"""

import argparse
import ast
import contextlib
import dataclasses
import io
import logging
import pathlib
import random
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Generator
from typing import TypeAlias

import jax
import numpy as np

_ROOT = pathlib.Path(__file__).parents[1]
for _folder in ("cache", "launch", "multihost"):
    sys.path.insert(0, str(_ROOT / "tests" / _folder))
import cache_runs  # noqa: E402  # beside the tests, which check what this measures
import killing  # noqa: E402
import strangers  # noqa: E402

from jax_dist.commands import cli  # noqa: E402


@dataclasses.dataclass
class Tried:
    """What an attack came to."""

    trials: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)


# For each of some trials, what did not survive; None where all did. There is no end to them.
Trials: TypeAlias = Generator[list[str | None], None, None]


# ---- one rank dies


def kills(chance: random.Random) -> Trials:
    """a rank of 2 or 4 dies, in 12 ways: the end comes within 30 s, with its name and exit code"""
    while True:
        ranks = chance.choice([2, 2, 4])
        death = killing.one_death(
            ranks=ranks,
            rank=chance.randrange(ranks),
            how=chance.choice(killing.BY_ITSELF + killing.BY_SIGNAL),
            delay=chance.choice([0.3, 1, 3, 6]) * chance.uniform(0.1, 1.5),
        )
        yield [f"{death}: {death.faults()}" if death.faults() else None]


def restarts(chance: random.Random) -> Trials:
    """SIGKILL of a rank of `launch --restarts`: the end is to the bit that of a quiet run"""
    with tempfile.TemporaryDirectory() as name:
        quiet = _folder_in(name, "quiet")
        killing.run(quiet, steps=60, every=5, kills=0, seed=0, timeout=300)
        expected = np.load(quiet / "result.npy").tobytes()
        while True:
            seed = chance.randrange(1 << 30)
            folder = _folder_in(name, str(seed))
            run = killing.run(folder, steps=60, every=5, kills=10, seed=seed, timeout=600)
            is_same = run.code == 0 and np.load(folder / "result.npy").tobytes() == expected
            if run.lost or not is_same:
                yield [f"seed {seed}: exit code {run.code}, {run.lost} lost"]
            else:
                yield [None] * run.kills


# ---- strangers


def junk(chance: random.Random) -> Trials:
    """a stranger at the port where processes meet, with and without the token: the others meet"""
    kinds = [(strangers.WITHOUT_A_GREETING, False), (strangers.AFTER_A_GREETING, True)]
    while True:
        said, greets = chance.choice(kinds)
        token = chance.choice([b"", b"a secret"])
        names = [chance.choice(list(said)) for _ in range(chance.choice([1, 1, 3, 30]))]
        # Whoever knows the token and says what a rank would say is one: that stays as it is.
        data = [said[name] if greets else _mutated(chance, said[name]) for name in names]
        meets = strangers.ranks_meet_beside(data, token=token, greets=greets)
        yield [None if meets else f"{names}, token {token!r}"]


# ---- files


def damage(chance: random.Random) -> Trials:
    """a damaged or swapped cache entry: right numbers, and found again after one run"""
    functions = ["one", "two"]
    with tempfile.TemporaryDirectory() as name:
        folder = _folder_in(name, "cache")
        expected = cache_runs.run(folder, functions=functions)["values"]
        while True:
            paths = [cache_runs.entry_of(folder, function) for function in functions]
            how = _damage(chance, *paths)
            after = cache_runs.run(folder, functions=functions)
            last = cache_runs.run(folder, functions=functions)
            is_right = after["values"] == last["values"] == expected
            is_found = all(last["hits"].values())
            yield [None if is_right and is_found else f"{how}: {after}, {last}"]


def _damage(chance: random.Random, one: pathlib.Path, other: pathlib.Path) -> str:
    data = one.read_bytes()
    how = chance.choice(["bits", "cut", "swapped", "zeros", "random", "bomb", "folder", "loop"])
    if how == "swapped":
        one.write_bytes(other.read_bytes())
        other.write_bytes(data)
    elif how in ("folder", "loop"):
        one.unlink()
        one.mkdir() if how == "folder" else one.symlink_to(one.name)
    else:
        one.write_bytes(
            {
                "bits": lambda: _mutated(chance, data),
                "cut": lambda: data[: chance.randrange(len(data))],
                "zeros": lambda: bytes(len(data)),
                "random": lambda: chance.randbytes(len(data)),
                "bomb": lambda: zlib.compress(bytes(100_000_000)),
            }[how]()
        )
    return how


# ---- sources


def sources(chance: random.Random) -> Trials:
    """a mutated source, `lint --fix` and `migrate --write`: no fault, and what parsed still does"""
    known = sorted([*_ROOT.glob("tests/codemod/**/*.py"), *_ROOT.glob("examples/**/*.py")])
    with tempfile.TemporaryDirectory() as name:
        path = pathlib.Path(name, "source.py")
        while True:
            before = _mutated_source(chance, chance.choice(known).read_text(), known)
            for command in (["lint", "--fix", "--unsafe-fixes"], ["migrate", "--write"]):
                path.write_text(before)
                said = _said(*command, str(path))
                after = path.read_bytes()
                is_broken = _parses(before.encode()) and not _parses(after)
                is_fault = "is a fault of jax-dist" in said
                fails = is_broken or is_fault
                yield [f"{command}: {said[-500:]}\n{before}" if fails else None]


def _said(*arguments: str) -> str:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.suppress(SystemExit):
        cli.main(arguments, out=out, err=err)
    return err.getvalue()


def _mutated_source(chance: random.Random, text: str, known: list[pathlib.Path]) -> str:
    lines = text.splitlines(keepends=True) or ["\n"]
    for _ in range(chance.randint(1, 5)):
        place = chance.randrange(len(lines))
        match chance.randrange(5):
            case 0:
                del lines[place]
            case 1:
                lines.insert(place, chance.choice(lines))
            case 2:
                others = chance.choice(known).read_text().splitlines(keepends=True)
                lines.insert(place, chance.choice(others or ["\n"]))
            case 3:
                lines[place] = lines[place].replace("    ", "\t")
            case 4:
                cut = chance.randrange(len(lines[place]) + 1)
                odd = chance.choice(["(", ")", "'", '"""', "\\", "#", "é", ":", ";", "f'{", "]"])
                lines[place] = lines[place][:cut] + odd + lines[place][cut:]
        lines = lines or ["\n"]
    return "".join(lines)


def _parses(source: bytes) -> bool:
    try:
        ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


# ---- all of it


def _mutated(chance: random.Random, data: bytes) -> bytes:
    """Some of its bits are flipped."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 3) if data else 0):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _folder_in(folder: str, name: str) -> pathlib.Path:
    found = pathlib.Path(folder, name)
    found.mkdir()
    return found


_ATTACKS = {each.__name__: each for each in (kills, restarts, junk, damage, sources)}


def _attack(trials: Trials, seconds: float) -> Tried:
    tried, until = Tried(), time.monotonic() + seconds
    while time.monotonic() < until or not tried.trials:
        ended = next(trials)
        failures = [each for each in ended if each is not None]
        tried.trials += len(ended)
        tried.failures += failures
        for failure in failures:
            print(failure, file=sys.stderr, flush=True)
    trials.close()
    return tried


def main() -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("attacks", nargs="*", choices=[[], *_ATTACKS], metavar="ATTACK")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    logging.getLogger("jax_dist").setLevel(logging.ERROR)  # strangers are named, as they should be
    names = options.attacks or list(_ATTACKS)
    print(f"jax {jax.__version__}, Python {sys.version.split()[0]}, seed {options.seed}\n")
    print("| attack | tried | survived | failed |\n|---|---|---|---|", flush=True)
    code = 0
    for name in names:
        attack: Callable[[random.Random], Trials] = _ATTACKS[name]
        trials = attack(random.Random(f"{options.seed} {name}"))
        tried = _attack(trials, 60 * options.minutes / len(names))
        failed = len(tried.failures)
        print(
            f"| {attack.__doc__} | {tried.trials} | {tried.trials - failed} | {failed} |",
            flush=True,
        )
        code |= bool(failed)
    return code


if __name__ == "__main__":
    sys.exit(main())
