"""How `--help` is laid out, and what is said of a word that was misspelt."""

import argparse
import os
import re
from typing import NoReturn

_WIDEST = 100  # columns; longer lines are hard to read
_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)$")


class Help(argparse.RawDescriptionHelpFormatter):
    """As wide as the terminal, up to a limit; descriptions stay as they are written.

    argparse would load shutil for the width, in every run, which costs as much as a small check.
    """

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=min(_columns() - 2, _WIDEST))


class Parser(argparse.ArgumentParser):
    """Names the nearest choice where a word is none; its subcommands do the same."""

    def error(self, message: str) -> NoReturn:
        found = _CHOICE.search(message)
        if found:
            from jax_dist import _usage  # only here: it is rarely needed

            near = _usage.hint(found[1], re.findall(r"[\w.-]+", found[2]), "")
            message = f"{message}. {near}" if near else message
        super().error(message)


def _columns() -> int:
    try:
        return int(os.environ["COLUMNS"])
    except (KeyError, ValueError):
        pass
    try:
        return os.get_terminal_size().columns
    except (OSError, ValueError):  # a pipe
        return 80
