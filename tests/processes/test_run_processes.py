"""`run_processes`: what comes back from the ranks, and that no process is left behind."""

import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable

import pytest
import rank_functions

from jax_dist import _test_processes
from jax_dist.testing import Outcome, run_processes

SECONDS = 60  # far more than any test here should need

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class _Clock:
    """What the parent takes for `time`: all of the timeout is over as soon as a condition holds."""

    sleep = staticmethod(time.sleep)

    def __init__(self, condition: Callable[[], bool]):
        self._condition = condition

    def monotonic(self) -> float:
        return time.monotonic() + (2 * SECONDS if self._condition() else 0)


@pytest.fixture(scope="module")
def joined() -> list[Outcome]:
    """How two processes ended that did all that succeeds."""
    fun = rank_functions.listen_add_and_sum
    return run_processes(fun, {"x": 2}, 3, processes=2, cpu_devices=2, timeout=SECONDS)


def test_processes_are_joined(joined):
    assert [outcome.error for outcome in joined] == [None, None]
    assert [outcome.value["summed"] for outcome in joined] == [[0, 6.0], [1, 6.0]]
    assert [(outcome.rank, outcome.exit_code) for outcome in joined] == [(0, 0), (1, 0)]


def test_arguments_and_results_travel(joined):
    assert [outcome.value["added"] for outcome in joined] == [[0, 5], [1, 5]]


def test_what_the_environment_says_of_devices_is_not_inherited(monkeypatch):
    flags = "--xla_force_host_platform_device_count=8 --xla_cpu_enable_fast_math=false"
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    monkeypatch.setenv("JAX_PARTITION_INDEX", "5")

    (outcome,) = run_processes(rank_functions.settings, processes=1, cpu_devices=3, timeout=SECONDS)

    assert outcome.value == ["--xla_cpu_enable_fast_math=false", "not set", "3", "gloo"]


@linux_only
def test_no_process_listens_on_all_interfaces(joined):
    first, other = (outcome.value["listeners"] for outcome in joined)

    assert first  # rank 0 does listen
    addresses = [listener.split(":")[0] for listener in [*first, *other]]
    assert [address for address in addresses if set(address) == {"0"}] == []


def test_an_exception_comes_back_and_the_others_are_stopped(monkeypatch):
    monkeypatch.setattr(_test_processes, "_GRACE_SECONDS", 0.2)  # rank 0 would use all of it
    start = time.monotonic()
    at_zero, at_one = run_processes(rank_functions.raise_on_rank_1, timeout=SECONDS)

    assert time.monotonic() - start < 20  # JAX alone: up to 300 s, in its barrier at exit
    assert isinstance(at_one.error, KeyError)
    assert at_one.error.args == ("batch",)
    assert at_one.exit_code == 1
    (note,) = at_one.error.__notes__
    assert note.startswith("Raised in rank 1:\nTraceback (most recent call last):\n")
    assert "in raise_on_rank_1" in note
    assert isinstance(at_zero.error, RuntimeError)
    assert str(at_zero.error) == textwrap.dedent("""\
        rank 0 was stopped before its function ended:
          * rank 1 failed first
        Because a rank may wait for ever in a collective that another one never enters.
        See the error of rank 1.""")


_CANNOT_BE_RAISED = """\
rank 0 raised what cannot be raised here:
  * {}
Because only what pickles and derives from Exception travels between processes.
See its traceback below."""


def test_sys_exit_is_told():
    (outcome,) = run_processes(rank_functions.leave_by_exit, processes=1, timeout=SECONDS)

    assert type(outcome.error) is RuntimeError
    assert str(outcome.error) == _CANNOT_BE_RAISED.format("SystemExit: 3")
    assert "leave_by_exit" in outcome.error.__notes__[0]


def test_an_error_that_does_not_unpickle_is_told():
    with pytest.raises(rank_functions.OddError) as raised:
        rank_functions.raise_odd_error()
    report = pickle.dumps(_test_processes._Report.of(raised.value))
    error = pickle.loads(report).revive(0)

    assert type(error) is RuntimeError
    assert str(error) == _CANNOT_BE_RAISED.format("rank_functions.OddError: ab")
    assert "raise_odd_error" in error.__notes__[0]


def test_a_result_that_does_not_pickle_is_told():
    (outcome,) = run_processes(rank_functions.return_generator, processes=1, timeout=SECONDS)

    assert isinstance(outcome.error, TypeError)
    assert str(outcome.error) == textwrap.dedent("""\
        rank 0 returned a value that does not pickle:
          * it is a generator: cannot pickle 'generator' object
        Because results travel between processes.
        Return plain data, such as lists of numbers.""")


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_that_exits_is_named(rank, monkeypatch):
    monkeypatch.setattr(_test_processes, "_GRACE_SECONDS", 0.2)  # the other one may hang
    outcomes = run_processes(rank_functions.die_on_rank, rank, timeout=SECONDS)

    dead, other = outcomes[rank], outcomes[1 - rank]
    assert dead.exit_code == 7
    assert str(dead.error).startswith(
        textwrap.dedent(f"""\
        rank {rank} died before its function ended:
          * exit code 7
        Because it crashed, left by os._exit, or was killed from outside.
        See how its output ended:
        """)
    )
    # The other one hangs, raises as it loses the connection, or is aborted by JAX.
    assert other.error is not None


