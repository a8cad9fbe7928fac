"""The command line as a whole: help, exit codes, suggestions, limits of numbers."""

import argparse
import io
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

import jax_dist
from jax_dist.cli import terminal
from jax_dist.cli.main import COMMANDS, main, make_parser


def _run(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    code = main(arguments, out=out, err=err)
    return code, out.getvalue(), err.getvalue()


def _usage_error(capsys: pytest.CaptureFixture[str], line: str) -> str:
    with pytest.raises(SystemExit) as caught:
        _run(*line.split())
    assert caught.value.code == 2
    return capsys.readouterr().err


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from _parsers(child)


def test_without_a_command_it_prints_help_and_exits_with_2():
    code, out, err = _run()

    assert (code, out) == (2, "")
    assert "exit codes: 0 success" in err
    assert [name for name in COMMANDS if f"\n    {name}" not in err] == []


def test_each_command_has_help_with_an_example(capsys):
    for parser in _parsers(make_parser()):
        with pytest.raises(SystemExit) as caught:
            _run(*parser.prog.split()[1:], "--help")
        text = capsys.readouterr().out

        assert caught.value.code == 0
        assert text.startswith(f"usage: {parser.prog}")
        assert re.search(r"^examples?:", text, re.MULTILINE), parser.prog


@pytest.mark.parametrize(("command", "code"), [("run", 7), ("explain", 7), ("cache verify", 143)])
def test_a_signal_leaves_no_program_and_no_file(command, code, tmp_path):
    (tmp_path / "tmp").mkdir()
    script = (
        "import os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "pathlib.Path('new').write_text(str(os.getpid()))\n"
        "os.rename('new', 'pid')\n"
        "time.sleep(100)\n"
    )
    words = [sys.executable, "-m", "jax_dist", *command.split(), "--", sys.executable, "-c", script]
    folder = str(pathlib.Path(jax_dist.__file__).parents[1])
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": folder}
    started = subprocess.Popen(words, cwd=tmp_path, env=environment)
    while started.poll() is None and not (tmp_path / "pid").exists():
        time.sleep(0.05)

    started.terminate()

    assert started.wait(30) == code
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
    assert list((tmp_path / "tmp").iterdir()) == []


def test_the_package_runs_as_a_program():
    command = [sys.executable, "-m", "jax_dist", "--version"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)

    assert run.stdout == f"jax-dist {jax_dist.__version__}\n"


@pytest.mark.parametrize("streams", [("stdout",), ("stdout", "stderr")])
def test_a_reader_that_leaves_early_gets_no_traceback(streams, tmp_path):
    """As in `jax-dist lint | head`."""
    (tmp_path / "a.py").write_text("import jax\n" + "jax.pmap(f)\n" * 2000)
    command = [sys.executable, "-m", "jax_dist", "lint", str(tmp_path)]
    reading, writing = os.pipe()
    os.close(reading)
    pipes = {"stderr": subprocess.PIPE, **dict.fromkeys(streams, writing)}
    run = subprocess.run(command, **pipes, text=True, check=False)
    os.close(writing)

    assert (run.returncode, run.stderr or "") == (2, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no full device here")
def test_a_full_disk_is_named_in_one_line(tmp_path):
    (tmp_path / "a.py").write_text("import jax\njax.pmap(f)\n")
    command = [sys.executable, "-m", "jax_dist", "lint", str(tmp_path)]
    with open("/dev/full", "w") as full:
        run = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)

    assert (run.returncode, run.stderr) == (2, "jax-dist lint: No space left on device\n")


def test_an_internal_error_has_a_traceback_and_never_the_code_of_a_finding(monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("jax_dist.cli.doctor._run", fail)
    code, _, err = _run("doctor")

    assert code == 2
    assert "RuntimeError: broken" in err
    assert err.endswith("jax-dist doctor: internal error; please report it\n")


@pytest.mark.parametrize(
    ("line", "suggestion"),
    [
        ("lnt .", "Did you mean lint?"),
        ("cache verfiy", "Did you mean verify?"),
        ("migrate --to jaxdist .", "Did you mean jax_dist?"),
        ("lint --format json a.py", "Did you mean --output-format?"),
        ("lint --format=json a.py", "Did you mean --output-format?"),
        ("lint --unsafe a.py", "Did you mean --unsafe-fixes?"),
        ("cache verify --timeot 3 -- true", "Did you mean --timeout?"),
        ("lint --zzzzzz a.py", "`jax-dist lint --help` lists the options."),
        ("doctor now", "unrecognized arguments: now"),
        ("run python a.py", "unrecognized arguments: python a.py. Put -- before the program"),
    ],
)
def test_a_misspelt_word_names_the_nearest(capsys, line, suggestion):
    err = _usage_error(capsys, line)

    assert suggestion in err
    if "Did you mean" not in suggestion:
        assert "Did you mean" not in err


def test_no_option_may_be_abbreviated():
    assert [parser.prog for parser in _parsers(make_parser()) if parser.allow_abbrev] == []


@pytest.mark.parametrize(
    ("kind", "good", "bad", "message"),
    [
        (terminal.count, ["1", "64"], ["0", "-5"], "must be 1 or more, not "),
        (
            terminal.seconds,
            ["0.1", "2000000"],
            ["0", "-1", "inf", "nan", "2000001", "9" * 5000],
            "must be more than 0, at most 2000000, not ",
        ),
    ],
)
def test_numbers_have_limits(kind, good, bad, message):
    assert [kind(text) for text in good] == [float(text) for text in good]
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError) as caught:
            kind(text)
        assert str(caught.value).startswith(message)
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "option", ["--devices 1.5", "--devices x", "--timeout soon", f"--devices {'9' * 5000}"]
)
def test_what_is_no_number_is_named(capsys, option):
    name = option.split()[0]
    kind = "count" if name == "--devices" else "seconds"

    assert f"argument {name}: invalid {kind} value: '" in _usage_error(capsys, f"migrate {option}")


@pytest.mark.parametrize(
    ("when", "environment", "is_terminal", "expected"),
    [
        ("auto", {}, True, True),
        ("auto", {}, False, False),
        ("auto", {"NO_COLOR": "1"}, True, False),
        ("auto", {"FORCE_COLOR": "1"}, False, True),
        ("auto", {"TERM": "dumb"}, True, False),
        ("always", {"NO_COLOR": "1"}, False, True),
        ("never", {"FORCE_COLOR": "1"}, True, False),
    ],
)
def test_color(when, environment, is_terminal, expected, monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stream = io.StringIO()
    stream.isatty = lambda: is_terminal

    assert terminal.wants_color(when, stream) == expected


def test_progress_is_shown_on_a_terminal_only():
    for is_terminal in (True, False):
        stream = io.StringIO()
        stream.isatty = lambda is_terminal=is_terminal: is_terminal
        with terminal.progress(stream, "checks files") as show:
            show("1 of 3 files")

        assert ("1 of 3 files" in stream.getvalue()) == is_terminal
