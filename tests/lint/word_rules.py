"""A checker of single words, so that what is around the rules is tested apart from them.

What a word does stands beside it; a fix replaces the word.
"""

import ast
import re

import pytest

from jax_dist.cli import lint_run
from jax_dist.lint.engine import linter
from jax_dist.lint.model.findings import Edit, Finding, Fix, Safety
from jax_dist.lint.model.project import Project
from jax_dist.lint.rules import Page, linter_findings

_WORDS = {
    "old": ("JXD101", "olden", Safety.SAFE, "new"),
    "risky": ("JXD102", "riskier", Safety.UNSAFE, "new"),
    "idea": ("JXD103", "ideal", Safety.DISPLAY, "new"),
    "plain": ("JXD104", "plainly", None, ""),
    "wide": ("JXD105", "widely", Safety.SAFE, "new"),  # its edit goes on to the end of the line
    "harm": ("JXD106", "harmful", Safety.SAFE, "plain"),  # makes a new finding
    "broken": ("JXD107", "breaking", Safety.SAFE, "("),  # cannot be parsed
    "clear": ("JXD108", "clearing", Safety.SAFE, "new"),  # its edit takes all up to a comment
    "maybe": ("JXD201", "perhaps", None, ""),  # off by default
}
_PATTERN = re.compile(rf"\b({'|'.join(_WORDS)})\b(?P<rest>.*)".encode())


def _page(code: str, name: str) -> Page:
    return Page(code, name, "What.", "Why.", "x", "y", "F.", "S.", "M.", default=name != "perhaps")


PAGES = {code: _page(code, name) for code, name, _, _ in _WORDS.values()}
PAGES |= {
    page.code: page
    for page in (linter_findings.UNUSED, linter_findings.SYNTAX_ERROR, linter_findings.UNKNOWN)
}
CODES = frozenset(code for code, page in PAGES.items() if page.default)


def check(source, project, codes, target=None, of=None, real=linter.check):
    del project, target, of
    try:
        ast.parse(source.python)
    except SyntaxError:
        return real(source, Project(), codes)
    found = (_finding(source, match) for match in _matches(source.python))
    return [finding for finding in found if finding.code in codes]


def _matches(code: bytes):
    at = 0
    while match := _PATTERN.search(code, at):
        yield match
        at = match.end(1)


def _finding(source, match) -> Finding:
    code, name, safety, text = _WORDS[match[1].decode()]
    start, end = match.span(1)
    fix = None
    if safety is not None:
        edit = Edit(start, end, text)
        if name == "widely":
            edit = Edit(start, match.end(), text + match["rest"].decode())
        if name == "clearing":
            edit = Edit(start, end + len(match["rest"].partition(b"  #")[0]), text)
        fix = Fix(f"write {text}", safety, (edit,))
    return Finding(
        source.path,
        code,
        name,
        f"{match[1].decode()} is not good",
        source.position(start),
        source.position(end),
        (start, end),
        source.line_text(start),
        fix,
    )


@pytest.fixture
def words(monkeypatch):
    """Puts these rules in the place of the real ones."""
    monkeypatch.setattr(linter, "check", check)
    monkeypatch.setattr(linter, "_likely", lambda data, codes: codes)
    monkeypatch.setattr(linter, "PAGES", PAGES)
    monkeypatch.setattr(lint_run, "PAGES", PAGES)
