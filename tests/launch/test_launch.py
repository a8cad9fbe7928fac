"""`jax-dist launch`: small commands as ranks; what is written, who is ended, and the exit code."""

import contextlib
import io
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import psutil
import pytest

from jax_dist import launch
from jax_dist.cli.main import main

_LIMIT = 60.0  # seconds; far more than any job here needs
_FOREVER = "sleep 1000"


def _launch(*arguments: str) -> tuple[int, str, str]:
    """Return the exit code and what is written."""
    out, err = io.StringIO(), io.StringIO()
    code = main(["launch", *arguments], out=out, err=err)
    return code, out.getvalue(), re.sub(r"\d+\.\d s", "T s", err.getvalue())


def _shell(script: str) -> list[str]:
    return ["--", "sh", "-c", script]


_ON_RANK_1 = "if [ $RANK = 1 ]; then {}; fi; "
_SEPARATE = (
    "no rank called jax_dist.multihost.initialize; unless the program calls "
    "jax.distributed.initialize itself, these were 2 separate jobs\n"
)
_ENDINGS: dict[str, tuple[list[str], str, int, str]] = {  # options, script, exit code, errors
    "all is well": (["-n", "1"], "true", 0, "1 rank, T s, exit code 0\n"),
    "nobody joined": (["-n", "2"], "true", 0, _SEPARATE + "2 ranks, T s, exit code 0\n"),
    "one joined": (
        ["-n", "2"],
        "touch $JAX_DIST_LAUNCH/joined-$RANK",
        0,
        "2 ranks, T s, exit code 0\n",
    ),
    "an exit code": (
        ["-n", "3"],
        _ON_RANK_1.format("exit 5") + _FOREVER,
        5,
        "rank 1 failed first: exit code 5\n3 ranks, T s, exit code 5\n",
    ),
    "a signal": (
        ["-n", "2"],
        _ON_RANK_1.format("kill -9 $$") + _FOREVER,
        137,
        "rank 1 failed first: signal SIGKILL\n2 ranks, T s, exit code 137\n",
    ),
    "ranks that ignore SIGTERM": (
        ["-n", "2", "--grace", "0.1"],
        "trap '' TERM; " + _ON_RANK_1.format("exit 1") + _FOREVER,
        1,
        "rank 1 failed first: exit code 1\n2 ranks, T s, exit code 1\n",
    ),
    "others that end meanwhile": (
        ["-n", "2", "--grace", "50"],
        _ON_RANK_1.format("exit 4") + "sleep 0.3; exit 6",
        4,
        "rank 1 failed first: exit code 4\n2 ranks, T s, exit code 4\n",
    ),
    "the time limit": (
        ["-n", "2", "--timeout", "0.5"],
        _FOREVER,
        124,
        "the time limit is over; still running: 0, 1\n2 ranks, T s, exit code 124\n",
    ),
}


@pytest.mark.parametrize("case", _ENDINGS)
def test_how_a_job_ends(case):
    options, script, code, errors = _ENDINGS[case]
    expected = "".join(f"jax-dist launch: {line}\n" for line in errors.splitlines())

    assert _launch(*options, *_shell(script)) == (code, "", expected)


_MISUSES = {
    "no command": (["-n", "2"], "needs a command: jax-dist launch -n 2 -- python train.py"),
    "an unknown command": (["-n", "2", "--", "no-such"], "no-such cannot be started: there is no"),
    "a file": (["-n", "2", "--", "/etc/passwd"], "/etc/passwd cannot be started: there is no"),
    "not a program": (["-n", "1", "--", "{folder}/program"], "be started: Exec format error"),
}


@pytest.mark.parametrize("case", _MISUSES)
def test_misuse_says_what_is_wrong(case, tmp_path):
    arguments, text = _MISUSES[case]
    (tmp_path / "program").write_text("neither text of a shell nor a program\0")
    (tmp_path / "program").chmod(0o700)
    code, _, err = _launch(*[x.format(folder=tmp_path) for x in arguments])

    assert code == 2
    assert text in err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "the following arguments are required: -n/--processes"),
        (["-n", "0", "true"], "argument -n/--processes: must be 1 or more, not 0"),
        (["-n", "1", "--timeout", "0", "true"], "argument --timeout: must be more than 0"),
        (["-n", "1", "--gpus", "1", "--cpu-devices", "1"], "not allowed with argument --gpus"),
    ],
)
def test_an_option_that_cannot_be_followed(arguments, text, capsys):
    with pytest.raises(SystemExit):
        main(["launch", *arguments])

    assert text in capsys.readouterr().err


