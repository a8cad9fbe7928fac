"""`run_processes`: what comes back from the ranks, and that no process is left behind."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import textwrap
import time

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import _test_processes
from jax_dist.testing import run_processes

SECONDS = 60  # far more than any test here should need

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class OddError(Exception):
    """Pickles, but cannot be read back: its class wants two arguments."""

    def __init__(self, first: str, second: str):
        super().__init__(first + second)


# What the children run.


def sum_over_all() -> list[float]:
    mesh = Mesh(jax.devices(), "i")
    total = jax.jit(
        jax.shard_map(lambda x: lax.psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P())
    )
    x = jax.make_array_from_callback(
        (4,), NamedSharding(mesh, P("i")), lambda index: np.arange(4.0, dtype=np.float32)[index]
    )
    return [jax.process_index(), *total(x).addressable_data(0).tolist()]


def add(x: dict[str, int], y: int) -> tuple[int, int]:
    return jax.process_index(), x["x"] + y


def settings() -> list[str]:
    return [
        os.environ["XLA_FLAGS"],
        os.environ.get("JAX_PARTITION_INDEX", "not set"),
        str(jax.local_device_count()),
        str(jax.config.jax_cpu_collectives_implementation),
    ]


def listeners() -> list[str]:
    """The local addresses, as hexadecimal `address:port`, where this process listens."""
    links = [os.path.realpath(link) for link in pathlib.Path("/proc/self/fd").iterdir()]
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in pathlib.Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    own = [row for row in rows if any(link.endswith(f"socket:[{row[9]}]") for link in links)]
    return [row[1] for row in own if row[3] == "0A"]


def write_pid(folder: str) -> None:
    (pathlib.Path(folder) / f"{jax.process_index()}.pid").write_text(str(os.getpid()))


def raise_on_rank_1() -> list[float]:
    if jax.process_index() == 1:
        raise KeyError("batch")
    return sum_over_all()


def raise_odd_error() -> None:
    raise OddError("a", "b")


def leave_by_exit() -> None:
    sys.exit(3)


def die_on_rank(rank: int) -> list[float]:
    if jax.process_index() == rank:
        os._exit(7)
    return sum_over_all()


def kill_self_on_rank_1() -> str:
    if jax.process_index() == 1:
        sys.stdout.write("about to go\n")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"


def hang_on_rank_1() -> str:
    if jax.process_index() == 1:
        sleep_for_long()
    return "done"


def sleep_for_long() -> None:
    time.sleep(100)


def hang(folder: str) -> None:
    write_pid(folder)
    sleep_for_long()


def hang_in_a_child(folder: str) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    (pathlib.Path(folder) / "sleeper.pid").write_text(str(sleeper.pid))
    sleeper.wait()


def return_generator() -> object:
    return (x for x in ())


# Processes.


def test_processes_are_joined():
    outcomes = run_processes(sum_over_all, processes=2, cpu_devices=2, timeout=SECONDS)

    assert [outcome.error for outcome in outcomes] == [None, None]
    assert [outcome.value for outcome in outcomes] == [[0, 6.0], [1, 6.0]]
    assert [(outcome.rank, outcome.exit_code) for outcome in outcomes] == [(0, 0), (1, 0)]


def test_arguments_and_results_travel():
    outcomes = run_processes(add, {"x": 2}, 3, cpu_devices=1, timeout=SECONDS)

    assert [outcome.value for outcome in outcomes] == [(0, 5), (1, 5)]


def test_what_the_environment_says_of_devices_is_not_inherited(monkeypatch):
    flags = "--xla_force_host_platform_device_count=8 --xla_cpu_enable_fast_math=false"
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    monkeypatch.setenv("JAX_PARTITION_INDEX", "5")

    (outcome,) = run_processes(settings, processes=1, cpu_devices=3, timeout=SECONDS)

    assert outcome.value == ["--xla_cpu_enable_fast_math=false", "not set", "3", "gloo"]


@linux_only
def test_no_process_listens_on_all_interfaces():
    outcomes = run_processes(listeners, timeout=SECONDS)

    assert outcomes[0].value  # rank 0 does listen
    addresses = [listener.split(":")[0] for outcome in outcomes for listener in outcome.value]
    assert [address for address in addresses if set(address) == {"0"}] == []


def test_an_exception_comes_back_and_the_others_are_stopped():
    start = time.monotonic()
    at_zero, at_one = run_processes(raise_on_rank_1, timeout=SECONDS)

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


@pytest.mark.parametrize(
    ("fun", "summary"),
    [(raise_odd_error, "test_run_processes.OddError: ab"), (leave_by_exit, "SystemExit: 3")],
    ids=["an error that does not unpickle", "sys.exit"],
)
def test_what_cannot_be_raised_here_is_told(fun, summary):
    (outcome,) = run_processes(fun, processes=1, timeout=SECONDS)

    assert type(outcome.error) is RuntimeError
    assert str(outcome.error) == textwrap.dedent(f"""\
        rank 0 raised what cannot be raised here:
          * {summary}
        Because only what pickles and derives from Exception travels between processes.
        See its traceback below.""")
    assert fun.__name__ in outcome.error.__notes__[0]


def test_a_result_that_does_not_pickle_is_told():
    (outcome,) = run_processes(return_generator, processes=1, timeout=SECONDS)

    assert isinstance(outcome.error, TypeError)
    assert str(outcome.error) == textwrap.dedent("""\
        rank 0 returned a value that does not pickle:
          * it is a generator: cannot pickle 'generator' object
        Because results travel between processes.
        Return plain data, such as lists of numbers.""")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_exits_is_named(rank):
    outcomes = run_processes(die_on_rank, rank, timeout=SECONDS)

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
    at_zero, at_one = run_processes(kill_self_on_rank_1, timeout=SECONDS)

    assert (at_zero.value, at_zero.error) == ("done", None)
    assert at_one.exit_code == -signal.SIGKILL
    assert "\n  * signal SIGKILL\n" in str(at_one.error)
    assert str(at_one.error).endswith("\n    about to go")
    assert at_one.output.endswith("about to go\n")


def test_a_hanging_rank_is_stopped_and_tells_where_it_was():
    at_zero, at_one = run_processes(hang_on_rank_1, timeout=8)

    assert (at_zero.value, at_zero.error) == ("done", None)
    assert type(at_one.error) is TimeoutError
    assert str(at_one.error).startswith(
        textwrap.dedent("""\
        rank 1 was stopped after 8 seconds:
          * its function was running
        Because run_processes was given timeout=8.
        Give it more time, or see where it was:
        """)
    )
    assert " in sleep_for_long\n" in str(at_one.error)


def test_a_timeout_may_come_before_the_processes_joined():
    outcomes = run_processes(hang_in_a_child, processes=2, timeout=0.05)

    for outcome in outcomes:
        assert type(outcome.error) is TimeoutError
        assert "\n  * it had not joined the others yet\n" in str(outcome.error)


@linux_only
def test_a_timeout_leaves_no_process_behind(tmp_path):
    run_processes(hang_in_a_child, str(tmp_path), processes=1, timeout=5)

    assert len(list(tmp_path.glob("*.pid"))) == 1
    _wait_until(lambda: not _still_running(tmp_path))


@linux_only
def test_processes_do_not_outlive_a_killed_parent(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""\
        import sys
        sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
        from jax_dist.testing import run_processes
        from test_run_processes import hang
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
        import jax
        from jax_dist.testing import run_processes

        @dataclasses.dataclass(frozen=True)
        class Pair:
            x: int
            y: int

        def count(start: Pair) -> Pair:
            return Pair(start.x + jax.process_index(), start.y)

        if __name__ == "__main__":
            outcomes = run_processes(count, Pair(1, 2), timeout=60)
            assert [o.value for o in outcomes] == [Pair(1, 2), Pair(2, 2)], outcomes
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


def test_a_taken_port_is_exchanged_for_another(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        free_port = _test_processes._free_port
        ports = [taken.getsockname()[1], free_port()]
        monkeypatch.setattr(_test_processes, "_free_port", lambda: ports.pop(0))

        outcomes = run_processes(add, {"x": 2}, 3, cpu_devices=1, timeout=SECONDS)

    assert [outcome.value for outcome in outcomes] == [(0, 5), (1, 5)]
    assert ports == []


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
