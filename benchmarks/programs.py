"""Real programs, migrated by the tool and run on 8 simulated devices before and after.

    python benchmarks/programs.py                              # makes the environments; an hour
    python benchmarks/programs.py --only evojax brax-ppo --to jax jax-one-process
    python benchmarks/programs.py --only brax-ppo --restored
    python benchmarks/programs.py --python evojax=/venvs/evo/bin/python --json programs.json

Of each program it copies the installed package (and, for test suites, the tests of its repository)
into a work folder, migrates the copy by `jax-dist migrate --write`, and runs the same command
before and after, recorded as `jax-dist migrate --verify` records it. Printed are the numbers that
the programs compute against those expected, the calls of mapped functions, the devices that hold
their results, and the verdict. Most of the programs fail on today's jax before the migration: the
expected numbers are then those of the maintainers' own migration, or of the removed function put
back; with --restored it is put back for the run before, so that all calls are compared. It returns
1 where a number is not as expected, or something differs.
"""

import argparse
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax_dist.migrate.verify.ledger import MigrationVerification

HERE = Path(__file__).resolve()
ROOT = HERE.parents[1]
DEVICES = 8
_JAX = ("jax==0.10.2", "jaxlib==0.10.2")  # the last for Python 3.11; the numbers are its own
_FOR_TESTS = (*_JAX, "equinox==0.13.8", "flax==0.12.8", "chex==0.1.92", "optax", "pytest")
# Equinox's tests draw their random keys from here.
_SEEDED = """\
import random, sys, pytest
random.seed(0)
sys.exit(pytest.main(["-q", "tests/test_pmap.py"]))
"""
_RESULT = re.compile(r"^RESULT (\S+)$", re.MULTILINE)
_PASSED = re.compile(r"(\d+) passed|Ran (\d+) tests")


def evojax_cartpole() -> float:
    """PGPE on CartPole, 4 iterations: the sum of the best parameters."""
    import numpy as np
    from evojax import Trainer
    from evojax.algo import PGPE
    from evojax.policy.mlp import MLPPolicy
    from evojax.task.cartpole import CartPoleSwingUp

    tasks = {"train_task": False, "test_task": True}
    tasks = {name: CartPoleSwingUp(test=test, harder=False) for name, test in tasks.items()}
    for task in tasks.values():
        task.max_steps = 100
    sizes = tasks["train_task"].obs_shape[0], tasks["train_task"].act_shape[0]
    policy = MLPPolicy(input_dim=sizes[0], hidden_dims=[16], output_dim=sizes[1])
    solver = PGPE(
        pop_size=64,
        param_size=policy.num_params,
        optimizer="adam",
        center_learning_rate=0.05,
        seed=0,
    )
    trainer = Trainer(
        policy=policy,
        solver=solver,
        **tasks,
        max_iter=4,
        log_interval=2,
        test_interval=4,
        n_repeats=2,
        n_evaluations=16,
        seed=0,
        log_dir=tempfile.mkdtemp(),
    )
    trainer.run(demo_mode=False)
    return float(np.asarray(solver.best_params).sum())


def brax_ppo() -> float:
    from brax.training.agents.ppo import train

    return _brax(
        train.train,
        num_timesteps=4096,
        num_envs=32,
        learning_rate=3e-4,
        entropy_cost=1e-2,
        discounting=0.95,
        unroll_length=5,
        batch_size=32,
        num_minibatches=2,
        num_updates_per_batch=2,
        normalize_observations=True,
        reward_scaling=10,
        seed=2,
    )


def brax_sac() -> float:
    from brax.training.agents.sac import train

    return _brax(
        train.train,
        num_timesteps=2048,
        num_envs=16,
        batch_size=32,
        grad_updates_per_step=2,
        min_replay_size=256,
        max_replay_size=4096,
        seed=1,
    )


def brax_apg() -> float:
    from brax.training.agents.apg import train

    return _brax(train.train, num_envs=16, policy_updates=4, horizon_length=8, seed=1)


def _brax(train: Callable, **options: object) -> float:
    """Trains on the environment `fast`: the sum of the absolute values of all parameters."""
    import jax
    import numpy as np
    from brax import envs

    environment = envs.get_environment("fast")
    _, params, _ = train(environment=environment, episode_length=32, num_evals=2, **options)
    arrays = (leaf for leaf in jax.tree.leaves(params) if hasattr(leaf, "dtype"))
    return sum(float(np.abs(np.asarray(leaf, dtype=np.float64)).sum()) for leaf in arrays)


