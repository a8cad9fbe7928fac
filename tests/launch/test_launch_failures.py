"""How a job ends that does not end well: who is named, what the others get, which exit code."""

import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
from launching import (
    PATIENCE,
    PYTHON,
    command,
    environment,
    is_alive,
    launch,
    launched,
    lines,
    notices,
    wait_until,
)

from jax_dist.launch.outcome import (
    Ended,
    JobOutcome,
    Reason,
)

_RANK_1 = "import os, sys, time\nif os.environ['RANK'] == '1':\n    "
_IMMUNE = "import signal; signal.signal(15, signal.SIG_IGN); "


def _said(stderr: str) -> str:
    """What the launcher says itself, without the seconds that differ from run to run."""
    own = [line for line in stderr.splitlines(keepends=True) if not line.startswith("[")]
    return re.sub(r"\d+\.\d s", "T s", "".join(own))


def test_the_first_failure_is_named_with_its_last_lines():
    program = _RANK_1 + "print('about to fail'); sys.exit('no such file')\ntime.sleep(600)"
    ended = launch("-n", "3", "--grace", "0.2", "--", *PYTHON, program)

    assert ended.returncode == 1
    assert lines(ended.stdout) == [(1, "about to fail")]
    assert _said(ended.stderr) == (
        "jax-dist launch: rank 1 ended with exit code 1; the others have T s to end\n"
        "jax-dist launch: rank 1 failed first: exit code 1, after T s; the end of its output:\n"
        "    about to fail\n"
        "    no such file\n"
        "jax-dist launch: 3 ranks, T s, exit code 1 "
        "(rank 1: exit code 1; ranks 0 and 2: stopped by SIGTERM)\n"
    )


@pytest.mark.parametrize(
    ("program", "code", "how"),
    [
        ("sys.exit(3)", 3, "exit code 3"),
        ("sys.exit(255)", 255, "exit code 255"),
        ("os.kill(os.getpid(), 9)", 137, "signal SIGKILL"),
        ("os.kill(os.getpid(), 11)", 139, "signal SIGSEGV"),
        ("os.kill(os.getpid(), 15)", 143, "signal SIGTERM"),
        ("raise ValueError('a bug')", 1, "exit code 1"),
    ],
)
def test_the_exit_code_is_that_of_the_first_failure(program, code, how):
    ended = launch(
        "-n", "2", "--grace", "0.1", "--", *PYTHON, _RANK_1 + program + "\ntime.sleep(600)"
    )

    assert ended.returncode == code
    assert notices(ended.stderr)[0].startswith(f"rank 1 ended with {how}; ")
    assert notices(ended.stderr)[-1].endswith(f"(rank 1: {how}; rank 0: stopped by SIGTERM)")


_WAITS_FOR_RANK_1 = """\
import os, pathlib, signal, sys, time
there = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "1":
    there.touch(); sys.exit(3)
while not there.exists(): time.sleep(0.01)
time.sleep(1.0)  # the launcher sees it meanwhile
"""


def test_the_others_may_end_by_themselves(tmp_path):
    program = _WAITS_FOR_RANK_1 + "print('saved'); sys.exit(4)"
    ended = launch("-n", "2", "--grace", "60", "--", *PYTHON, program, str(tmp_path / "there"))

    assert ended.returncode == 3  # the first one counts
    assert lines(ended.stdout) == [(0, "saved")]
    assert notices(ended.stderr)[-1].endswith("(rank 1: exit code 3; rank 0: exit code 4)")


_WAITS_FOR_RANK_0 = """\
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
there = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "0":
    there.touch(); time.sleep(600)
while not there.exists(): time.sleep(0.01)
sys.exit(3)
"""


def test_one_that_survives_sigterm_is_killed(tmp_path):
    program = (*PYTHON, _WAITS_FOR_RANK_0, str(tmp_path / "there"))
    ended = launch("-n", "2", "--grace", "0.1", "--", *program)

    assert ended.returncode == 3
    assert notices(ended.stderr)[-1].endswith("(rank 1: exit code 3; rank 0: stopped by SIGKILL)")


def test_an_early_end_with_0_is_no_failure():
    ended = launch(
        "-n", "2", "--", *PYTHON, _RANK_1 + "sys.exit(0)\ntime.sleep(0.5); print('done')"
    )

    assert (ended.returncode, lines(ended.stdout)) == (0, [(0, "done")])


