"""The text of docs/rules.md; run this file to write it."""

import pathlib
import sys
import textwrap

from jax_dist.lint.engine.linter import RULES
from jax_dist.lint.rules import Rule

_HEAD = """\
# Lint rules

`jax-dist lint` finds these. `# noqa: CODE` on the line suppresses a finding. A *safe* fix gives the
same values and shapes, in one process and in many; `--fix` applies it. Review an *unsafe* fix;
`--unsafe-fixes` applies it. Rules that are *off* can only say "may"; `--extend-select CODE` turns
them on.

| rule | fix |
|---|---|
ROWS
"""


def text() -> str:
    rows = "\n".join(map(_row, RULES.values()))
    return _HEAD.replace("ROWS", rows) + "".join(map(_section, RULES.values()))


def _row(rule: Rule) -> str:
    off = "" if rule.default else ", off"
    return f"| [{rule.code}](#{_anchor(rule)}) {rule.name} | {rule.fix}{off} |"


def _anchor(rule: Rule) -> str:
    return f"{rule.code.lower()}-{rule.name}"


def _section(rule: Rule) -> str:
    lines = rule.instead.splitlines()
    code = "\n".join(line for line in lines if not line.startswith("https://"))
    links = "\n".join(f"<{line}>" for line in lines if line.startswith("https://"))
    is_code = "=" in code
    instead = f"```text\n{code}\n```" if is_code else code
    parts = [
        f"\n## {rule.code} {rule.name}",
        textwrap.fill(f"Finds: {rule.what}", 100, break_long_words=False, break_on_hyphens=False),
        textwrap.fill(f"Why: {rule.why}", 100, break_long_words=False, break_on_hyphens=False),
        f"Instead:\n\n{instead}",
        *([links] if links else []),
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    page = pathlib.Path(__file__).parents[2] / "docs" / "rules.md"
    page.write_text(text(), encoding="utf-8")
    sys.stdout.write(f"wrote {page}\n")
