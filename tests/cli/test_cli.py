"""The command line: help and exit codes."""

import io
import re
import subprocess
import sys
import time
from importlib import import_module

import pytest

import jax_dist
from jax_dist.cli import terminal
from jax_dist.cli.main import main


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


def test_a_folder_that_is_gone_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()

    code, out, err = _run("lint", "/")
    assert (code, out) == (2, "")
    assert err == "jax-dist: the current folder is gone; change to one that is there\n"


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["lnt", "."], "lint"),
        (["cache", "verfiy"], "verify"),
        (["migrate", "--to", "jaxdist", "."], "jax_dist"),
        (["rule", "psum-of-on"], "psum-of-one"),
    ],
)
def test_a_misspelt_word_names_what_was_meant(capsys, arguments, meant):
    try:
        code, _, err = _run(*arguments)
    except SystemExit as ended:
        code, err = ended.code, capsys.readouterr().err

    assert code == 2
    assert f"Did you mean {meant}?" in err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_printed_for_a_shell(capsys, shell):
    pytest.importorskip("shtab")
    with pytest.raises(SystemExit) as caught:
        _run("--print-completion", shell)

    assert caught.value.code == 0
    assert "verify" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["mig"], ["migrate"]),
        (["cache", "ve"], ["verify"]),
        (["migrate", "--to", ""], ["jax_dist", "jax", "global"]),
    ],
)
def test_bash_completes(capsys, tmp_path, words, completed):
    pytest.importorskip("shtab")
    with pytest.raises(SystemExit):
        _run("--print-completion", "bash")
    (tmp_path / "completion").write_text(capsys.readouterr().out)
    typed = " ".join(f"'{word}'" for word in words)
    script = (
        f"source {tmp_path}/completion; COMP_WORDS=(jax-dist {typed}); COMP_CWORD={len(words)}; "
        '_shtab_jax_dist; echo "${COMPREPLY[@]}"'
    )

    run = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)

    assert run.stdout.split() == completed


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["migrate", "-w", "a.py"], "Did you mean `--write`?"),
        (["launch", "-t", "5", "-n", "2"], "Did you mean `--timeout`?"),
        (["--lint", "a.py"], "Did you mean `jax-dist lint`?"),
        (["cache", "--verify"], "Did you mean `jax-dist cache verify`?"),
        (["lint", "--format", "json", "a.py"], "Did you mean `--output-format`?"),
        (["lint", "--zzzzzz", "a.py"], "`jax-dist lint --help` lists the options."),
        (["launch", "-n2", "--zzzzzz"], "`jax-dist launch --help` lists the options."),
    ],
)
def test_an_unknown_option_names_the_nearest_or_where_they_are(capsys, arguments, advice):
    with pytest.raises(SystemExit) as caught:
        _run(*arguments)
    err = capsys.readouterr().err
    command = "" if arguments[0].startswith("-") else f" {arguments[0]}"

    assert caught.value.code == 2
    assert err.startswith(f"usage: jax-dist{command} [") or f"usage: jax-dist{command} -n" in err
    assert err.endswith(f". {advice}\n")


def test_help_lists_what_is_used_every_day(capsys):
    with pytest.raises(SystemExit):
        _run("--help")
    listed = re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE)

    assert {"lint", "migrate", "plan"} <= set(listed)
    assert "certificate" not in listed


def test_what_help_does_not_list_works_as_before(capsys):
    with pytest.raises(SystemExit) as caught:
        _run("certificate", "--help")

    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("usage: jax-dist certificate ")


@pytest.mark.parametrize(
    ("module", "name", "arguments", "what"),
    [
        ("jax_dist.doctor", "diagnose", ("doctor",), "waiting for the devices"),
    ],
)
def test_what_lasts_says_since_when_on_a_terminal(monkeypatch, module, name, arguments, what):
    err = io.StringIO()
    err.isatty = lambda: True
    monkeypatch.setattr(terminal, "_TICK", 0.001)
    monkeypatch.setattr(terminal, "_PATIENCE", 0.0)

    def lasts(*_: object, **__: object) -> None:
        end = time.monotonic() + 60
        while f"\r{what}, 0 s" not in err.getvalue() and time.monotonic() < end:
            time.sleep(0.001)
        raise _DoneError

    monkeypatch.setattr(import_module(module), name, lasts)
    with pytest.raises(SystemExit):  # a fault, as the command sees it
        main(arguments, out=io.StringIO(), err=err)

    assert f"\r{what}, 0 s" in err.getvalue()


class _DoneError(Exception):
    """Ends a command that has shown what is looked at."""
