"""`jax-dist cache verify` on real programs: the verdict and the cause of each."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from jax_dist._cache.explain import Cause
from jax_dist._cache.record import ProgramRecord
from jax_dist._cache.verify import judge
from jax_dist._compat import CACHES_HOST_CALLBACKS

ROOT = pathlib.Path(__file__).parents[2]
STABLE, UNSTABLE = "stable, written, hit", "unstable"
UNWRITTEN, SOMETIMES = "stable, never written", "not in every run"

_ROWS = {  # the verdict and the causes
    "plain": (STABLE, []),
    "partitioned_rewritten": (STABLE, []),
    "printing": (STABLE, []) if CACHES_HOST_CALLBACKS else (UNWRITTEN, ["host-callback"]),
    "in_one_run": (SOMETIMES, ["not-in-every-run"]),
    "captured": (UNSTABLE, ["captured-array"]),
    "scalar": (UNSTABLE, ["traced-value"]),
    "set_of_values": (UNSTABLE, ["order"]),
    "order_of_axes": (UNSTABLE, ["order"]),
    "operation": (UNSTABLE, ["unknown"]),
    "shapes": (UNSTABLE, ["shapes"]),
    "made_up_name": (UNSTABLE, ["name"]),
    "axis_name": (UNSTABLE, ["name"]),
    "device_order": (UNSTABLE, ["settings"]),
    "partitioned": (UNSTABLE, ["custom-partitioning"]),
}


def verify(*arguments: object, **variables: str) -> subprocess.CompletedProcess:
    """Run `jax-dist cache verify` where it finds jax_dist, and the program does not."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PYTHONPATH")}
    return subprocess.run(
        [sys.executable, "-m", "jax_dist", "cache", "verify", *map(str, arguments)],
        cwd=ROOT,
        env={**inherited, "NO_COLOR": "1", **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def read(process: subprocess.CompletedProcess) -> dict[str, tuple[str, list[str]]]:
    """Return the verdict and the causes by function."""
    assert process.returncode in (0, 1), process.stderr
    return {
        item["function"]: (item["verdict"], [cause["name"] for cause in item["causes"]])
        for item in json.loads(process.stdout)["verdicts"]
    }


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory) -> dict[str, tuple[str, list[str]]]:
    program = pathlib.Path(__file__).parent / "programs" / "stability_rows.py"
    mark = tmp_path_factory.mktemp("rows") / "mark"
    found = read(verify("--json", "--", sys.executable, program, mark, *_ROWS))
    return {name.partition("_name_")[0]: verdict for name, verdict in found.items()}


@pytest.mark.parametrize("name", _ROWS)
def test_each_program_gets_its_verdict_and_causes(verdicts, name):
    assert verdicts["jit_made_up" if name == "made_up_name" else f"jit_{name}"] == _ROWS[name]


_PROGRAM = """
import os, pathlib, sys, tempfile
mark = pathlib.Path(sys.argv[1])
is_first = not mark.exists()
mark.touch()
{change}
import jax
{config}
def step(x):
    return x + 1
jax.jit(step)(1.0)
"""


def _verify_change(folder: pathlib.Path, change: str = "", config: str = "", **variables: str):
    program = folder / "program.py"
    program.write_text(_PROGRAM.format(change=change, config=config))
    return verify("--json", "--", sys.executable, program, folder / "mark", **variables)


_FLAG = "--xla_cpu_enable_fast_math=true"
_FOLDER = "jax.config.update('jax_compilation_cache_dir'"


@pytest.mark.parametrize(
    ("change", "config", "verdict"),
    [
        (f"os.environ['XLA_FLAGS'] = '' if is_first else '{_FLAG}'", "", (UNSTABLE, ["settings"])),
        (f"sys.argv += [] if is_first else ['{_FLAG}']", "", (UNSTABLE, ["settings"])),
        ("os.environ['XLA_FLAGS'] = f'--xla_dump_to={tempfile.mkdtemp()}'", "", (STABLE, [])),
        ("os.chdir(tempfile.mkdtemp())", "", (STABLE, [])),
        ("", f"{_FOLDER}, tempfile.mkdtemp())", (UNSTABLE, ["settings"])),
    ],
)
def test_settings_that_differ_between_runs(tmp_path, change, config, verdict):
    assert read(_verify_change(tmp_path, change, config))["jit_step"] == verdict


def test_the_own_cache_of_the_program_is_left_alone(tmp_path):
    own = tmp_path / "own"
    config = f"{_FOLDER}, {str(own)!r})"

    assert read(_verify_change(tmp_path, config=config)) == {"jit_step": (STABLE, [])}
    assert not own.exists()


def test_a_program_that_looks_nothing_up_proves_nothing(tmp_path):
    process = _verify_change(tmp_path, JAX_ENABLE_COMPILATION_CACHE="0")
    assert (process.returncode, read(process)) == (1, {})

    process = verify("--", "true")
    assert process.returncode == 1
    assert process.stdout.startswith("Nothing was looked up in a cache: does the command run ")


_FAILURES = [  # the program, options, and the last lines
    ("print('nearly')\nraise SystemExit('boom')", (), ["nearly", "boom", "ended with exit code 1"]),
    ("import time\ntime.sleep(60)", ("--timeout", 1), ["was stopped after --timeout"]),
    ("import os\nos.kill(os.getpid(), 9)", (), ["ended with signal SIGKILL"]),
]


@pytest.mark.parametrize(("body", "options", "lines"), _FAILURES)
def test_a_run_that_fails_is_shown_and_not_repeated(tmp_path, body, options, lines):
    program = tmp_path / "program.py"
    program.write_text(body)
    process = verify(*options, "--", sys.executable, program)

    assert process.returncode == 1
    last = f"jax-dist cache verify: run 1 {lines[-1]}"
    assert process.stderr.splitlines() == [*lines[:-1], last]


def test_a_command_that_cannot_be_started():
    process = verify("--", "/no/such/program")

    assert process.returncode == 2
    assert "/no/such/program cannot be started: there is no such program" in process.stderr
    assert verify().returncode == 2


def test_a_program_that_only_another_rank_compiled_is_never_written():
    program = ProgramRecord("jit_f", "a", process=1, settings={"cache directory": [""]}, lines=[])
    (verdict,) = judge([program], [program])

    assert (verdict.verdict, verdict.causes) == (UNWRITTEN, (Cause("rank"),))
