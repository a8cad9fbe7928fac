"""`jax-dist cache verify` on real programs: the right verdict and the right cause, row by row."""

import json
import os
import subprocess

import jax
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
    "partitioned",
    "plain",
    "random_np_capture",
    "random_operation",
    "random_python_scalar",
    "result_keys",
    "set_of_values",
)
_BY_REWRITE = {
    "partitioned": (UNSTABLE, ["custom-partitioning"]),
    "partitioned_rewritten": (STABLE, []),
    "random_np_capture": (UNSTABLE, ["captured-array"]),
    "capture_rewritten": (STABLE, []),
}


def _expected(rows):
    writes = not _compat.refuses_host_callbacks()
    return {row: expected(row, writes_callbacks=writes) for row in rows}


def test_one_row_of_each_cause():
    ran = verify(_ROWS, *_ONE_OF_EACH_CAUSE, runs=2)

    assert by_row(ran, _ONE_OF_EACH_CAUSE) == _expected(_ONE_OF_EACH_CAUSE)
    assert ran.returncode == 1


@pytest.mark.slow
def test_every_row_in_three_processes():
    rows = [
        *verdicts.ALWAYS_HIT,
        *verdicts.HIT_ONCE_JAX_WRITES_CALLBACKS,
        *verdicts.UNSTABLE_BECAUSE,
        *(verdicts.REWRITTEN if _compat.CAN_REWRITE else ()),
    ]

    assert by_row(verify(_ROWS, *rows), rows) == _expected(rows)


@pytest.mark.skipif(not _compat.CAN_REWRITE, reason="this jax has other jaxprs")
def test_rewriting_makes_programs_stable_and_hit():
    ran = verify(_ROWS, *_BY_REWRITE, runs=2)

    assert by_row(ran, _BY_REWRITE) == _BY_REWRITE


def test_what_is_not_in_the_key_may_change(tmp_path):
    changes = ("lines", "path", "folder", "nans", "tracebacks", "dump")
    ran = verify(_CHANGING, str(tmp_path / "counter"), *changes, runs=2)

    assert by_row(ran, ["step"]) == {"step": (STABLE, [])}
    assert ran.returncode == 0
    assert (tmp_path / "counter").read_text() == "2"


@pytest.mark.parametrize(
    ("change", "cause", "details"),
    [
        ("flag", "xla-flags", ["--xla_cpu_enable_fast_math=true only in the second"]),
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
        ("device_count", "device-count", ["devices of all processes: 1, then 4"]),
    ],
)
def test_what_stands_around_the_program_is_told(tmp_path, change, cause, details):
    ran = verify(_CHANGING, str(tmp_path / "counter"), change, runs=2)

    [step] = json.loads(ran.stdout)["functions"]
    found = [(each["cause"]["name"], each["details"]) for each in step["findings"]]
    assert (step["verdict"], found) == (UNSTABLE, [(cause, details)])


@pytest.mark.slow
def test_with_metadata_in_the_key_an_unchanged_program_is_stable(tmp_path):
    flag = {"JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY": "1"}
    ran = verify(_CHANGING, str(tmp_path / "counter"), runs=2, **flag)

    assert by_row(ran, ["step"]) == {"step": (STABLE, [])}


def test_with_metadata_in_the_key_a_moved_line_is_told(tmp_path):
    flag = {"JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY": "1"}
    ran = verify(_CHANGING, str(tmp_path / "counter"), "lines", runs=2, **flag)

    [step] = json.loads(ran.stdout)["functions"]
    [found] = step["findings"]
    file = tmp_path / "0" / "step.py"
    assert found["cause"]["name"] == "metadata"
    assert found["details"] == [f"{file}:6, then {file}:13"]


_OWN_DIRECTORY = """
import jax, sys, tempfile
jax.config.update("jax_compilation_cache_dir", {directory})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 9.0)
jax.jit(lambda x: x + 1)(1.0)
jax.jit(lambda x: x + 2)(1.0)
"""


