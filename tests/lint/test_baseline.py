"""Known findings are hidden, new ones are not, and what is gone is told."""

import dataclasses
import json
import os
import pathlib

import pytest
import word_rules

from jax_dist._usage import MisuseError
from jax_dist.lint.engine import suppressions
from jax_dist.lint.model.sources import read


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch) -> pathlib.Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _findings(text: str, path: str = "src/a.py"):
    return word_rules.check(read(path, text.encode()), None, word_rules.CODES)


def _write(text: str, file: str = "known.json") -> None:
    pathlib.Path(file).write_text(suppressions.baseline_of(_findings(text), file))


def _compared(text: str, file: str = "known.json", path: str = "src/a.py"):
    return suppressions.beyond_baseline(
        _findings(text, path), file, files=[path], codes=frozenset({"JXD101", "JXD102"})
    )


def test_the_file_is_made_to_be_read_and_merged():
    _write("risky\nold\nold\nold + 1\n")

    text = pathlib.Path("known.json").read_text()
    assert (
        text
        == """\
{
  "version": 1,
  "findings": {
    "src/a.py": [
      {
        "code": "JXD101",
        "line": "old",
        "count": 2
      },
      {
        "code": "JXD101",
        "line": "old + 1",
        "count": 1
      },
      {
        "code": "JXD102",
        "line": "risky",
        "count": 1
      }
    ]
  }
}
"""
    )


def test_lines_may_move():
    _write("old\n")

    compared = _compared("import os\n\nif x:\n    old\n")

    assert (compared.new, compared.hidden, compared.stale) == ((), 1, ())


def test_one_more_of_the_same_is_new():
    _write("old\nold\n")

    compared = _compared("old\nold\nx\nold\n")

    assert [each.start.line for each in compared.new] == [4]
    assert compared.hidden == 2


def test_what_is_gone_is_told():
    _write("old\nold\nrisky\nplain\n")

    compared = _compared("old\n")

    # `plain` was not looked for.
    assert [dataclasses.astuple(each) for each in compared.stale] == [
        ("src/a.py", "JXD101", "old", 1),
        ("src/a.py", "JXD102", "risky", 1),
    ]


def test_files_that_were_not_looked_at_are_not_called_gone():
    _write("old\n")
    os.mkdir("src")
    pathlib.Path("src/a.py").touch()
    assert _compared("x\n", path="src/b.py").stale == ()

    pathlib.Path("src/a.py").unlink()
    (gone,) = _compared("x\n", path="src/b.py").stale
    assert dataclasses.astuple(gone) == ("src/a.py", "JXD101", "old", 1)


def test_paths_are_seen_from_the_file_not_from_where_one_stands(folder):
    os.mkdir("ci")
    _write("old\n", "ci/known.json")
    assert list(json.loads(pathlib.Path("ci/known.json").read_text())["findings"]) == [
        "../src/a.py"
    ]

    os.chdir("ci")
    assert _compared("old\n", "known.json", "../src/a.py").hidden == 1
    assert _compared("old\n", "known.json", f"{folder}/src/a.py").hidden == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            None,
            "the baseline b.json cannot be read: No such file or directory. "
            "--write-baseline makes one.",
        ),
        ("{", "the baseline b.json is not JSON: Expecting property name enclosed in double "),
        ("[]", "b.json is not a baseline of this version; --write-baseline writes a new one"),
        ('{"version": 2, "findings": {}}', "b.json is not a baseline of this version; --write-"),
        ('{"version": 1, "findings": {"a": [{}]}}', "b.json is not a baseline of this version; --"),
    ],
)
def test_what_is_no_baseline_is_misuse(text, message):
    if text is not None:
        pathlib.Path("b.json").write_text(text)

    with pytest.raises(MisuseError) as caught:
        _compared("old\n", "b.json")

    assert str(caught.value).startswith(message)
