"""The rules: one file each, named as its rule; files with an underscore hold what several share.

A rule takes one file (`Module`) and yields a `Found` for each finding. It changes nothing, reads no
other file but through the names of its `Module`, and never imports jax. The linter imports all
files of this folder, and takes each `Rule` in them.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from jax_dist.lint.findings import Code, Edit, Finding, Fix, Safety
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.model.sources import Source
from jax_dist.lint.words import Words

__all__ = ["Edit", "Findings", "Fix", "Found", "Module", "Rule", "Safety", "Version", "Words"]

Version: TypeAlias = tuple[int, ...]

_LONGEST_LINE = 200  # bytes of a source line in a report


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """Finding of a rule's check: a node, one sentence, and perhaps a fix."""

    node: Any  # an AST node of the file that has a line and column
    message: str
    fix: Fix | None = None
    needs: Version = (0,)  # the first jax on which the fix works; older projects only see it


Findings: TypeAlias = Iterator[Found]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """A check, the function that it decorates, and the texts that explain it in docs/rules.md."""

    code: Code
    _: dataclasses.KW_ONLY
    what: str  # what it finds
    why: str  # what that costs, with the versions that were measured
    instead: str  # what to write
    # Words, or a condition on the words of a file; a file that does not match is not parsed.
    triggers: tuple[bytes, ...] | Callable[[Words], bool]
    default: bool = True  # False: only where asked for, because it can only say "may"
    since: Version = (0,)  # silent in projects that must run on a jax older than this
    check: Callable[[Module], Findings] = lambda _: iter(())

    def __call__(self, check: Callable[[Module], Findings]) -> "Rule":
        return dataclasses.replace(self, check=check)

    @property
    def name(self) -> str:
        """The name of its function, with hyphens: "pmap-call"."""
        return self.check.__name__.replace("_", "-")

    def may_match(self, words: Words) -> bool:
        """Return whether a file with these words may have findings of this rule."""
        if callable(self.triggers):
            return self.triggers(words)
        return words.hold(*self.triggers)

    def finding(
        self, source: Source, message: str, span: tuple[int, int], fix: Fix | None = None
    ) -> Finding:
        """Return a finding of this rule at the bytes `span` of a file."""
        start, end = map(source.position, span)
        text = source.line_text(span[0], longest=_LONGEST_LINE)
        return Finding(source.path, self.code, self.name, message, start, end, span, text, fix)
