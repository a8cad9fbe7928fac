"""Looks a cache over: broken entries, litter, unsafe folders, a full disk, keys that never repeat.

With --fix it removes what is of no use, and takes the folder from those who must not change it.
What is healthy stays. enable() replaces damaged entries by itself, when their program is next run.
"""

import argparse
import json
from typing import TextIO

from jax_dist.commands import cache
from jax_dist.commands.exits import Exit

HELP = "find what is broken in a cache, and mend it"
EPILOG = """\
exit codes: 0 all is well, or was mended, 1 something is left to do,
            2 an option cannot be followed

examples:
  jax-dist cache doctor
  jax-dist cache doctor --fix /scratch/jax-cache
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `doctor` takes."""
    cache.add_folder(parser)
    parser.add_argument("--fix", action="store_true", help="mend what can be mended")


def run(options: argparse.Namespace, *, out: TextIO, err: TextIO) -> Exit:
    """Looks, mends if asked, and prints."""
    del err
    from jax_dist.cache.diagnosis import doctor

    health = doctor(options.folder, fix=options.fix)
    print(json.dumps(health.to_dict(), indent=2) if options.json else health, file=out)
    return Exit.OK if health.healthy else Exit.FINDINGS
