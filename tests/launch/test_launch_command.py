"""The command line: what is refused, and what is said about it."""

import io
import subprocess
import sys

import pytest
from launching import environment, launch, lines

from jax_dist.cli import main as cli


def _refused(*arguments: str) -> str:
    """What is said on standard error."""
    err = io.StringIO()
    with pytest.raises(SystemExit) as caught:
        cli.main(["launch", *arguments], out=io.StringIO(), err=err)
    assert caught.value.code == 2
    return err.getvalue()


_USAGE = "usage: jax-dist launch -n N [options] -- COMMAND ...\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-n", "2"], "what should the processes run?\n" + _USAGE),
        (["-n", "2", "--"], "what should the processes run?\n" + _USAGE),
        (["-n", "2", "--", "no-such"], "no-such: there is no such command\n" + _USAGE),
        (["-n", "2", "no-such", "-v"], "no-such: there is no such command\n" + _USAGE),
        (["-n", "2", "--", "/etc/passwd"], "/etc/passwd: there is no such command\n" + _USAGE),
        (["-n", "2", "--only-rank", "0,2", "--", "true"], "--only-rank 2: the ranks are 0 to 1\n"),
        (["-n", "1", "--log-dir", "/etc/passwd", "true"], "--log-dir /etc/passwd: File exists\n"),
    ],
)
def test_misuse_says_what_is_wrong(arguments, text):
    assert _refused(*arguments) == f"jax-dist launch: {text}"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "the following arguments are required: -n/--processes"),
        (["-n", "0", "--", "true"], "argument -n/--processes: must be a whole number from 1 to"),
        (["-n", "x", "--", "true"], "argument -n/--processes: must be a whole number from 1 to"),
        (["-n", "1", "--cpu-devices", "0"], "argument --cpu-devices: must be a whole number"),
        (["-n", "1", "--timeout", "0"], "argument --timeout: must be more than 0"),
        (["-n", "1", "--timeout", "nan"], "argument --timeout: must be a number of seconds from"),
        (["-n", "1", "--grace", "-1"], "argument --grace: must be a number of seconds from"),
        (["-n", "1", "--gpus", "1", "--cpu-devices", "1"], "not allowed with argument --gpus"),
        (["-n", "1", "--only-rank", "0,"], "argument --only-rank: must be ranks, such as 0 or"),
    ],
)
def test_an_option_that_cannot_be_followed(arguments, text, capsys):
    _refused(*arguments)
    err = capsys.readouterr().err

    assert err.startswith(_USAGE)
    assert text in err


def test_a_program_that_the_system_cannot_run(tmp_path):
    program = tmp_path / "program"
    program.write_text("no shebang")
    program.chmod(0o755)

    ended = launch("-n", "2", "--", str(program))
    assert ended.returncode == 2
    assert ended.stderr == f"jax-dist launch: {program} cannot be started: Exec format error\n"


def test_the_dashes_before_the_command_may_be_left_out():
    assert lines(launch("-n", "1", "echo", "-n", "a").stdout) == [(0, "a")]
    assert lines(launch("-n", "1", "echo", "a", "--", "b").stdout) == [(0, "a -- b")]
    assert lines(launch("-n", "1", "--", "echo", "a", "--", "b").stdout) == [(0, "a -- b")]


def test_help_teaches():
    shown = launch("--help")

    assert shown.returncode == 0
    assert shown.stdout.startswith(_USAGE)
    for word in (
        "--cpu-devices",
        "exit codes:",
        "examples:",
        "docs/processes.md",
        "SIGTERM",
        "124",
    ):
        assert word in shown.stdout


def test_the_launcher_does_not_load_jax():
    program = (
        "import sys\n"
        "from jax_dist.cli.main import main\n"
        "main(['launch', '-n', '1', '--', 'true'])\n"
        "print([name for name in ('jax', 'numpy') if name in sys.modules])\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )

    assert ran.stdout == "[]\n"
