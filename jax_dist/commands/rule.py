"""Prints what a rule of the checker finds, why it matters, and what to write instead."""

import argparse
import json
from typing import Any, TextIO

from jax_dist.commands.exits import Exit

_EPILOG = """\
exit codes: 0 all is well, 2 there is no such rule

examples:
  jax-dist rule JXD306             the page of one rule
  jax-dist rule psum-of-one        the same, by name
  jax-dist rule --all              a line for each rule
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "rule",
        help="the page of a rule of the checker",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("rule", nargs="?", help="a code such as JXD306, or a name")
    which.add_argument("--all", action="store_true", help="list the rules")
    parser.add_argument(
        "--output-format",
        choices=("text", "json", "markdown"),
        default="text",
        help="markdown and json print whole pages, also with --all (default: text)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, *, out: TextIO, err: TextIO) -> Exit:
    from jax_dist.checker import catalogue  # not at the top: other commands need no rules

    pages = [catalogue.PAGES[code] for code in sorted(catalogue.PAGES)]
    if not options.all:
        wanted = (options.rule.upper(), options.rule.lower())
        found = [page for page in pages if page.code == wanted[0] or page.name == wanted[1]]
        if not found:
            print(f"jax-dist rule: {_unknown(options.rule, pages)}", file=err)
            return Exit.USAGE
        pages = found
    out.write(_rendered(pages, options))
    return Exit.OK


def _unknown(word: str, pages: list[Any]) -> str:
    from jax_dist.checker import misuse

    code = word[:1].isupper() or any(character.isdigit() for character in word)
    names = [page.code if code else page.name for page in pages]
    remedy = misuse.hint(
        word.upper() if code else word.lower(), names, "`jax-dist rule --all` lists the rules."
    )
    return f"no rule is called {word!r}. {remedy}"


def _rendered(pages: list[Any], options: argparse.Namespace) -> str:
    from jax_dist.checker.render import markdown

    match options.output_format:
        case "json":
            shown = [_entry(page) for page in pages]
            return json.dumps(shown if options.all else shown[0], indent=2) + "\n"
        case "markdown":
            return markdown.book(pages) if options.all else markdown.page_markdown(pages[0])
        case _:
            return _list(pages) if options.all else f"{pages[0]}\n"


def _entry(page: Any) -> dict[str, Any]:
    import dataclasses

    return dataclasses.asdict(page)


def _list(pages: list[Any]) -> str:
    width = max(len(page.name) for page in pages)
    return "".join(
        f"{page.code}  {page.name:{width}}  {page.fix_level}"
        f"{'' if page.default else ' (off by default)'}\n"
        for page in pages
    )