# --- output


def test_each_line_has_its_rank_and_its_stream():
    script = "echo out; echo err >&2; printf 'no end'"
    code, out, err = _launch("-n", "2", "--color", "never", *_shell(script))

    assert code == 0
    assert sorted(out.splitlines()) == ["[0] no end", "[0] out", "[1] no end", "[1] out"]
    assert sorted(err.splitlines()[:2]) == ["[0] err", "[1] err"]


def test_colors():
    output = _launch("-n", "1", "--color", "always", *_shell("echo a"))[1]
    assert output == "\x1b[36m[0]\x1b[0m a\n"


def test_output_of_all_kinds_comes_out():
    program = r"import os; os.write(1, b'\xff\n' + b'a' * 200_000 + b'\n1\r2\n')"
    _, out, _ = _launch("-n", "1", "--", sys.executable, "-c", program)

    assert out == f"[0] \ufffd\n[0] {'a' * 200_000}\n[0] 1\n[0] 2\n"


def test_a_reader_that_leaves_does_not_stop_the_ranks(tmp_path):
    script = f"for i in $(seq 2000); do echo line $i; done; echo end > {tmp_path}/end"
    command = f"'{sys.executable}' -m jax_dist launch -n 1 -- sh -c '{script}' | head -n 1"
    done = subprocess.run(
        command, shell=True, env=_environment(), capture_output=True, text=True, check=False
    )

    assert done.stdout == "[0] line 1\n"
    assert "Traceback" not in done.stderr
    assert (tmp_path / "end").exists()


# --- signals, and what is left


