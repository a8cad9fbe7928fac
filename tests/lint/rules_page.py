"""The text of docs/rules.md; run this file to write it."""

import pathlib
import sys
import textwrap

import rule_cases

from jax_dist.lint.engine import linter
from jax_dist.lint.engine.linter import RULES
from jax_dist.lint.model import sources
from jax_dist.lint.model.project import Project
from jax_dist.lint.rules import Rule, Safety

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
    return f"| [{rule.code}](#{_anchor(rule)}) {rule.name} | {_least_safe_fix(rule)}{off} |"


def _least_safe_fix(rule: Rule) -> str:
    """Return "unsafe", "safe" or "none": the fixes in the cases of the rule."""
    cases = rule_cases.by_code().get(rule.code, ())
    texts = [case.before for case in cases if isinstance(case, rule_cases.Fixed)]
    modules = [Project().module(sources.read("case.py", text.encode())) for text in texts]
    codes = frozenset((rule.code,))
    safeties = {f.safety for module in modules for f in linter.check_module(module, codes)}
    return next((str(each) for each in (Safety.UNSAFE, Safety.SAFE) if each in safeties), "none")


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
