"""Prints what a lint rule finds, why it matters, and what to write instead."""

import argparse
import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any, TextIO

from jax_dist import _usage
from jax_dist.cli import terminal
from jax_dist.cli.terminal import Exit
from jax_dist.lint.output import markdown
from jax_dist.lint.rules import Page

_EPILOG = """\
exit codes: 0 all is well, 2 there is no such rule

examples:
  jax-dist rule JXD306             the page of one rule
  jax-dist rule psum-of-one        the same, by name
  jax-dist rule --all              one line for each rule
"""


def add_parser(commands: Any) -> None:
    parser = terminal.add_command(
        commands, "rule", _run, __doc__, _EPILOG, help="print the page of a lint rule"
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("rule", nargs="?", help="a code such as JXD306, or a name")
    terminal.flag(which, "--all", help="all rules")
    parser.add_argument(
        "--output-format",
        choices=("text", "json", "markdown", "table"),
        default="text",
        help="text (the default; with --all one line for each rule); json or markdown: whole "
        "pages; table: a row for each rule, in Markdown",
    )


def _run(options: argparse.Namespace, *, out: TextIO, err: TextIO) -> Exit:
    from jax_dist.lint.engine import linter  # not at the top: `--help` needs no rules

    if options.all:
        out.write(_ALL[options.output_format]([page for _, page in sorted(linter.PAGES.items())]))
        return Exit.OK
    # Codes in capitals, names in small letters.
    word = options.rule.upper() if re.search(r"\d", options.rule) else options.rule.lower()
    named = {name: page for page in linter.PAGES.values() for name in (page.code, page.name)}
    page = named.get(word)
    if page is None:
        remedy = _usage.hint(word, [*named], "`jax-dist rule --all` lists the rules.")
        print(f"jax-dist rule: there is no rule {options.rule!r}. {remedy}", file=err)
        return Exit.USAGE
    out.write(_ONE[options.output_format](page))
    return Exit.OK


def _list(pages: Sequence[Page]) -> str:
    width = max(len(page.name) for page in pages)
    lines = []
    for page in pages:
        fix = "no fix" if page.fix_level == "none" else f"{page.fix_level} fix"
        state = fix if page.default else f"{fix}, off by default"
        lines.append(f"{page.code}  {page.name:{width}}  {state}\n")
    return "".join(lines)


def _json(what: Any) -> str:
    return json.dumps(what, indent=2) + "\n"


_ONE = {
    "text": lambda page: f"{page}\n",
    "json": lambda page: _json(dataclasses.asdict(page)),
    "markdown": markdown.page_markdown,
    "table": lambda page: markdown.table([page]),
}
_ALL = {
    "text": _list,
    "json": lambda pages: _json([dataclasses.asdict(page) for page in pages]),
    "markdown": markdown.book,
    "table": markdown.table,
}
