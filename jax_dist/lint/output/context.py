"""What every form of report knows of the rules and the files."""

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

from jax_dist import _codes
from jax_dist.lint.model.findings import Code
from jax_dist.lint.model.sources import Source
from jax_dist.lint.rules import Page

Severity: TypeAlias = Literal["error", "warning", "note"]

_LINK = re.compile(r"https://[^\s)>\]`,;]+[^\s)>\]`,;.]")


@dataclasses.dataclass(frozen=True)
class RenderContext:
    """What is known about the rules and the files.

    Args:
      pages: the page of each rule.
      source: a file as it was checked, by the path in its findings; None where it is not known.
        It is asked only about files that have a fix to be shown.
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
        if code == _codes.SYNTAX_ERROR:
            return "error"
        page = self.pages.get(code)
        return "warning" if page is None or page.default else "note"

    def link(self, code: Code) -> str | None:
        """A web page about the rule, where its page names one."""
        page = self.pages.get(code)
        found = _LINK.search(page.source) if page else None
        return found[0] if found else None


def slashed(path: str) -> str:
    """A path relative to the working folder where it lies below, with forward slashes."""
    inside = os.path.relpath(path) if os.path.isabs(path) else os.path.normpath(path)
    return (os.path.abspath(path) if inside.startswith("..") else inside).replace(os.sep, "/")