def test_the_time_is_up():
    program = "import os, time; print('step', os.environ['RANK']); time.sleep(600)"
    ended = launch("-n", "2", "--timeout", "3", "--grace", "20", "--", *PYTHON, program)

    assert ended.returncode == 124
    assert _said(ended.stderr) == (
        "jax-dist launch: the time is up (--timeout), and ranks 0-1 were running\n"
        "jax-dist launch: the end of the output of rank 0:\n"
        "    step 0\n"
        "jax-dist launch: the end of the output of rank 1:\n"
        "    step 1\n"
        "jax-dist launch: 2 ranks, T s, exit code 124 (ranks 0-1: stopped by SIGTERM)\n"
    )


def test_a_rank_that_survives_sigterm_is_killed_when_the_time_is_up():
    program = ("bash", "-c", "trap '' TERM; sleep 600")
    ended = launch("-n", "1", "--timeout", "2", "--grace", "0.1", "--", *program)

    assert ended.returncode == 124
    assert notices(ended.stderr)[-1].endswith("(rank 0: stopped by SIGKILL)")


_SAVES = (
    "import signal, sys, time\n"
    "def save(number, frame):\n"
    "    print('saved', signal.Signals(number).name); sys.exit(0)\n"
    "signal.signal(15, save); signal.signal(2, save)\n"
    "print('ready'); time.sleep(600)"
)


def _until_ready(process, ranks: int) -> None:
    assert [process.stdout.readline()[-6:] for _ in range(ranks)] == ["ready\n"] * ranks


def test_sigterm_is_passed_on_and_the_ranks_take_their_time():
    with launched("-n", "2", "--", *PYTHON, _SAVES) as process:
        _until_ready(process, 2)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=PATIENCE)

    assert process.returncode == 0
    assert sorted(lines(out)) == [(0, "saved SIGTERM"), (1, "saved SIGTERM")]
    assert "failed" not in err


def test_ranks_that_die_of_sigterm_are_not_blamed_for_it():
    with launched(
        "-n", "2", "--", *PYTHON, "print('ready'); import time; time.sleep(600)"
    ) as process:
        _until_ready(process, 2)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=PATIENCE)

    assert process.returncode == 143
    assert "failed first: signal SIGTERM, which was passed on to it, after" in err


def test_a_second_sigterm_ends_ranks_that_survive_it():
    program = _IMMUNE + "import time; print('ready'); time.sleep(600)"
    with launched("-n", "1", "--grace", "0.1", "--", *PYTHON, program) as process:
        _until_ready(process, 1)
        process.send_signal(signal.SIGTERM)
        time.sleep(1.0)
        assert process.poll() is None  # it waits for the rank
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=PATIENCE)

    assert process.returncode == 143
    assert notices(err)[-1].endswith("exit code 143 (rank 0: stopped by SIGKILL)")


def test_ctrl_c_is_passed_on():
    with launched("-n", "2", "--", *PYTHON, _SAVES) as process:
        _until_ready(process, 2)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=PATIENCE)

    assert process.returncode == 130
    assert sorted(lines(out)) == [(0, "saved SIGINT"), (1, "saved SIGINT")]


def test_a_second_ctrl_c_kills_at_once():
    program = "import signal\nsignal.signal(2, signal.SIG_IGN)\nprint('ready'); signal.pause()"
    with launched("-n", "1", "--grace", "600", "--", *PYTHON, program) as process:
        _until_ready(process, 1)
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE)

    assert process.returncode == 130
    assert notices(err)[-1].endswith("(rank 0: stopped by SIGKILL)")


_WITH_GRANDCHILD = (
    "import os, subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
    "print(os.getpid(), child.pid, flush=True)\n"
)


def _processes(process, ranks: int) -> list[int]:
    told = [process.stdout.readline() for _ in range(ranks)]
    return [int(number) for _, text in lines("".join(told)) for number in text.split()]


@pytest.mark.parametrize("program", [_WITH_GRANDCHILD, _IMMUNE + _WITH_GRANDCHILD])
def test_nothing_is_left_when_the_launcher_is_killed(program):
    with launched("-n", "2", "--", *PYTHON, program + "time.sleep(600)") as process:
        started = _processes(process, 2)
        assert [is_alive(each) for each in started] == [True] * 4
        process.kill()

        assert wait_until(lambda: not any(is_alive(each) for each in started))


