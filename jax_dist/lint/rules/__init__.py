"""The rules: one file each, named as its rule; files with an underscore hold what several share.

A rule gets one file (`Module`) and yields `Found`s. It changes nothing, reads no other file but
through the names of its `Module`, and never imports jax. The linter lists this folder, and takes
each `Rule` that it finds.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias

from jax_dist.lint.model.findings import Code, Finding, Fix
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.model.sources import Source

Version: TypeAlias = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """Finding of a check: a place, one sentence, and perhaps a fix."""

    node: Any  # of the tree, with its place
    message: str
    fix: Fix | None = None
    needs: Version = (0,)  # like the rule's, of this fix alone


_Check: TypeAlias = Callable[[Module], Iterator[Found]]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """A check, and the words that explain it in docs/rules.md."""

    code: Code
    name: str
    what: str  # what it finds
    why: str  # what that costs, with the versions that were measured
    instead: str  # what to write
    fix: Literal["safe", "unsafe", "none"]  # the least safe fix that it offers
    check: _Check
    may_match: Callable[[bytes], bool]  # False of a file that cannot have a finding, by its bytes
    default: bool  # False: only where asked for, because it can only say "may"
    since: Version  # silent in projects that must run on a jax older than this
    needs: Version  # its fix is not made in projects that must run on a jax older than this

    def finding(
        self, source: Source, message: str, span: tuple[int, int], fix: Fix | None = None
    ) -> Finding:
        """Return what the rule says of some bytes of a file."""
        start, end = map(source.position, span)
        text = source.line_text(span[0])
        return Finding(source.path, self.code, self.name, message, start, end, span, text, fix)


def rule(
    code: Code,
    name: str,
    *,
    what: str,
    why: str,
    instead: str,
    triggers: tuple[bytes, ...] | Callable[[bytes], bool],
    fix: Literal["safe", "unsafe", "none"] = "none",
    default: bool = True,
    since: Version = (0,),
    needs: Version = (0,),
) -> Callable[[_Check], Rule]:
    """Make a `Rule` of a check, `check(module) -> Iterator[Found]`.

    A file that holds none of the `triggers` cannot have a finding, and is not parsed.
    """
    texts = (code, name, what, why, instead, fix)

    def may_match(data: bytes) -> bool:
        if callable(triggers):
            return triggers(data)
        return any(word in data for word in triggers)

    return lambda check: Rule(*texts, check, may_match, default, since, needs)
