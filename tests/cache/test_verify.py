"""`jax-dist cache verify` on real programs: the right verdict and the right cause, row by row."""

import json
import os
import pathlib
import subprocess
from typing import NamedTuple

import pytest
import verdicts
from verdicts import PROGRAMS, STABLE, UNSTABLE, by_row, cli, expected, verify

from jax_dist import _compat

_ROWS = str(PROGRAMS / "stability_rows.py")
_CHANGING = str(PROGRAMS / "changing_program.py")
_ONE_OF_EACH_CAUSE = (
    "axis_name",
    "debug_print",
    "device_order",
    "function_name",
    "in_the_second_run_only",
    "partitioned",
    "plain",
    "random_np_capture",
    "random_operation",
    "random_python_scalar",
    "result_keys",
    "set_of_values",
)
_REWRITTEN = verdicts.REWRITTEN if _compat.CAN_REWRITE else ()


def _expected(rows):
    writes = not _compat.refuses_host_callbacks()
    return {row: expected(row, writes_callbacks=writes) for row in rows}


def test_one_row_of_each_cause_and_what_rewriting_makes_stable():
    rows = [*_ONE_OF_EACH_CAUSE, *_REWRITTEN]
    ran = verify(_ROWS, *rows, runs=2)

    assert by_row(ran, rows) == _expected(rows)
    assert ran.returncode == 1


@pytest.mark.slow
def test_every_row_in_three_processes():
    rows = [
        *verdicts.ALWAYS_HIT,
        *verdicts.HIT_ONCE_JAX_WRITES_CALLBACKS,
        *verdicts.IN_SOME_RUNS,
        *verdicts.UNSTABLE_BECAUSE,
        *_REWRITTEN,
    ]

    assert by_row(verify(_ROWS, *rows), rows) == _expected(rows)


def test_what_is_not_in_the_key_may_change(tmp_path):
    changes = ("lines", "path", "folder", "nans", "tracebacks", "dump")
    program = (verdicts.sys.executable, _CHANGING, str(tmp_path / "counter"))
    ran = cli("cache", "verify", "--runs", "2", "--", *program, *changes)

    assert ran.stdout.splitlines() == [
        "jit_step  stable, written, hit",
        "1 of 1 program is found again, in 2 runs.",
    ]
    assert ran.returncode == 0
    assert (tmp_path / "counter").read_text() == "2"


