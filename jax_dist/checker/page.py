"""The page of a rule: what `jax-dist rule`, the documentation and SARIF say about it."""

import dataclasses

from jax_dist.checker.findings import Code


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
            ("What it does", self.what),
            ("Why this is bad", self.why),
            ("Example", self.example),
            ("Use instead", self.instead),
            ("Fix safety", self.fix),
            ("Since", self.since),
            ("Source", self.source),
        )
        body = "\n\n".join(f"{heading}\n{_indented(text)}" for heading, text in headings)
        off = "" if self.default else "\n\nOff by default: --extend-select turns it on."
        return f"{self.code} {self.name}\n\n{body}{off}"


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" if line else "" for line in text.rstrip("\n").split("\n"))
