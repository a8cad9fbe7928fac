"""What every form of output needs beside the findings, and what several of them say alike."""

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

from jax_dist import _codes
from jax_dist.checker.model.findings import Code, Edit, Finding, Position
from jax_dist.checker.model.sources import Source
from jax_dist.checker.rules import Page

Severity: TypeAlias = Literal["error", "warning", "note"]

_SYNTAX_ERROR = _codes.SYNTAX_ERROR
_LINK = re.compile(r"https://[^\s)>\]`,;]+[^\s)>\]`,;.]")


@dataclasses.dataclass(frozen=True)
class RenderContext:
    """What is known about the rules and the files.

    Args:
      pages: the page of each rule.
      source: a file as it was checked, by the path in its findings; None where it is not known.
        It is asked only about files that have a fix to be shown, or are notebooks.
      colour: whether text may hold colours for a terminal.
    """

    pages: Mapping[Code, Page]
    source: Callable[[str], Source | None] = lambda path: None
    colour: bool = False

    def __post_init__(self) -> None:
        # Each finding of a file asks for it, and reading a notebook takes its time.
        object.__setattr__(self, "source", functools.cache(self.source))

    def severity(self, code: Code) -> Severity:
        """A file that cannot be read is an error; a rule that is off by default only notes."""
        if code == _SYNTAX_ERROR:
            return "error"
        page = self.pages.get(code)
        return "warning" if page is None or page.default else "note"

    def link(self, code: Code) -> str | None:
        """A web page about the rule, where its page names one."""
        page = self.pages.get(code)
        found = _LINK.search(page.source) if page else None
        return found[0] if found else None


@dataclasses.dataclass(frozen=True, slots=True)
class PlacedEdit:
    """An edit, at places that people and editors understand."""

    start: Position
    end: Position
    text: str


def placed(edits: Iterable[Edit], source: Source | None) -> list[PlacedEdit]:
    """The places of edits; none where the file is not known."""
    if source is None:
        return []
    return [
        PlacedEdit(source.position(edit.start), source.position(edit.end), edit.text)
        for edit in edits
    ]


def in_file(finding: Finding, context: RenderContext) -> tuple[Position, Position]:
    """The places of a finding, for forms that know nothing of cells.

    For a notebook that is the line of its JSON on which the line of code stands.
    """
    if finding.start.cell is None:
        return finding.start, finding.end
    line_in_file = getattr(context.source(finding.path), "line_in_file", None)
    place = Position(line_in_file(finding.span[0]) if line_in_file else 1, 1)
    return place, place


def sentence(finding: Finding) -> str:
    """The message, with the cell where there is one."""
    if finding.start.cell is None:
        return finding.message
    return f"cell {finding.start.cell}, line {finding.start.line}: {finding.message}"


def slashed(path: str) -> str:
    """A path relative to the working folder where it lies below, with forward slashes."""
    inside = os.path.relpath(path) if os.path.isabs(path) else os.path.normpath(path)
    return (os.path.abspath(path) if inside.startswith("..") else inside).replace(os.sep, "/")


def fingerprints(findings: Sequence[Finding]) -> list[str]:
    """One for each, unlike all others; they outlive a move of the line."""
    import hashlib  # only here: it is slow to load

    seen: dict[tuple[str, ...], int] = {}
    prints: list[str] = []
    for finding in findings:
        said = (slashed(finding.path), finding.code, finding.line_text.strip())
        seen[said] = seen.get(said, 0) + 1
        text = "\0".join((*said, str(seen[said])))
        prints.append(hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:32])
    return prints