def numpyro_chains() -> float:
    """NUTS, 8 chains in parallel: the mean of one parameter."""
    import jax
    import numpy as np
    import numpyro
    from numpyro import distributions
    from numpyro.infer import MCMC, NUTS

    def model(data: np.ndarray) -> None:
        mean = numpyro.sample("mean", distributions.Normal(0, 5))
        scale = numpyro.sample("scale", distributions.HalfNormal(2))
        numpyro.sample("data", distributions.Normal(mean, scale), obs=data)

    data = np.random.RandomState(0).normal(1.5, 0.7, size=50)
    chains = MCMC(
        NUTS(model),
        num_warmup=100,
        num_samples=100,
        num_chains=DEVICES,
        chain_method="parallel",
        progress_bar=False,
    )
    chains.run(jax.random.PRNGKey(0), data)
    return float(np.asarray(chains.get_samples()["mean"]).mean())


@dataclasses.dataclass(frozen=True)
class Program:
    """Something that runs, and what it is made of."""

    name: str
    environment: str  # programs of one name share one
    requirements: tuple[str, ...]
    package: str  # that is migrated
    run: Callable[[], float] | None = None  # what it does; or
    command: tuple[str, ...] = ()  # the arguments of Python, in the folder of `sources`
    sources: str = ""  # "url commit folder": tests that are not installed; migrated too
    expected: float | None = None
    targets: tuple[str, ...] = ()  # that make sense; (): all


PROGRAMS = (
    Program(
        "evojax",
        "evojax",
        (*_JAX, "evojax==0.2.17", "flax==0.12.8"),
        "evojax",
        run=evojax_cartpole,
        expected=0.14947664737701416,
    ),
    *(
        Program(f"brax-{name}", "brax", (*_JAX, "brax==0.14.2"), "brax", run=run, expected=number)
        for name, run, number in (
            ("ppo", brax_ppo, 19466.833129031205),
            ("sac", brax_sac, 5950.900037051551),
            ("apg", brax_apg, 4261.557774362489),
        )
    ),
    Program(
        "numpyro",
        "numpyro",
        (*_JAX, "numpyro==0.22.0", "pytest"),
        "numpyro",
        run=numpyro_chains,
    ),
    Program(
        "numpyro-tests",
        "numpyro",
        (*_JAX, "numpyro==0.22.0", "pytest"),
        "numpyro",
        command=("-m", "pytest", "-q", "infer/test_mcmc.py", "-k", "pmap or chain or parallel"),
        sources="https://github.com/pyro-ppl/numpyro 0b935d488056ae1775b4ab05cbe2812f51f21a4f test",
    ),
    Program(
        "equinox-tests",
        "tests",
        _FOR_TESTS,
        "equinox",
        command=("-c", _SEEDED),
        sources="https://github.com/patrick-kidger/equinox "
        "9336d820b2ef66b360fc6cb3611b3da5cefbb14d tests",
        expected=20,
    ),
    *(
        Program(
            name,
            "tests",
            _FOR_TESTS,
            "flax",
            command=("-m", "pytest", "-q", "-p", "no:warnings", *tests),
            sources="https://github.com/google/flax 18f8f311c275d57f46d95e41b15aa97b454754c0 tests",
            expected=number,
        )
        for name, tests, number in (
            ("flax-tests", ("tests/jax_utils_test.py",), 104),  # replicate and the like; no pmap
            ("flax-nnx-tests", ("tests/nnx/transforms_test.py", "-k", "pmap or Pmap"), 17),
        )
    ),
    *(
        Program(
            f"chex-{name}",
            "tests",
            _FOR_TESTS,
            "chex",
            command=("-m", f"chex._src.{name}_test"),
            expected=number,
            targets=targets,
        )
        for name, number, targets in (
            ("fake", 34, ("jax_dist",)),  # of what replaces jax.pmap, and no shard_map
            ("variants", 124, ()),
            ("asserts_chexify", 25, ()),
        )
    ),
)


