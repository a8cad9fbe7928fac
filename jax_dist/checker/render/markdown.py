"""The page of a rule as Markdown, for SARIF, editors, and the documentation."""

import ast

from jax_dist.checker.page import Page


def page_markdown(page: Page, level: int = 1) -> str:
    """The same headings as `str(page)`; code in fences.

    Args:
      page: of the rule.
      level: of its title, as the number of `#`.
    """
    headings = (
        ("What it does", page.what),
        ("Why this is bad", page.why),
        ("Example", _fenced(page.example)),
        ("Use instead", _fenced(page.instead) if _is_python(page.instead) else page.instead),
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
    language = "py" if _is_python(code) else "text"
    return f"```{language}\n{code.strip(chr(10))}\n```"


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True