def test_nothing_is_left_when_a_rank_fails():
    with launched(
        "-n", "2", "--grace", "0.1", "--", *PYTHON, _WITH_GRANDCHILD + "sys.exit(3)"
    ) as process:
        started = _processes(process, 2)
        process.communicate(timeout=PATIENCE)

    assert process.returncode == 3
    assert wait_until(lambda: not any(is_alive(each) for each in started))


def test_what_a_rank_started_ends_with_it():
    with launched("-n", "1", "--", *PYTHON, _WITH_GRANDCHILD) as process:
        started = _processes(process, 1)
        process.communicate(timeout=PATIENCE)

    assert process.returncode == 0
    assert wait_until(lambda: not any(is_alive(each) for each in started))


def test_when_nobody_reads_on_the_job_ends():
    program = "import time\nwhile True: print('step'); time.sleep(0.01)"
    with launched("-n", "1", "--", *PYTHON, "import os\nprint(os.getpid())\n" + program) as process:
        (rank,) = _processes(process, 1)
        process.stdout.close()
        process.stdout = None
        process.wait(timeout=PATIENCE)

    assert wait_until(lambda: not is_alive(rank))


def test_a_rank_that_raised_and_runs_on_is_pointed_out():
    """As after `jax.distributed.initialize()`; patience is shortened for the test."""
    raised = (
        "import sys, time, traceback\n"
        "try: open('/no/such/file')\n"
        "except OSError: traceback.print_exc()\n"
        "time.sleep(2)"
    )
    shortened = (
        "import sys\n"
        "from jax_dist.cli.main import main\n"
        "from jax_dist.launch import ranks\n"
        "ranks._RAISED_SECONDS = 0.2\n"
        "sys.exit(main(['launch', '-n', '1', '--', *sys.argv[1:]]))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", shortened, *PYTHON, raised],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )

    assert notices(ended.stderr)[0] == (
        "rank 0 wrote a traceback and has not ended; at its exit, "
        "jax.distributed may wait for the other ranks, for up to 300 s"
    )
    assert len(notices(ended.stderr)) == 2  # once, and the summary


def test_of_two_that_ended_at_once_the_one_that_was_not_aborted_is_named(tmp_path):
    program = (
        "import os, pathlib, sys, time\n"
        "print(os.getpid())\n"
        "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)\n"
        "os.abort() if os.environ['RANK'] == '0' else sys.exit(5)"
    )
    now = tmp_path / "now"
    with launched("-n", "2", "--", *PYTHON, program, str(now)) as process:
        ranks = _processes(process, 2)
        process.send_signal(signal.SIGSTOP)  # so that it sees both at once
        now.touch()
        assert wait_until(lambda: not any(is_alive(each) for each in ranks))
        process.send_signal(signal.SIGCONT)
        _, err = process.communicate(timeout=PATIENCE)

    assert process.returncode == 5
    assert notices(err)[-1].endswith("(rank 1: exit code 5; rank 0: signal SIGABRT)")


def test_an_abort_by_jax_points_to_the_rank_that_raised():
    raised = ("Traceback (most recent call last):", "ValueError: a bug")
    ended = (
        Ended(0, -signal.SIGABRT, None, 300.0, ("Fatal Python error: Aborted",)),
        Ended(1, -signal.SIGABRT, None, 300.0, ("*** Check failure",), raised),
    )
    outcome = JobOutcome(Reason.FAILED, 300.0, ended, first=ended[0], seen=ended[0])

    assert list(outcome.causes()) == [
        "rank 0 failed first: signal SIGABRT, after 300.0 s; the end of its output:\n"
        "    Fatal Python error: Aborted",
        "before that, rank 1 raised:\n"
        "    Traceback (most recent call last):\n"
        "    ValueError: a bug",
    ]
    assert outcome.summary() == "2 ranks, 300.0 s, exit code 134 (ranks 0-1: signal SIGABRT)"