def test_a_killed_rank_tells_its_signal_and_last_words():
    at_zero, at_one = run_processes(rank_functions.kill_self_on_rank_1, timeout=SECONDS)

    assert (at_zero.value, at_zero.error) == ("done", None)
    assert at_one.exit_code == -signal.SIGKILL
    assert "\n  * signal SIGKILL\n" in str(at_one.error)
    assert str(at_one.error).endswith("\n    about to go")
    assert at_one.output.endswith("about to go\n")


def test_a_hanging_rank_is_stopped_and_tells_where_it_was(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    are_there = lambda: list(tmp_path.glob("*/0.report")) and (tmp_path / "1.pid").exists()
    monkeypatch.setattr(_test_processes, "time", _Clock(are_there))
    fun = rank_functions.hang_on_rank_1
    at_zero, at_one = run_processes(fun, str(tmp_path), timeout=SECONDS)

    assert (at_zero.value, at_zero.error) == ("done", None)
    assert type(at_one.error) is TimeoutError
    assert str(at_one.error).startswith(
        textwrap.dedent("""\
        rank 1 was stopped after 60 seconds:
          * its function was running
        Because run_processes was given timeout=60.
        Give it more time, or see where it was:
        """)
    )
    assert " in hang\n" in str(at_one.error)


def test_a_timeout_may_come_before_the_processes_joined():
    (outcome,) = run_processes(rank_functions.hang, "nowhere", processes=1, timeout=0.05)

    assert type(outcome.error) is TimeoutError
    assert "\n  * it had not joined the others yet\n" in str(outcome.error)


@linux_only
def test_a_timeout_leaves_no_process_behind(monkeypatch, tmp_path):
    monkeypatch.setattr(_test_processes, "time", _Clock((tmp_path / "sleeper.pid").exists))
    fun = rank_functions.hang_in_a_child
    (outcome,) = run_processes(fun, str(tmp_path), processes=1, timeout=SECONDS)

    assert type(outcome.error) is TimeoutError
    _wait_until(lambda: not _still_running(tmp_path))


@linux_only
def test_processes_do_not_outlive_a_killed_parent(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""\
        import sys
        sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
        from jax_dist.testing import run_processes
        from rank_functions import hang
        run_processes(hang, {str(tmp_path)!r}, timeout={SECONDS})
        """)
    )
    # TMPDIR: a killed parent leaves the folder it shares with its children.
    environment = {**_environment(), "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, script], env=environment)
    _wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 2)

    parent.kill()
    parent.wait()

    _wait_until(lambda: not _still_running(tmp_path))


def test_functions_and_classes_of_a_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""\
        import dataclasses
        from jax_dist.testing import run_processes

        @dataclasses.dataclass(frozen=True)
        class Pair:
            x: int
            y: int

        def count(start: Pair) -> Pair:
            return Pair(start.x + 1, start.y)

        if __name__ == "__main__":
            outcomes = run_processes(count, Pair(1, 2), processes=1, timeout=60)
            assert [o.value for o in outcomes] == [Pair(2, 2)], outcomes
            print("passed")
        """)
    )
    done = subprocess.run(
        [sys.executable, script], env=_environment(), capture_output=True, text=True, check=False
    )

    assert (done.stdout, done.stderr) == ("passed\n", "")


@pytest.mark.parametrize(
    ("fun", "name", "why"),
    [
        (
            lambda: 1,
            "'<lambda>'",
            "it is a lambda, or is defined inside another function",
        ),
        (
            textwrap.TextWrapper().wrap,
            "'TextWrapper.wrap'",
            "its module knows it by another name, or by none",
        ),
    ],
    ids=["lambda", "bound method"],
)
def test_a_function_that_another_process_cannot_find_is_refused(fun, name, why):
    with pytest.raises(TypeError) as caught:
        run_processes(fun)

    assert str(caught.value) == textwrap.dedent(f"""\
        run_processes cannot send {name} to another process:
          * {why}
        Because each process imports the module again, and finds the function by its name.
        Define it at the top of a module, and pass what it needs as arguments.""")


def _environment() -> dict[str, str]:
    """For a script that imports this checkout of the package."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _still_running(folder: pathlib.Path) -> list[int]:
    """Of the processes that noted their number in the folder."""
    noted = [int(path.read_text()) for path in folder.glob("*.pid")]
    return [pid for pid in noted if _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        status = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    # A zombie runs no more; whoever adopted it may be slow to notice.
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")


def _wait_until(condition) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until, "waited 30 s in vain"
        time.sleep(0.05)
