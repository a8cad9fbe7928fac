"""The forms of output, each as the very text that a person or a program gets."""

import json
import textwrap

import pytest

from jax_dist.lint.engine import report
from jax_dist.lint.engine.linter import RULES, Examiner


def _findings(text: str, path: str = "train.py", codes=frozenset(RULES)):
    return Examiner(codes).examine(path, text.encode())


_TEXT = "import jax\nn = jax.lax.psum(1, 'i')\nm = jax.lax.all_gather(x, 'i').mean(0)\n"


def _format(name: str, text: str = _TEXT, path: str = "train.py", *, color=False) -> str:
    return report.format_report(_findings(text, path), name, color=color)


def test_text():
    assert _format("text") == textwrap.dedent("""\
        train.py:2:5: JXD306 [*] psum(1, axis) is axis_size(axis)
        2 | n = jax.lax.psum(1, 'i')
          |     ^^^^^^^^^^^^^^^^^^^^
          help: use jax.lax.axis_size

        train.py:3:5: JXD301 all_gather, then mean over the gathered dimension, is pmean
        3 | m = jax.lax.all_gather(x, 'i').mean(0)
          |     ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
          help: use jax.lax.pmean (--unsafe-fixes)
        """)
    assert report.summary(_findings(_TEXT)) == (
        "Found 2 findings in 1 file (1 fixable with --fix, 1 more with --unsafe-fixes)."
    )
    assert report.summary(()) == "No findings."


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("if x:\n\tjax.pmap(f)", "3 |     jax.pmap(f)\n  |     ^^^^^^^^\n"),
        ("x = 'é', jax.pmap(f)", "2 | x = 'é', jax.pmap(f)\n  |          ^^^^^^^^\n"),
        ("x = '\x1b', jax.pmap(f)", "2 | x = '�', jax.pmap(f)\n  |          ^^^^^^^^\n"),
        (
            f"x = '{'a' * 200}', jax.pmap(f)",
            "2 | …jax.pmap(f)\n  |  ^^^^^^^^\n",
        ),
    ],
)
def test_text_of_lines_that_are_hard_to_show(line, shown):
    assert shown in _format("text", f"import jax\n{line}\n")


def test_a_very_long_line_is_shown_from_what_was_found_on():
    text = _format(
        "text", "import jax\ny = [" + "0, " * 2000 + "jax.pmap(f), " + "0, " * 2000 + "]\n"
    )

    line, carets = text.splitlines()[1:3]
    assert line.startswith("2 | …jax.pmap(f), 0, 0")
    assert carets == "  |  ^^^^^^^^"


def test_colors():
    text = _format("text", "import jax\njax.lax.psum(1, 'i')\n", color=True)

    assert text.startswith(
        "\x1b[1mtrain.py\x1b[0m:2:1: \x1b[1;31mJXD306\x1b[0m \x1b[36m[*] \x1b[0m"
    )


def test_concise():
    assert _format("concise") == (
        "train.py:2:5: JXD306 psum(1, axis) is axis_size(axis)\n"
        "train.py:3:5: JXD301 all_gather, then mean over the gathered dimension, is pmean\n"
    )


def test_json():
    first, second = json.loads(_format("json"))

    assert second["code"] == "JXD301"
    assert first == {
        "path": "train.py",
        "code": "JXD306",
        "name": "psum-of-one",
        "message": "psum(1, axis) is axis_size(axis)",
        "start": {"line": 2, "column": 5, "cell": None},
        "end": {"line": 2, "column": 25, "cell": None},
        "span": [15, 35],
        "line_text": "n = jax.lax.psum(1, 'i')",
        "fix": {
            "title": "use jax.lax.axis_size",
            "safety": "safe",
            "edits": [
                {"start": 15, "end": 27, "text": "jax.lax.axis_size"},
                {"start": 28, "end": 31, "text": ""},
            ],
            "imports": [],
        },
    }


def test_github():
    text = "import jax\njax.debug.print('%')\ndef f():\n  return jax.pmap(\n   g)\n"
    assert _format("github", text, "a,b.py") == (
        "::notice title=jax-dist (JXD405),file=a%2Cb.py,line=2,endLine=2,col=1,endColumn=16::"
        "JXD405 print keeps a program out of the persistent cache up to jax 0.10.2\n"
        "::warning title=jax-dist (JXD001),file=a%2Cb.py,line=4,endLine=4,col=10,endColumn=18::"
        "JXD001 jax.pmap is in maintenance mode; jax-dist migrate rewrites it\n"
    )
    assert _format("github", "import jax.pmap as\n").startswith("::error ")
    cell = {"cell_type": "code", "source": "import jax\njax.pmap(f)"}
    assert _format("github", json.dumps({"cells": [cell]}), "a.ipynb") == (
        "::warning title=jax-dist (JXD001),file=a.ipynb,line=1,endLine=1,col=1,endColumn=1::"
        "JXD001 cell 1, line 2: jax.pmap is in maintenance mode; jax-dist migrate rewrites it\n"
    )


@pytest.mark.parametrize("form", ["text", "concise", "github"])
def test_no_name_of_a_file_moves_the_cursor(form):
    text = _format(form, path="a\x1b[31m\n::error::b.py")

    assert "\x1b" not in text
    assert "\n::error" not in text
    assert "\\x1b[31m\\n" in text
