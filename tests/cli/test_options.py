"""The options of all commands: none is abbreviated, an unknown one is explained, numbers end."""

import argparse
import ast
import io
import pathlib
import subprocess
import sys

import pytest

from jax_dist.cli import main as cli

_ROOT = pathlib.Path(__file__).parents[2]


def _parsers() -> dict[str, argparse.ArgumentParser]:
    top = cli._parser([])
    return {top.prog: top, **dict(top.subparsers())}


def _refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is said of a command line that cannot be followed."""
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments, out=io.StringIO(), err=io.StringIO())
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_all_commands_are_walked():
    names = {name for name in _parsers() if name.count(" ") < 2}

    assert names == {"jax-dist", *(f"jax-dist {name}" for name in cli._COMMANDS)}
    assert "jax-dist cache verify" in _parsers()


@pytest.mark.thorough
@pytest.mark.parametrize("name", _parsers())
def test_no_option_may_be_cut_short(name: str, capsys: pytest.CaptureFixture[str]):
    parser = _parsers()[name]
    assert not parser.allow_abbrev

    words = name.split()[1:]
    for option in parser.options():
        for end in range(3, len(option)):
            if option[:end] not in parser.options():
                assert option[:end] in _refused(capsys, *words, option[:end])


def test_no_parser_of_a_script_lets_options_be_cut_short():
    made = []
    for path in sorted(_ROOT.glob("[beh]*/**/*.py")):  # benchmarks, examples, hooks
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("ArgumentParser"):
                told = {each.arg: ast.unparse(each.value) for each in node.keywords}
                made.append((path.name, told.get("allow_abbrev")))

    assert len(made) > 10
    assert [name for name, allowed in made if allowed != "False"] == []


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("lint --write a.py", "Did you mean `jax-dist migrate --write` or `--write-baseline`?"),
        ("lint --writ a.py", "Did you mean `jax-dist migrate --write`?"),
        ("lint --format json a.py", "Did you mean `--output-format`?"),
        ("lint --format=json a.py", "Did you mean `--output-format`?"),
        ("lint --baselin b.json", "Did you mean `--baseline`?"),
        ("lint --verfy a.py", "Did you mean `jax-dist migrate --verify`?"),
        ("migrate --diff a.py", "Leave it out: a diff is printed unless --write or --check is"),
        ("migrate --diff", "Leave it out: a diff is printed unless --write or --check is"),
        ("migrate --fix a.py", "Did you mean `--write`?"),
        ("launch --nproc 2 -- true", "Did you mean `-n` or `--processes`?"),
        ("launch --nproc 2 python a.py --write", "Did you mean `-n` or `--processes`?"),
        ("cache verify --timeot 3 -- true", "Did you mean `--timeout`?"),
    ],
)
def test_an_unknown_option(line: str, remedy: str, capsys: pytest.CaptureFixture[str]):
    words = line.split()
    place = next(k for k, word in enumerate(words) if word.startswith("--"))
    command = " ".join(["jax-dist", *words[:place]])

    err = _refused(capsys, *words)

    assert err.startswith(f"usage: {command} ")
    assert f"{command}: error: unrecognized arguments: {words[place]}" in err
    assert remedy in err


def test_an_option_before_the_command(capsys: pytest.CaptureFixture[str]):
    assert "Did you mean `jax-dist migrate --write`?" in _refused(capsys, "--write", "a.py")


@pytest.mark.parametrize(
    "line", ["doctor --quixotic", "doctor now", "launch python a.py --write", "lint -Z"]
)
def test_no_advice_is_made_up(line: str, capsys: pytest.CaptureFixture[str]):
    assert "Did you mean" not in _refused(capsys, *line.split())


_COUNTS = [
    ("launch -n {} -- true", 1, 1024),
    ("launch -n 1 --cpu-devices {} -- true", 1, 4096),
    ("launch -n 1 --gpus {} -- true", 1, 4096),
    ("launch -n 1 --restarts {} -- true", 0, 1_000_000),
    ("migrate --devices {} a.py", 1, 4096),
    ("plan --devices {} -- a.py", 1, 64),
]
_TIMES = [
    ("launch -n 1 --timeout {} -- true", "more than 0"),
    ("launch -n 1 --grace {} -- true", "0"),
    ("launch -n 1 --min-interval {} -- true", "0"),
    ("migrate --timeout {} a.py", "more than 0"),
    ("cache verify --timeout {} -- true", "more than 0"),
    ("doctor --timeout {}", "more than 0"),
]


def test_all_numbers_are_tried():
    """An option that reads numbers, and is not in the lists above, has no limit that is tested."""
    numbers = set()
    for name, parser in _parsers().items():
        for action in parser._actions:
            if action.metavar in ("N", "SECONDS"):
                numbers.add((name, action.option_strings[0]))
    lines = [line.split() for line, *_ in [*_COUNTS, *_TIMES]]
    tried = {
        (" ".join(["jax-dist", *words[: 2 if words[0] == "cache" else 1]]), words[at - 1])
        for words in lines
        for at in [words.index("{}")]
    }

    assert numbers == tried


@pytest.mark.parametrize(("line", "least", "most"), _COUNTS)
def test_a_count_has_limits(line: str, least: int, most: int, capsys: pytest.CaptureFixture[str]):
    for bad in (least - 1, most + 1, -5, 10**19, "9" * 5000, "1.5", "1e3", "inf", "x", "٣x"):
        said = _refused(capsys, *line.format(bad).split())
        assert f"must be a whole number from {least} to {most}, not '{str(bad)[:30]}" in said
        assert len(said) < 5000
    command, words = line.split()[0], line.format(most).split()
    cut = words.index("--") if "--" in words else len(words)
    assert str(most) in str(vars(cli._parser([command]).parse_args(words[:cut])))


@pytest.mark.parametrize(("line", "least"), _TIMES)
def test_a_time_has_limits(line: str, least: str, capsys: pytest.CaptureFixture[str]):
    for bad in ("-1", "inf", "nan", "1e300", "2000001", "9" * 5000, "soon"):
        said = _refused(capsys, *line.format(bad).split())
        assert "must be a number of seconds from 0 to 2000000 (23 days), not '" in said
    if least == "more than 0":
        assert "must be more than 0" in _refused(capsys, *line.format("0").split())


def test_the_longest_time_can_be_waited_for():
    command = [sys.executable, "-m", "jax_dist", "launch", "-n", "1", "--timeout", "2000000"]

    run = subprocess.run([*command, "--", "true"], capture_output=True, check=False)

    assert run.returncode == 0, run.stderr
