"""Jobs of three real processes in which one fails: all end by themselves, and say why."""

import os
import pathlib
import re
import subprocess
import sys
from typing import NamedTuple

import psutil
import pytest

from jax_dist import launch, multihost

pytestmark = pytest.mark.thorough

_FOLDER = pathlib.Path(__file__).parent
_LIMIT = 60.0  # seconds; the longest way takes 25 on an idle machine


class _Way(NamedTuple):
    """How rank 1 fails, and what is seen of it."""

    code: int  # of rank 1
    text: str  # in the output of rank 1; a pattern


_RAISED = r'fail\n    raise ValueError\("the loss is NaN"\)\n(.*\n)?ValueError: the loss is NaN\n'
_STEP = "rank 1: a step took more than 4 s\n"
_WAYS = {
    "killed": _Way(-9, "pid "),
    "raises": _Way(1, _RAISED + "rank 1 ends after this ValueError\n"),
    "exits": _Way(3, r"rank 1 ends after sys.exit\(3\)\n"),
    "hangs": _Way(1, _STEP + r"Stacks of all threads:\n(.*\n)*  File .* in fail\n"),
    "cleans up": _Way(1, _STEP + "Exception being handled in MainThread:\n(.*\n)*.*" + _RAISED),
    "returns": _Way(-6, "JAX distributed service detected fatal errors"),
}


def _environment() -> dict[str, str]:
    paths = [str(_FOLDER.parents[1]), os.environ.get("PYTHONPATH")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _assert_gone(output: str) -> None:
    pids = [int(pid) for pid in re.findall(r"pid (\d+)", output)]
    assert len(pids) == 3
    for pid in filter(psutil.pid_exists, pids):  # a zombie of another parent, or another process
        assert "failing_program.py" not in " ".join(psutil.Process(pid).cmdline())


@pytest.mark.parametrize("way", _WAYS)
def test_all_ranks_end_by_themselves(way):
    port = launch._choose_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, _FOLDER / "failing_program.py", way],
            env=launch.rank_environment(_environment(), rank, 3, port, cpu_devices=1),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        outputs = [rank.communicate(timeout=_LIMIT)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    codes = [rank.returncode for rank in ranks]

    assert codes[1] == _WAYS[way].code, outputs
    assert 0 not in codes
    assert re.search(_WAYS[way].text, outputs[1]), outputs
    _assert_gone("".join(outputs))


def _launch(way: str) -> tuple[launch.JobOutcome, list[str]]:
    """Return the outcome of a job, and the output of each rank."""
    texts = ["", "", ""]

    def write(rank: int, _: str, line: str) -> None:
        texts[rank] += f"{line}\n"

    command = [sys.executable, str(_FOLDER / "failing_program.py"), way]
    options = {"cpu_devices": 1, "timeout": _LIMIT, "environment": _environment()}
    return launch.run(command, 3, write, **options), texts


@pytest.mark.parametrize("way", ["killed", "raises", "exits", "cleans up", "returns"])
def test_launch_ends_all_and_names_the_first(way):
    outcome, texts = _launch(way)

    assert outcome.reason == "failed", texts
    assert outcome.joined == 3
    assert outcome.finished == ((1,) if way == "returns" else ())
    waits = "waits in vain: the program of rank 1 has ended. It waits here:\n"
    assert (waits in texts[0] + texts[2]) == (way == "returns")
    assert outcome.seconds < 20.0  # which JAX would wait for a rank that returns
    if way not in ("cleans up", "returns"):  # there, watchdogs or JAX end all ranks together
        assert outcome.first == 1, texts
        assert outcome.codes[1] == _WAYS[way].code
    assert re.search(_WAYS[way].text, texts[1]), texts
    _assert_gone("".join(texts))


@pytest.mark.parametrize("way", ["works alone", "waits for its thread"])
def test_launch_waits_for_a_rank_that_goes_on(way):
    outcome, texts = _launch(way)
    assert outcome.codes == (0, 0, 0), texts


def test_an_outcome_names_the_rank_that_had_finished_when_jax_ends_the_job():
    outcome = launch.JobOutcome("failed", (-6, -6), 0, (), 2, (1,), 20.0)

    assert "only in rank 1 the program had ended before" in "\n".join(outcome.describe())


def _run(program: str) -> subprocess.CompletedProcess:
    command, options = [sys.executable, "-c", program], {"timeout": _LIMIT, "check": False}
    return subprocess.run(command, env=_environment(), capture_output=True, text=True, **options)


_EXITS = {  # code after `initialize`, and the exit code that is expected
    "succeeds": ("", 0),
    "sys.exit of 0": ("sys.exit(0)", 0),
    "sys.exit of a text": ("sys.exit('stopped')", 1),
    "in a context": ("with contextlib.suppress(ValueError): sys.exit(3)", 3),
    "in a function": ("(lambda: sys.exit(258))()", 2),
    "caught in the program": ("with contextlib.suppress(SystemExit): sys.exit(3)", 0),
    "caught in a function": ("pytest_like()", 0),
    "Ctrl-C": ("raise KeyboardInterrupt", 130),
}


@pytest.mark.parametrize("case", _EXITS)
def test_the_exit_code_of_a_process(case):
    line, code = _EXITS[case]
    done = _run(f"""\
import contextlib, sys
from jax_dist._multihost import initialization
def pytest_like():
    try:
        sys.exit(3)
    except SystemExit:
        pass
initialization._install_hooks(7, 8)
{line}
""")

    assert done.returncode == code, done.stderr
    assert ("rank 7 ends after" in done.stderr) is (code != 0)


_WATCHED = {  # the body, and whether the watchdog ends the process
    "steps in time": ("for _ in dog.steps(range(5)): time.sleep(0.6)", False),
    "step as a call": ("for _ in range(5): dog.step(); time.sleep(0.6)", False),
    "step as a context": ("for _ in range(5):\n    with dog.step(): time.sleep(0.6)", False),
    "one is slow": ("for n in dog.steps(range(4)): time.sleep(1000 * (n == 2))", True),
    "lock of the interpreter held": ("ctypes.PyDLL(None).sleep(1000)", True),
}


@pytest.mark.parametrize("case", _WATCHED)
def test_a_watchdog_ends_a_slow_step(case):
    body, ends = _WATCHED[case]
    done = _run(f"""\
import ctypes, time
from jax_dist import multihost
with multihost.watchdog(2.0) as dog:
  {body}
time.sleep(0.1)
print("done")
""")

    assert (done.returncode, done.stdout) == ((1, "") if ends else (0, "done\n")), done.stderr
    assert ('File "<string>", line 4 in <module>' in done.stderr) is ends


@pytest.mark.parametrize("seconds", [0.0, float("inf"), float("nan")])
def test_seconds_of_a_watchdog_are_positive_and_finite(seconds):
    with pytest.raises(ValueError, match="must be positive and finite"):
        multihost.watchdog(seconds)


def test_steps_of_a_watchdog_need_its_block():
    with pytest.raises(RuntimeError, match="needs its block: `with watchdog"):
        next(multihost.watchdog(60.0).steps([1]))


def test_a_process_has_one_watchdog():
    with multihost.watchdog(1000.0), pytest.raises(RuntimeError, match="Another watchdog"):
        multihost.watchdog(1000.0).__enter__()
    with multihost.watchdog(1000.0):
        pass
