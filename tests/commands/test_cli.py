"""The command line: help and exit codes."""

import io
import subprocess
import sys

import pytest

import jax_dist
from jax_dist.commands.cli import main


def _run(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    code = main(arguments, out=out, err=err)
    return code, out.getvalue(), err.getvalue()


def test_without_a_command_it_teaches_and_says_misuse():
    code, out, err = _run()

    assert code == 2
    assert out == ""
    assert "jax-dist doctor" in err
    assert "exit codes: 0 all is well" in err


def test_help_of_each_command(capsys):
    with pytest.raises(SystemExit) as caught:
        _run("doctor", "--help")

    assert caught.value.code == 0
    assert "usage: jax-dist doctor" in capsys.readouterr().out


def test_an_unknown_command_is_misuse(capsys):
    with pytest.raises(SystemExit) as caught:
        _run("nothing")

    assert caught.value.code == 2
    assert "invalid choice: 'nothing'" in capsys.readouterr().err


def test_the_package_runs_as_a_program():
    run = subprocess.run(
        [sys.executable, "-m", "jax_dist", "--version"], capture_output=True, text=True, check=True
    )

    assert run.stdout == f"jax-dist {jax_dist.__version__}\n"
