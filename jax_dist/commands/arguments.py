"""Arguments that several subcommands take."""

import argparse
from typing import Any


def add_color(parser: Any) -> None:
    """Adds `--color` to a parser, or to a group of its arguments."""
    parser.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="%(choices)s (auto: on a terminal; NO_COLOR and FORCE_COLOR count)",
        metavar="WHEN",
    )


def count(text: str) -> int:
    """A whole number of something, at least one."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


def seconds(text: str) -> float:
    """A time that passes."""
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError("must be more than 0")
    return number
