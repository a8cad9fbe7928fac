"""What a rule is: its page, when it is asked, and what it looks for.

Every other file here holds the rules of one concept, but for those with an underscore: the linter
lists the folder, and takes each `Rule` that it finds.
A rule is given one file (`Module`) and yields what it finds there (`Found`). It changes nothing,
reads no other file but through the names of its `Module`, and never imports jax.
"""

import dataclasses
import re
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from jax_dist.lint.model.findings import Code, Finding, Fix
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.model.sources import Source

_WIDTH = 86


@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """What one rule says; each field is a heading of its page."""

    code: Code
    name: str
    what: str
    why: str
    example: str  # Python, as it was
    instead: str  # Python, as it should be; or a sentence where no code can be given
    fix: str  # the safety of the fix, and its reason; "None: ..." where there is none
    since: str  # the jax versions it holds for, such as "jax 0.10.0: removed."
    source: str  # where it is documented or was measured
    default: bool = True  # False: only where asked for, because it can only say "may"
    summary: str = ""  # what it finds, in a few words: its row in the table of rules
    cost: str = ""  # what that costs, in as few

    def __str__(self) -> str:
        headings = (
            ("What it does", _wrapped(self.what)),
            ("Why this is bad", _wrapped(self.why)),
            ("Example", self.example),
            ("Use instead", self.instead),
            ("Fix safety", _wrapped(self.fix)),
            ("Since", _wrapped(self.since)),
            ("Source", _wrapped(self.source)),
        )
        body = "\n\n".join(f"{heading}\n{_indented(text)}" for heading, text in headings)
        off = "" if self.default else "\n\nOff by default: --extend-select turns it on."
        return f"{self.code} {self.name}\n\n{body}{off}"

    @property
    def fix_level(self) -> str:
        """The first word of what it says of its fix: safe, unsafe, display or none."""
        return re.split(r"\W", self.fix, maxsplit=1)[0].lower()

    def finding(
        self, source: Source, message: str, span: tuple[int, int], fix: Fix | None = None
    ) -> Finding:
        """What the rule says of some bytes."""
        start, end = map(source.position, span)
        text = source.line_text(span[0])
        return Finding(source.path, self.code, self.name, message, start, end, span, text, fix)


def _wrapped(text: str) -> str:
    """Prose, in lines that are easy to read on a terminal; addresses stay whole."""
    lines = (
        textwrap.fill(line, _WIDTH, break_long_words=False, break_on_hyphens=False)
        for line in text.split("\n")
    )
    return "\n".join(lines)


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" if line else "" for line in text.rstrip("\n").split("\n"))


Version: TypeAlias = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """What a check yields: where, one sentence, and perhaps a fix."""

    node: Any  # of the tree, with its place
    message: str
    fix: Fix | None = None
    needs: Version = (0,)  # like the rule's, of this fix alone


_Check: TypeAlias = Callable[[Module], Iterator[Found]]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """A page and the check that finds what it speaks of."""

    page: Page
    check: _Check
    triggers: tuple[bytes, ...]  # phrases; a file that holds none of them cannot have a finding
    since: Version  # the first jax that has what the rule advises
    needs: Version  # the first jax on which the fixed code runs
    narrow: Mapping[bytes, re.Pattern[bytes]]  # by trigger: what must be found where it is


def rule(
    page: Page,
    *,
    triggers: tuple[bytes, ...],
    since: Version = (0,),
    needs: Version = (0,),
    narrow: Mapping[bytes, re.Pattern[bytes]] = types.MappingProxyType({}),
) -> Callable[[_Check], Rule]:
    """Makes a rule of a check, `check(module) -> Iterator[Found]`.

    Args:
      page: what it says.
      triggers: phrases as in `linter.holding`, one of which every file with a finding holds.
      since: silent in projects that must run on a jax older than this.
      needs: its fix is withheld from projects that must run on a jax older than this.
      narrow: for triggers that many files hold in another sense, the pattern that tells: a file
        without a match does not count as holding the trigger.
    """
    return lambda check: Rule(page, check, triggers, since, needs, narrow)