def test_the_programs_own_directory_is_left_alone(tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    program = tmp_path / "program.py"
    program.write_text(_OWN_DIRECTORY.format(directory=repr(str(own))))
    ran = verify(str(program), runs=2)

    assert {each["verdict"] for each in json.loads(ran.stdout)["functions"]} == {STABLE}
    assert list(own.iterdir()) == []


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
    in_key = jax.__version_info__ < (0, 11)
    assert found == [("cache-directory" if in_key else "moving-directory", 2)]
    assert ran.returncode == 1


def test_the_program_needs_no_jax_dist(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import jax\njax.jit(abs)(1.0)\n")
    command = [verdicts.sys.executable, "-m", "jax_dist", "cache", "verify", "--runs", "2", "--"]
    ran = subprocess.run(
        [*command, verdicts.sys.executable, program],
        cwd=verdicts.ROOT,  # it finds us here, and the program does not
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert ran.stdout.splitlines() == [
        "jit_abs  stable, written, hit",
        "1 of 1 program is found again, in 2 runs.",
    ]


def test_a_cache_that_is_off_is_told(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import jax\njax.jit(lambda x: x + 1)(1.0)\n")
    ran = verify(str(program), runs=2, JAX_ENABLE_COMPILATION_CACHE="0")

    assert by_row(ran, ["_lambda"]) == {"_lambda": ("stable, never written", ["cache-off"])}


def test_a_function_that_only_some_runs_compile_is_told(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import jax, os\n"
        "if os.environ['PYTHONHASHSEED'] == '2':\n"
        "    jax.jit(lambda x: x + 1)(1.0)\n"
        "jax.jit(abs)(1.0)\n"
    )
    ran = verify(str(program), runs=3)

    assert by_row(ran, ["_lambda", "abs"]) == {
        "_lambda": ("not in every run", ["not-in-every-run"]),
        "abs": (STABLE, []),
    }


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
        (("--runs", "1", "--", "true"), "must be 2 or more: one to fill the cache, one to hit it"),
        (("--timeout", "0", "--", "true"), "must be more than 0"),
    ],
)
def test_misuse(arguments, message):
    ran = cli("cache", "verify", *arguments)

    assert ran.returncode == 2
    assert message in ran.stderr


@pytest.mark.parametrize(
    "command",
    [("true", "x"), (verdicts.sys.executable, "-I", _CHANGING, "counter")],
    ids=["no Python", "a Python that takes no recorder"],
)
def test_a_command_that_shows_no_program_proves_nothing(tmp_path, command):
    ran = cli("cache", "verify", "--runs", "2", "--", *command[:-1], str(tmp_path / command[-1]))

    assert (ran.returncode, ran.stdout) == (
        1,
        "Nothing was compiled, so nothing is proved: does the command run Python, without -E, "
        "-I or -S, and does that import jax?\n",
    )


def test_the_text_names_function_cause_place_and_remedy(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, jax, numpy as np\n"
        "table = np.full(3, os.getpid(), np.float32) + np.arange(3, dtype=np.float32)\n"
        "def step(x):\n"
        "    return x + table\n"
        "jax.jit(step)(np.ones(3, np.float32))\n"
    )
    ran = cli("cache", "verify", "--runs", "2", "--", verdicts.sys.executable, str(program))

    function, why, detail, help_, summary = ran.stdout.splitlines()
    assert function == "jit_step  unstable"
    assert why.startswith("    JXD401 captured-array: An array inside the program has other values")
    assert detail.startswith(f"      {program}:4: tensor<3xf32>: ")
    assert help_ == (
        "    help: Pass it as an argument, or let jax_dist.rewrite or jax_dist.pmap lift it."
    )
    assert summary == "0 of 1 program is found again, in 2 runs."


def test_kept_records_can_be_shown_and_compared(tmp_path):
    runs = tmp_path / "runs"
    command = (verdicts.sys.executable, _CHANGING, str(tmp_path / "counter"), "flag")
    cli("cache", "verify", "--runs", "2", "--keep", str(runs), "--", *command)

    shown = cli("cache", "show", str(runs / "records-0"))
    parts = cli("cache", "show", "--function", "jit_step", str(runs / "records-0"))
    compared = cli("cache", "diff", str(runs / "records-0"), str(runs / "records-1"))
    again = cli("cache", "verify", "--keep", str(runs), "--", *command)

    assert shown.stdout.startswith("jit_step-")
    assert shown.stdout.endswith("  written\n")
    assert "  computation         " in parts.stdout
    assert compared.returncode == 1
    assert compared.stdout.splitlines() == [
        "0 with the same key, 1 with another",
        "",
        "jit_step: XLA flags, compile_options differ",
        "  xla-flags: The XLA flags differ; also a flag that only repeats its default counts.",
        "    --xla_cpu_enable_fast_math=true only in the second",
        "    Give the same flags in XLA_FLAGS and on the command line in each run.",
    ]
    assert (again.returncode, again.stderr) == (
        2,
        f"jax-dist cache: --keep {runs}: the folder is not empty\n",
    )
