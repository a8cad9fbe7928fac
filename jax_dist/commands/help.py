"""How `--help` is laid out."""

import argparse
import os

_WIDEST = 100  # columns; longer lines are hard to read


class Help(argparse.RawDescriptionHelpFormatter):
    """As wide as the terminal, up to a limit; descriptions stay as they are written.

    argparse would load shutil for the width, in every run, which costs as much as a small check.
    """

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=min(_columns() - 2, _WIDEST))


def _columns() -> int:
    try:
        return int(os.environ["COLUMNS"])
    except (KeyError, ValueError):
        pass
    try:
        return os.get_terminal_size().columns
    except (OSError, ValueError):  # a pipe
        return 80
