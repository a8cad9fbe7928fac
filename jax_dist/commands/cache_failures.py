"""Lists programs that failed to compile earlier and are not tried again, or clears the list.

JAX_DIST_RETRY_FAILED=1 and enable(retry=True) try them again without clearing the list.
"""

import argparse
import json
from typing import TextIO

from jax_dist.commands import cache
from jax_dist.commands.terminal import Exit

HELP = "list programs that failed to compile and are not tried again"
EPILOG = """\
exit codes: 0 all is well, 2 an option is invalid

examples:
  jax-dist cache failures                       the same as `failures ls`
  jax-dist cache failures clear
  jax-dist cache failures clear --function jit_step
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `failures` takes."""
    parser.add_argument("action", nargs="?", choices=("ls", "clear"), default="ls")
    cache.add_folder(parser)
    parser.add_argument("--function", metavar="NAME", help="only this one, as in jit_step")


def run(options: argparse.Namespace, *, out: TextIO, err: TextIO) -> Exit:
    """Lists or forgets, and prints."""
    del err
    from jax_dist.cache import failures

    if options.action == "clear":
        count = failures.clear(options.folder, function=options.function)
        print(json.dumps({"forgotten": count}) if options.json else f"forgot {count}", file=out)
        return Exit.OK
    found = [
        failure
        for failure in failures.ls(options.folder)
        if options.function in (None, failure.function)
    ]
    if options.json:
        print(json.dumps([failure.to_dict() for failure in found], indent=2), file=out)
    elif found:
        rows = [
            (failure.function, failure.at, f"{failure.seconds:.1f} s", _short(failure.reason))
            for failure in found
        ]
        print(cache.table(("function", "at (UTC)", "after", "why"), rows, numbers=(2,)), file=out)
    else:
        print("no program is known not to compile", file=out)
    return Exit.OK


def _short(reason: str) -> str:
    """The first line; XLA may add pages."""
    return reason.partition("\n")[0]