def _environment() -> dict[str, str]:
    paths = [str(pathlib.Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


@contextlib.contextmanager
def _launcher(script: str, *options: str) -> Iterator[subprocess.Popen]:
    """Return a launcher with two ranks, each of which has written `up`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "jax_dist", "launch", "-n", "2", *options, *_shell(script)],
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    timer = threading.Timer(_LIMIT, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        for _ in range(2):
            assert process.stdout.readline().endswith("up\n")
        yield process
    finally:
        timer.cancel()
        process.kill()
        process.communicate()


_TRAP = "trap 'echo {0}; exit 0' {0}; echo up; sleep 1000 & wait"
_SIGNALS: dict[str, tuple[str, Sequence[int], int, str]] = {  # script, signals, code, output
    "Ctrl-C": (_TRAP.format("INT"), [signal.SIGINT], 130, "INT"),
    "SIGTERM": (_TRAP.format("TERM"), [signal.SIGTERM], 0, "TERM"),
    "a closed terminal": (_TRAP.format("TERM"), [signal.SIGHUP], 0, "TERM"),
    "SIGTERM without a handler": ("echo up; exec sleep 1000", [signal.SIGTERM], 143, "code 143"),
    "two SIGTERM": (
        "trap 'echo TERM' TERM; echo up; while true; do sleep 0.1; done",
        [signal.SIGTERM, signal.SIGTERM],
        143,
        "TERM",
    ),
    "Ctrl-C that is ignored": (
        "trap '' INT TERM; echo up; while true; do sleep 0.1; done",
        [signal.SIGINT],
        130,
        "exit code 130",
    ),
}


@pytest.mark.parametrize("case", _SIGNALS)
def test_signals_are_passed_on(case):
    script, signals, code, text = _SIGNALS[case]
    if signal.SIG_IGN in map(signal.getsignal, signals):
        pytest.skip("the tests run under nohup")
    with _launcher(script) as launcher:
        for number in signals:
            launcher.send_signal(number)
            time.sleep(0.3)  # two of a kind at once count as one
        output, _ = launcher.communicate(timeout=_LIMIT)

    assert launcher.returncode == code, output
    assert text in output
    assert "failed first" not in output


def test_children_of_ranks_end_with_them(tmp_path):
    script = f"sleep 1000 & echo $! > {tmp_path}/$RANK; " + _ON_RANK_1.format("exit 3") + "wait"
    code, _, _ = _launch("-n", "2", *_shell(script))

    assert code == 3
    for pid in [int((tmp_path / str(rank)).read_text()) for rank in range(2)]:
        _wait_until(lambda pid=pid: _is_gone(pid))


def _is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + _LIMIT
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_of_ranks_seen_to_fail_together_the_first_is_named(tmp_path):
    """A killed one; else by their notes; JAX aborts a rank because of another one."""
    job = launch._Job([], tmp_path, [], grace=1.0, timeout=None)
    codes = {0: 1, 1: 1, 2: -signal.SIGABRT, 3: -signal.SIGKILL}
    for rank, second in ((0, 20), (1, 10)):
        (tmp_path / f"failed-{rank}").touch()
        os.utime(tmp_path / f"failed-{rank}", (second, second))

    class Rank:
        def __init__(self, number: int) -> None:
            self.number, self.code = number, codes[number]

    ranks = sorted(map(Rank, codes), key=job._failure_order)
    assert [rank.number for rank in ranks] == [3, 1, 0, 2]


# --- the environment of a rank

_ENVIRONMENTS: dict[str, tuple[dict[str, str], dict, dict[str, str | None]]] = {
    "JAX": ({}, {}, {"JAX_PROCESS_ID": "1", "JAX_NUM_PROCESSES": "2"}),
    "address": ({}, {}, {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:7", "MASTER_PORT": "7"}),
    "no other interface": ({}, {}, {"JAX_COORDINATOR_BIND_ADDRESS": "127.0.0.1:7"}),
    "SLURM": ({"SLURM_NTASKS": "9"}, {}, {"SLURM_NTASKS": "2", "SLURM_PROCID": "1"}),
    "torchrun": ({"RANK": "9"}, {}, {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}),
    "the job around": (
        {"OMPI_COMM_WORLD_RANK": "3", "TORCHELASTIC_RUN_ID": "a", "JAX_PARTITION_INDEX": "1"},
        {},
        {"OMPI_COMM_WORLD_RANK": None, "TORCHELASTIC_RUN_ID": None, "JAX_PARTITION_INDEX": None},
    ),
    "a GPU": ({"JAX_LOCAL_DEVICE_IDS": "7"}, {}, {"JAX_LOCAL_DEVICE_IDS": "1"}),
    "GPUs": ({}, {"gpus": 3}, {"JAX_LOCAL_DEVICE_IDS": "3,4,5"}),
    "CPUs": (
        {"XLA_FLAGS": "--xla_force_host_platform_device_count=8 --a", "JAX_LOCAL_DEVICE_IDS": "1"},
        {"cpu_devices": 4},
        {
            "XLA_FLAGS": "--a",
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "4",
            "JAX_LOCAL_DEVICE_IDS": None,
        },
    ),
    "a proxy": (
        {"HTTPS_PROXY": "p", "no_proxy": "a"},
        {},
        {"no_proxy": "a,127.0.0.1,localhost", "NO_PROXY": "a,127.0.0.1,localhost"},
    ),
    "no proxy": ({}, {}, {"no_proxy": None}),
    "other variables": ({"A": "b", "PYTHONUNBUFFERED": ""}, {}, {"A": "b", "PYTHONUNBUFFERED": ""}),
}


@pytest.mark.parametrize("case", _ENVIRONMENTS)
def test_the_environment_of_a_rank(case):
    inherited, options, expected = _ENVIRONMENTS[case]

    variables = launch.rank_environment(inherited, 1, 2, 7, **options)
    assert {name: variables.get(name) for name in expected} == expected


def test_the_launcher_loads_no_jax():
    program = (
        "import sys; from jax_dist.cli.main import main; "
        "code = main(['launch', '-n', '1', '--', 'true']); "
        "sys.exit(code or 'jax' in sys.modules or 'numpy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], env=_environment(), check=True)


# --- one command, run to its end

_COMMANDS: dict[str, tuple[str, float | None, int | None, bytes]] = {
    "ends": ("echo a; echo b >&2; exit 3", None, 3, b"a\nb\n"),
    "is stopped": (f"echo a; {_FOREVER}", 0.5, None, b"a\n"),
    "ignores SIGTERM": (f"trap '' TERM; echo a; {_FOREVER}", 0.5, None, b"a\n"),
}


@pytest.mark.parametrize("case", _COMMANDS)
def test_one_command_runs_to_its_end(case, tmp_path):
    script, timeout, code, output = _COMMANDS[case]
    script = f"sleep 1000 & echo $! > {tmp_path}/pid; {script}"

    done = launch.run_to_end(["sh", "-c", script], {**os.environ}, tmp_path / "output", timeout)

    assert done == code
    assert (tmp_path / "output").read_bytes() == output
    _wait_until(lambda: _is_gone(int((tmp_path / "pid").read_text())))