_STOPS = """\
import os, signal, sys, time
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(1)
if sys.argv[1] == "abort": os.abort()
if sys.argv[1] == "strange":
    print("jax_dist.errors.JoinError: rank 0 meets a stranger at 127.0.0.1:4000:", file=sys.stderr)
sys.exit(3)
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("how", "first", "code"),
    [
        # JAX aborts the others when one no longer answers.
        ("abort", "rank 1 failed first: stopped (SIGSTOP), and the others waited for it", 147),
        ("strange", "rank 1 failed first: stopped (SIGSTOP), and the others waited for it", 147),
        ("exit", "rank 0 failed first: exit code 3, after", 3),
    ],
)
def test_a_rank_that_was_stopped_is_named_if_the_others_were_aborted(how, first, code):
    ended = launch("-n", "2", "--grace", "0.1", "--", *PYTHON, _STOPS, how)

    assert ended.returncode == code
    assert [text for text in notices(ended.stderr) if text.startswith(first)]
    assert "rank 1: stopped (SIGSTOP)" in notices(ended.stderr)[-1]


_BLAMES_RANK_1 = _RANK_1 + (
    "sys.exit(0)\n"
    "time.sleep(0.3)\n"
    "print('rank 0: stopping because rank 1 has finished, and so on', file=sys.stderr)\n"
    "sys.exit(1)"
)


def test_a_rank_that_has_finished_too_early_is_named():
    ended = launch("-n", "2", "--", *PYTHON, _BLAMES_RANK_1)

    assert ended.returncode == 1
    assert (
        "jax-dist launch: rank 1 failed first: exit code 0, and the others waited for it, after"
        in ended.stderr
    )


_IN_VAIN = _RANK_1 + (
    "time.sleep(600)\n"
    "time.sleep(0.3)\n"
    "print('jax_dist.errors.JoinError:', sys.argv[1], file=sys.stderr)\n"
    "sys.exit(1)"
)


@pytest.mark.parametrize(
    "what", ["rank 1 has not joined within 60 s:", "rank 0 has not reached rank 1 within 60 s:"]
)
def test_a_rank_that_does_not_come_is_named(what):
    ended = launch("-n", "2", "--grace", "0.1", "--", *PYTHON, _IN_VAIN, what)

    assert ended.returncode == 1
    assert (
        "rank 1 failed first: stopped by SIGTERM, and the others waited for it, after"
        in ended.stderr
    )


# ---- what cannot be written


_TWO_LINES = "import os; print('a'); print('b ' + os.environ['RANK'])"


@pytest.mark.parametrize(
    ("where", "line"),
    [
        (">/dev/full", "cannot write to standard output: No space left on device; the job goes on"),
        (">&-", "standard output is closed: what the ranks write there is lost"),
    ],
)
def test_an_output_that_takes_nothing_is_told_once_and_the_job_goes_on(where, line):
    words = shlex.join(command("-n", "2", "--", *PYTHON, _TWO_LINES))
    ended = subprocess.run(
        ["bash", "-c", f"{words} {where}"],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE,
        check=False,
    )

    assert ended.returncode == 0
    assert notices(ended.stderr)[:-1] == [line]
    assert notices(ended.stderr)[-1].startswith("2 ranks, ")


def test_an_error_output_that_takes_nothing_does_not_end_the_job(tmp_path):
    words = shlex.join(command("-n", "2", "--", *PYTHON, _TWO_LINES + "; import sys; 1 / 0"))
    ended = subprocess.run(
        ["bash", "-c", f"{words} 2>/dev/full"],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE,
        check=False,
    )

    assert ended.returncode == 1
    assert sorted(lines(ended.stdout)) == [(0, "a"), (0, "b 0"), (1, "a"), (1, "b 1")]


def test_a_log_that_cannot_be_written_is_told_once_and_the_job_goes_on(tmp_path):
    for rank in (0, 1):
        (tmp_path / f"rank-{rank}.log").symlink_to("/dev/full")
    ended = launch("-n", "2", "--log-dir", str(tmp_path), "--", *PYTHON, _TWO_LINES)

    assert ended.returncode == 0
    assert sorted(lines(ended.stdout)) == [(0, "a"), (0, "b 0"), (1, "a"), (1, "b 1")]
    assert notices(ended.stderr)[:-1] == [
        f"cannot write to {tmp_path}: No space left on device; the job goes on"
    ]
