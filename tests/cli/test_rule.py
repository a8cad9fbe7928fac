"""`jax-dist rule`: the pages of the rules, in the terminal and in the documentation."""

import io
import json
import pathlib

import pytest

from jax_dist.cli.main import main
from jax_dist.lint.engine import linter

_DOCS = pathlib.Path(__file__).parents[2] / "docs" / "rules.md"

_PSUM_OF_ONE = """\
JXD306 psum-of-one

What it does
  Finds `jax.lax.psum(1, axis)`, under any alias.

Why this is bad
  It reads as communication, but JAX folds it to a constant while tracing.

Example
  n = jax.lax.psum(1, 'i')

Use instead
  n = jax.lax.axis_size('i')

Fix safety
  Safe: the same value of the same type, in one process and in many.

Since
  jax 0.6.1: `jax.lax.axis_size`.

Source
  https://docs.jax.dev/en/latest/_autosummary/jax.lax.axis_size.html
"""


def _run(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    code = main(("rule", *arguments), out=out, err=err)
    return code, out.getvalue(), err.getvalue()


@pytest.mark.parametrize("rule", ["JXD306", "jxd306", "psum-of-one", "PSUM-of-one"])
def test_the_page_of_a_rule(rule):
    assert _run(rule) == (0, _PSUM_OF_ONE, "")


@pytest.mark.parametrize(
    ("rule", "remedy"),
    [
        ("JXD01", "Did you mean JXD001?"),
        ("JXD306x", "Did you mean JXD306?"),
        ("psum-one", "Did you mean psum-of-one?"),
        ("PLR0913", "`jax-dist rule --all` lists the rules."),
    ],
)
def test_a_rule_that_is_not_there_is_misuse(rule, remedy):
    assert _run(rule) == (2, "", f"jax-dist rule: there is no rule {rule!r}. {remedy}\n")


def test_all_rules_on_a_line_each():
    code, out, _ = _run("--all")

    lines = out.splitlines()
    assert code == 0
    assert [line.split()[:2] for line in lines if "JXD306" in line] == [["JXD306", "psum-of-one"]]
    assert [line.endswith("  safe fix") for line in lines if "JXD306" in line] == [True]
    assert [line.endswith("  no fix") for line in lines if "JXD901" in line] == [True]
    assert len(lines) == len(linter.PAGES)
    assert lines == sorted(lines)


def test_a_page_as_json():
    page = json.loads(_run("JXD306", "--output-format", "json")[1])

    assert page["code"] == "JXD306"
    assert page["instead"] == "n = jax.lax.axis_size('i')\n"
    assert page["default"] is True


def test_all_pages_as_json():
    pages = json.loads(_run("--all", "--output-format", "json")[1])

    assert [page["code"] for page in pages] == sorted(linter.PAGES)


def test_a_row_says_what_a_rule_finds_and_what_it_costs():
    rows = [f"| {page.summary} | {page.cost} | " for page in linter.PAGES.values()]
    _, out, _ = _run("--all", "--output-format", "table")

    assert [row for row in rows if row not in out] == []
    assert [page.code for page in linter.PAGES.values() if not (page.summary and page.cost)] == []
    assert max(len(row) for row in rows) < 150  # a few words


def test_all_pages_as_markdown_follow_their_table():
    _, table, _ = _run("--all", "--output-format", "table")
    _, out, _ = _run("--all", "--output-format", "markdown")

    assert out.startswith(table)
    assert out.count("\n### What it does\n") == len(linter.PAGES)


def test_the_documentation_has_the_table_of_today():
    _, out, _ = _run("--all", "--output-format", "table")

    remedy = "run: jax-dist rule --all --output-format table > docs/rules.md"
    assert out == _DOCS.read_text(encoding="utf-8"), remedy


@pytest.mark.parametrize("arguments", [(), ("JXD306", "--all")])
def test_one_rule_or_all(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        _run(*arguments)

    assert caught.value.code == 2
    assert "--all" in capsys.readouterr().err
