"""The page of a rule: what `jax-dist rule`, the documentation and SARIF say about it."""

import dataclasses
import textwrap

from jax_dist.checker.findings import Code

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


def _wrapped(text: str) -> str:
    """Prose, in lines that are easy to read on a terminal; addresses stay whole."""
    lines = (
        textwrap.fill(line, _WIDTH, break_long_words=False, break_on_hyphens=False)
        for line in text.split("\n")
    )
    return "\n".join(lines)


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" if line else "" for line in text.rstrip("\n").split("\n"))