TARGETS = {  # by name, the options of `jax-dist migrate`
    "jax_dist": ("--to", "jax_dist"),
    "jax": ("--to", "jax"),
    "jax-one-process": ("--to", "jax", "--one-process"),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One program, migrated to one target."""

    program: str
    target: str
    migrated: str  # "7 of 7 places"
    before: str
    after: str
    number_before: float | None
    number_after: float | None
    expected: float | None
    functions: int
    calls_before: int
    calls: int
    devices: int
    verdict: str
    text: str  # what the verification says

    @property
    def as_expected(self) -> bool:
        expected = self.number_before if self.expected is None else self.expected
        called = self.calls > 0 or self.calls_before == 0
        return self.number_after == expected and self.verdict != "different" and called


def main() -> int:
    options = _options()
    if options.run:
        if options.restored:
            _restore()
        program = next(program for program in PROGRAMS if program.name == options.run)
        assert program.run is not None
        print("RESULT", repr(program.run()))
        return 0
    work = Path(options.work or tempfile.mkdtemp(prefix="jax_dist_programs_"))
    work.mkdir(parents=True, exist_ok=True)
    rows = []
    for program in PROGRAMS:
        if options.only and program.name not in options.only:
            continue
        python = _python(program, dict(options.python), work)
        for target in (each for each in options.to if each in (program.targets or options.to)):
            row = _row(program, target, python, options, work)
            rows.append(row)
            print(row.text, "\n", flush=True)
    _print_table(rows)
    if options.json:
        Path(options.json).write_text(json.dumps([dataclasses.asdict(row) for row in rows]))
    return 0 if all(row.as_expected for row in rows) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    pair = lambda text: tuple(text.split("=", 1))
    parser.add_argument("--only", nargs="*", choices=[program.name for program in PROGRAMS])
    parser.add_argument("--to", nargs="*", choices=tuple(TARGETS), default=("jax_dist", "jax"))
    parser.add_argument("--work", help="a folder for copies and environments; kept")
    parser.add_argument("--python", nargs="*", type=pair, default=(), metavar="ENVIRONMENT=PATH")
    parser.add_argument(
        "--sources",
        nargs="*",
        type=pair,
        default=(),
        metavar="PROGRAM=FOLDER",
        help="checkouts to use instead of cloning",
    )
    parser.add_argument("--restored", action="store_true", help="put back what jax removed")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--run", help=argparse.SUPPRESS)  # what the programs' own Python is told
    return parser.parse_args()


def _restore() -> None:
    """What the programs use of older versions of jax; the migrated ones do not."""
    import jax
    from jax._src import api

    jax.device_put_replicated = api.device_put_replicated
    jax.tree_map = jax.tree.map


def _row(
    program: Program, target: str, python: Path, options: argparse.Namespace, work: Path
) -> Row:
    from jax_dist.migrate.verify import comparison, sandbox  # programs run without jax_dist

    folder = work / f"{program.name}-{target}"
    shutil.rmtree(folder, ignore_errors=True)
    _copy(program, python, dict(options.sources), folder / "before", work)
    shutil.copytree(folder / "before", folder / "after")
    migrated = _migrate(folder / "after", target)
    before = dict(_files(folder / "before"))
    after = dict(_files(folder / "after"))  # with the helper modules, which are new
    changed = [path for path in after if before.get(path) != after[path]]
    own = ["-P", str(HERE), "--run", program.name, *(["--restored"] * options.restored)]
    command = [str(python), *(program.command or own)]
    with _in(folder / "before"):
        texts = ({path: each[path] for path in changed if path in each} for each in (before, after))
        with sandbox.stage(command, changed, devices=DEVICES, timeout=1800) as stage:
            runs = [stage.recorded(each, changed) for each in texts]
            found = comparison.judged(command, *runs, files=changed)
    return Row(
        program=program.name,
        target=target,
        migrated=migrated,
        before=str(found.before),
        after=str(found.after),
        number_before=_number(found.before.output),
        number_after=_number(found.after.output),
        expected=program.expected,
        functions=found.after.functions,
        calls_before=found.before.calls,
        calls=found.after.calls,
        devices=found.after.devices,
        verdict=str(found.verdict),
        text="\n".join([f"{program.name} --to {target}: {found.verdict}", *_said(found)]),
    )


def _said(found: "MigrationVerification") -> Iterator[str]:
    """What differs and what was not compared, a line each."""
    for site in found.sites:
        place = f"{site.file}:{site.line} {site.function}"
        yield f"  {place}: {site.compared} of {site.calls_before} calls compared"
        yield from (f"    different: {problem}" for problem in site.problems)
    yield from (f"  different: {problem}" for problem in found.problems)
    yield from (f"  not compared: {reason}" for reason in found.unproven)


def _number(output: str) -> float | None:
    """What a program computed; of a test suite, how many tests passed."""
    result = _RESULT.search(output)
    if result is not None:
        return float(result[1])
    passed = _PASSED.search(output)
    return None if passed is None else float(passed[1] or passed[2])


def _copy(
    program: Program, python: Path, checkouts: dict[str, str], folder: Path, work: Path
) -> None:
    """The installed package, and the tests beside it; only these are migrated."""
    command = f"import {program.package} as p; print(p.__path__[0])"
    found = subprocess.run(
        [python, "-c", command], check=True, capture_output=True, text=True, cwd=work
    )
    installed = Path(found.stdout.splitlines()[-1])
    caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(installed, folder / program.package, ignore=caches)
    if program.sources:
        url, commit, part = program.sources.split()
        checkout = checkouts.get(program.name) or _cloned(url, commit, work)
        # The content of `test`, or the package `tests`: as the command names its files.
        inside = folder if part == "test" else folder / part
        shutil.copytree(Path(checkout) / part, inside, dirs_exist_ok=True, ignore=caches)


def _cloned(url: str, commit: str, work: Path) -> Path:
    folder = work / "sources" / url.rpartition("/")[2]
    if not folder.exists():
        subprocess.run(["git", "clone", "-q", "--filter=blob:none", url, folder], check=True)
    subprocess.run(["git", "-C", folder, "checkout", "-q", commit], check=True)
    return folder


def _migrate(folder: Path, target: str) -> str:
    """Migrates all files of a folder; says how many places were done."""
    report = folder.parent / "report.json"
    command = [sys.executable, "-m", "jax_dist", "migrate", str(folder)]
    command += [*TARGETS[target], "--write", "--report", str(report)]
    ended = subprocess.run(command, env=_environment(), check=False, capture_output=True, text=True)
    if ended.returncode not in (0, 1):
        raise SystemExit(f"jax-dist migrate failed:\n{ended.stderr}")
    places = [place["status"] for place in _places(json.loads(report.read_text()))]
    return f"{places.count('done')} of {len(places)}"


def _places(report: object) -> Iterator[dict]:
    """Of all files, wherever the report lists them."""
    if isinstance(report, dict):
        if "status" in report:
            yield report
        report = list(report.values())
    if isinstance(report, list):
        for part in report:
            yield from _places(part)


def _files(folder: Path) -> Iterator[tuple[Path, bytes]]:
    for path in sorted(folder.rglob("*.py")):
        yield path.relative_to(folder), path.read_bytes()


class _in:  # noqa: N801 - reads as a word: with _in(folder)
    """The current folder, with what lies there and jax_dist importable by programs."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._before = (os.getcwd(), os.environ.get("PYTHONPATH"))

    def __enter__(self) -> None:
        os.chdir(self._folder)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(self._folder), str(ROOT)])

    def __exit__(self, *error: object) -> None:
        folder, path = self._before
        os.chdir(folder)
        os.environ.pop("PYTHONPATH")
        if path is not None:
            os.environ["PYTHONPATH"] = path


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def _python(program: Program, given: dict[str, str], work: Path) -> Path:
    if program.environment in given:
        return Path(given[program.environment]).absolute()
    folder = work / "environments" / program.environment
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *program.requirements], check=True)
    return python


def _print_table(rows: Sequence[Row]) -> None:
    head = ("program", "to", "places", "before", "after", "number", "expected", "calls")
    lines = [(*head, "devices", "verdict", "")]
    for row in rows:
        expected = row.number_before if row.expected is None else row.expected
        lines.append(
            (
                row.program,
                row.target,
                row.migrated,
                row.before,
                row.after,
                repr(row.number_after),
                repr(expected),
                f"{row.calls} of {row.functions}",
                str(row.devices),
                row.verdict,
                "" if row.as_expected else "!",
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip())


if __name__ == "__main__":
    sys.exit(main())
