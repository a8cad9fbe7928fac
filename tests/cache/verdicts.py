"""What `jax-dist cache verify` should say of each row, in literal words; and how to ask it."""

import json
import os
import pathlib
import subprocess
import sys

PROGRAMS = pathlib.Path(__file__).parent / "programs"
ROOT = pathlib.Path(__file__).parents[2]

STABLE = "stable, written, hit"
UNWRITTEN = "stable, never written"
UNSTABLE = "unstable"
SOMETIMES = "not in every run"

ALWAYS_HIT = (
    "axis_names_set",
    "custom_vjp",
    "dict_argument",
    "donated",
    "fixed_capture",
    "input_keys",
    "jit_of_pmap",
    "named_scope",
    "partial",
    "partitioned_in_shard_map",
    "partitioned_on_one_device",
    "partitioned_without_pointer",
    "plain",
    "pmap_without_name",
    "pmapped",
    "remat",
    "static_address",
)
REWRITTEN = ("capture_rewritten", "partitioned_rewritten")  # on jax from 0.10
IN_SOME_RUNS = ("in_the_second_run_only",)
HIT_ONCE_JAX_WRITES_CALLBACKS = (
    "debug_callback",
    "debug_print",
    "ordered_io_callback",
    "print_in_shard_map",
    "pure_callback",
    "unordered_io_callback",
)
UNSTABLE_BECAUSE = {
    "axis_name": ["axis-name"],
    "capture_in_scan": ["captured-array"],
    "device_order": ["device-order"],
    "dict_in_varying_order": ["order"],
    "function_name": ["function-name"],
    "inner_function_name": ["function-name"],
    "ordered_results": ["order"],
    "partitioned": ["custom-partitioning"],
    "random_bf16_capture": ["captured-array"],
    "random_bool_capture": ["captured-array"],
    "random_jnp_capture": ["captured-array"],
    "random_jnp_scalar": ["traced-value"],
    "random_large_capture": ["captured-array"],
    "random_np_capture": ["captured-array"],
    "random_operation": ["unknown"],
    "random_python_scalar": ["traced-value"],
    "random_slice": ["unknown"],
    "result_keys": ["result-name"],
    "set_and_capture": ["order", "captured-array"],
    "set_of_axes": ["order"],
    "set_of_inner_functions": ["order"],
    "set_of_leaves": ["order"],
    "set_of_operations": ["order"],
    "set_of_values": ["order"],
    "time_seeded_key": ["captured-array"],
}
# What JAX calls the program of a row, where that is not jit_ROW.
_CALLED = {"function_name": "jit_made_up_"}
_PMAPS = ("pmapped", "pmap_without_name")  # "jit__fun", or "pmap_pmapped" before 0.8


def expected(row: str, *, writes_callbacks: bool) -> tuple[str, list[str]]:
    """The verdict on a row, and the causes."""
    if row in UNSTABLE_BECAUSE:
        return UNSTABLE, UNSTABLE_BECAUSE[row]
    if row in HIT_ONCE_JAX_WRITES_CALLBACKS and not writes_callbacks:
        return UNWRITTEN, ["host-callback"]
    if row in IN_SOME_RUNS:
        return SOMETIMES, ["not-in-every-run"]
    return STABLE, []


def verify(*command: str, runs: int = 3, **variables: str) -> subprocess.CompletedProcess:
    """Runs `jax-dist cache verify --json` on a Python program."""
    arguments = ["cache", "verify", "--json", "--runs", str(runs), "--", sys.executable, *command]
    return cli(*arguments, **variables)


def cli(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    """Runs `jax-dist` in a process of its own."""
    inherited = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    return subprocess.run(
        [sys.executable, "-m", "jax_dist", *arguments],
        env={**inherited, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def by_row(ran: subprocess.CompletedProcess, rows) -> dict[str, tuple[str, list[str]]]:
    """`{row: (verdict, causes)}`, from what `verify` printed."""
    assert ran.returncode in (0, 1), ran.stderr
    functions = json.loads(ran.stdout)["functions"]
    return {row: _verdict_on(row, functions) for row in rows}


def _verdict_on(row, functions):
    if row in _PMAPS:
        names = ("jit__fun", f"pmap_{row}", "pmap__lambda")
    else:
        names = (_CALLED.get(row, f"jit_{row}"),)
    mine = [each for each in functions if each["function"].startswith(names)]
    exact = [each for each in mine if each["function"] in names] or mine
    verdicts = {each["verdict"] for each in exact}
    causes = [finding["cause"]["name"] for each in exact for finding in each["findings"]]
    return ", ".join(sorted(verdicts)) or "not compiled", causes
