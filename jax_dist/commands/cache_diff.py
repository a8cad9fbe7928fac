"""Lists the programs whose keys differ between two recorded runs, what differs, and why."""

import argparse
import json
from typing import TextIO

from jax_dist.commands.terminal import Exit

HELP = "explain why the keys of two recorded runs differ"
EPILOG = """\
jax_dist.cache.record(PATH) and jax-dist cache verify --keep write such records.

exit codes: 0 all keys are the same, 1 some differ, 2 a record cannot be read
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `diff` takes."""
    parser.add_argument("first", metavar="RECORD", help="of the first run: a file or a folder")
    parser.add_argument("second", metavar="RECORD", help="of the second run")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace, *, out: TextIO, err: TextIO) -> Exit:
    """Compares and prints."""
    del err
    from jax_dist.cache.comparison import diff
    from jax_dist.commands.cache_show import loaded

    found = diff(loaded(options.first), loaded(options.second))
    print(json.dumps(found.to_dict(), indent=2) if options.json else found, file=out)
    same = not (found.differences or found.only_first or found.only_second)
    return Exit.OK if same else Exit.FINDINGS
