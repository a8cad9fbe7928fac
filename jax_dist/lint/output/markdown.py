"""The page of a rule as Markdown, for SARIF and the documentation."""

from collections.abc import Sequence

from jax_dist.lint.model import sources
from jax_dist.lint.rules import Page

_TABLE = """\
# Lint rules

These are the rules of `jax-dist lint`. `jax-dist rule CODE` explains one of them, with an example
and what to write instead.

Suppress a finding with `# noqa: CODE` or `# jax-dist: ignore[CODE]` on its line. A *safe* fix gives
the same values and shapes, in one process and in many; `--fix` applies it. An *unsafe* fix should
be right, but review it; `--unsafe-fixes` applies it. A *display* fix is only a sketch. Rules marked
*off* can only say "may": `--extend-select CODE` turns them on.

| rule | finds | what it costs you | fix |
|---|---|---|---|
ROWS

The pages are data:

```pycon
>>> from jax_dist.lint.engine.linter import PAGES
>>> PAGES["JXD306"].name
'psum-of-one'
```

This command writes this page, and `--output-format markdown` all of them:

```text
jax-dist rule --all --output-format table > docs/rules.md
```
"""


def table(pages: Sequence[Page]) -> str:
    """One row for each rule, with the anchor that links to it name."""
    return _TABLE.replace("ROWS", "\n".join(map(_row, pages)))


def _row(page: Page) -> str:
    anchor = f"{page.code.lower()}-{page.name}"
    name = f'<a id="{anchor}"></a>[{page.code}](#{anchor}) {page.name}'
    off = "" if page.default else ", off"
    return f"| {name} | {page.summary} | {page.cost} | {page.fix_level}{off} |"


def book(pages: Sequence[Page]) -> str:
    """The table of the rules, and all their pages."""
    return f"{table(pages)}\n" + "\n".join(page_markdown(page, 2) for page in pages)


def page_markdown(page: Page, level: int = 1) -> str:
    """The same headings as `str(page)`, below a title with so many `#`; code in fences."""
    is_code = sources.parses(page.instead.encode())
    headings = (
        ("What it does", page.what),
        ("Why this is bad", page.why),
        ("Example", _fenced(page.example)),
        ("Use instead", _fenced(page.instead) if is_code else page.instead),
        ("Fix safety", page.fix),
        ("Since", page.since),
        ("Source", page.source),
    )
    sharps = "#" * level
    body = "\n\n".join(
        f"#{sharps} {heading}\n\n{text.strip(chr(10))}" for heading, text in headings
    )
    off = "" if page.default else "\n\nOff by default: `--extend-select` turns it on."
    return f"{sharps} {page.code} {page.name}\n\n{body}{off}\n"


def _fenced(code: str) -> str:
    language = "py" if sources.parses(code.encode()) else "text"
    return f"```{language}\n{code.strip(chr(10))}\n```"