@pytest.mark.parametrize(
    ("change", "cause", "details"),
    [
        pytest.param(
            "default_flag",
            "xla-flags",
            ["--xla_cpu_enable_fast_math=false only in the second"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "argument",
            "xla-flags",
            ["--xla_cpu_enable_fast_math=true only in the second"],
            marks=pytest.mark.slow,
        ),
        ("flag", "xla-flags", ["--xla_cpu_enable_fast_math=true only in the second"]),
    ],
)
def test_what_stands_around_the_program_is_told(tmp_path, change, cause, details):
    ran = verify(_CHANGING, str(tmp_path / "counter"), change, runs=2)

    [step] = json.loads(ran.stdout)["functions"]
    found = [(each["cause"]["name"], each["details"]) for each in step["findings"]]
    assert (step["verdict"], found) == (UNSTABLE, [(cause, details)])


_OWN_DIRECTORY = """
import jax, sys, tempfile
jax.config.update("jax_compilation_cache_dir", {directory})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 9.0)
jax.jit(lambda x: x + 1)(1.0)
jax.jit(lambda x: x + 2)(1.0)
"""


def test_a_directory_that_is_another_in_each_run_is_told(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(_OWN_DIRECTORY.format(directory="tempfile.mkdtemp()"))
    ran = verify(str(program), runs=2)

    functions = json.loads(ran.stdout)["functions"]
    found = [
        (found["cause"]["name"], each["programs"])
        for each in functions
        for found in each["findings"]
    ]
    assert found == [("cache-directory", 2)]
    assert ran.returncode == 1


def test_a_cache_that_is_off_is_told(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import jax\njax.jit(lambda x: x + 1)(1.0)\n")
    ran = verify(str(program), runs=2, JAX_ENABLE_COMPILATION_CACHE="0")

    assert by_row(ran, ["_lambda"]) == {"_lambda": ("stable, never written", ["cache-off"])}


@pytest.mark.slow
def test_ranks_above_the_first_never_write(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "from jax_dist.testing import run_processes\n"
        "def work():\n"
        "    import jax, numpy as np\n"
        "    def step(x):\n"
        "        return x + 1\n"
        "    jax.jit(step)(np.ones(2))\n"
        "if __name__ == '__main__':\n"
        "    for outcome in run_processes(work, processes=2, cpu_devices=2, timeout=60):\n"
        "        assert outcome.error is None\n"
    )
    ran = verify(str(program), runs=2)

    functions = json.loads(ran.stdout)["functions"]
    assert [
        (each["function"], each["verdict"], [found["cause"]["name"] for found in each["findings"]])
        for each in functions
        if each["function"] == "jit_step"
    ] in (
        [("jit_step", STABLE, []), ("jit_step", "stable, never written", ["rank"])],
        [("jit_step", "stable, never written", ["rank"]), ("jit_step", STABLE, [])],
    )


def test_a_program_that_fails_is_shown_and_not_run_again(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import pathlib, sys\nprint('nearly')\nraise SystemExit('boom')\n")
    ran = verify(str(program), runs=3)

    assert ran.returncode == 1
    assert ran.stderr.splitlines() == [
        "nearly",
        "boom",
        "jax-dist cache verify: run 1 ended with exit code 1",
    ]
    assert [run["exit_code"] for run in json.loads(ran.stdout)["runs"]] == [1]


def test_a_program_that_takes_too_long_is_stopped(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import time\ntime.sleep(60)\n")
    command = ("--", verdicts.sys.executable, str(program))
    ran = cli("cache", "verify", "--timeout", "1", *command)

    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1] == "jax-dist cache verify: run 1 was stopped after --timeout"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "verify needs a command: jax-dist cache verify -- python train.py"),
        (("--", "/no/such/program"), "/no/such/program cannot be started: No such file or"),
        (("--runs", "1", "--", "true"), "must be a whole number from 2 to 1000, not '1'"),
        (("--timeout", "0", "--", "true"), "must be more than 0"),
    ],
)
def test_misuse(arguments, message):
    ran = cli("cache", "verify", *arguments)

    assert ran.returncode == 2
    assert message in ran.stderr


_COMPILES_IN_ITS_FIRST_RUN = """
import pathlib, sys
if not pathlib.Path(sys.argv[1]).exists():
    import jax
    jax.jit(abs)(1.0)
    pathlib.Path(sys.argv[1]).touch()
"""


def test_a_command_that_shows_no_program_proves_nothing(tmp_path):
    program, ran = tmp_path / "program.py", tmp_path / "ran"
    program.write_text(_COMPILES_IN_ITS_FIRST_RUN)
    without_recorder = (verdicts.sys.executable, "-I", str(program), str(ran))
    for command in ("true",), without_recorder:
        told = cli("cache", "verify", "--runs", "2", "--", *command)

        assert (told.returncode, told.stdout) == (
            1,
            "Nothing was compiled, so nothing is proved: does the command run Python, without -E, "
            "-I or -S, and does that import jax?\n",
        )
    assert ran.exists()


# --- the text


class _Told(NamedTuple):
    program: pathlib.Path
    own: pathlib.Path
    lines: list[str]


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> _Told:
    """Of a program that finds no jax_dist, and has a directory of its own for the cache."""
    folder = tmp_path_factory.mktemp("told")
    own = folder / "own"
    own.mkdir()
    program = folder / "program.py"
    program.write_text(
        "import os, jax, numpy as np\n"
        f"jax.config.update('jax_compilation_cache_dir', {str(own)!r})\n"
        "jax.config.update('jax_persistent_cache_min_compile_time_secs', 9.0)\n"
        "table = np.full(3, os.getpid(), np.float32) + np.arange(3, dtype=np.float32)\n"
        "def step(x):\n"
        "    return x + table\n"
        "jax.jit(step)(np.ones(3, np.float32))\n"
        "jax.jit(abs)(1.0)\n"
    )
    command = [verdicts.sys.executable, "-m", "jax_dist", "cache", "verify", "--runs", "2", "--"]
    ran = subprocess.run(
        [*command, verdicts.sys.executable, program],
        cwd=verdicts.ROOT,  # it finds us here, and the program does not
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1, ran.stderr
    return _Told(program, own, ran.stdout.splitlines())


def test_the_program_needs_no_jax_dist(told):
    assert "jit_abs   stable, written, hit" in told.lines


def test_the_programs_own_directory_is_left_alone(told):
    assert list(told.own.iterdir()) == []


def test_the_text_names_function_cause_place_and_remedy(told):
    stable, function, why, detail, help_, summary = told.lines

    assert (stable, function) == ("jit_abs   stable, written, hit", "jit_step  unstable")
    assert why.startswith("    JXD401 captured-array: An array inside the program has other values")
    assert detail.startswith(f"      {told.program}:6: tensor<3xf32>: ")
    assert help_ == (
        "    help: Pass it as an argument, or let jax_dist.rewrite or jax_dist.pmap lift it."
    )
    assert summary == "1 of 2 programs are found again, in 2 runs."
