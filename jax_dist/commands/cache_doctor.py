"""Checks a cache: broken entries, stray files, unsafe folders, a full disk, keys that never repeat.

With --fix it removes useless files, and write permission from users who must not change the folder.
Healthy entries stay. enable() replaces a damaged entry by itself when its program is next run.
"""

import argparse
import json
from typing import TextIO

from jax_dist.commands import cache
from jax_dist.commands.terminal import Exit

HELP = "find broken entries in a cache, and repair it"
EPILOG = """\
exit codes: 0 all is well, or was repaired, 1 something is left to do,
            2 an option is invalid

examples:
  jax-dist cache doctor
  jax-dist cache doctor --fix /scratch/jax-cache
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `doctor` takes."""
    cache.add_folder(parser)
    parser.add_argument("--fix", action="store_true", help="repair what can be repaired")


def run(options: argparse.Namespace, *, out: TextIO, err: TextIO) -> Exit:
    """Looks, mends if asked, and prints."""
    del err
    from jax_dist.cache.diagnosis import doctor

    health = doctor(options.folder, fix=options.fix)
    print(json.dumps(health.to_dict(), indent=2) if options.json else health, file=out)
    return Exit.OK if health.healthy else Exit.FINDINGS
