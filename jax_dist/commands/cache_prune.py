"""Makes a cache smaller; keeps the most recently used programs."""

import argparse
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any, TextIO

from jax_dist.commands import cache
from jax_dist.commands.terminal import Exit

HELP = "make a cache smaller"
EPILOG = """\
exit codes: 0 all is well, 2 an option is invalid

examples:
  jax-dist cache prune --max-size 20GB
  jax-dist cache prune --older-than 30d --dry-run
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `prune` takes."""
    cache.add_folder(parser)
    parser.add_argument(
        "--max-size", type=_read("bytes_of"), metavar="SIZE", help="as in 500MB, 20GB, 2GiB"
    )
    parser.add_argument(
        "--older-than", type=_read("seconds_of"), metavar="AGE", help="as in 36h, 30d, 2w"
    )
    parser.add_argument("--dry-run", action="store_true", help="only list what would be removed")


def _read(name: str) -> Callable[[str], int]:
    def read(text: str) -> int:
        from jax_dist.cache import entries

        try:
            return getattr(entries, name)(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


def run(options: argparse.Namespace, *, out: TextIO, err: TextIO) -> Exit:
    """Removes and prints."""
    del err
    from jax_dist._usage import MisuseError
    from jax_dist.cache import entries, store
    from jax_dist.cache.store import prune

    if options.max_size is None and options.older_than is None:
        raise MisuseError("prune needs --max-size, --older-than, or both")
    pruned = prune(
        pathlib.Path(store.chosen(options.folder, os.environ)),
        max_size=options.max_size,
        older_than=options.older_than,
        dry_run=options.dry_run,
    )
    if options.json:
        facts: dict[str, Any] = {
            "removed": [entry.key for entry in pruned.removed],
            "removed_bytes": pruned.bytes,
            "kept": pruned.kept,
            "kept_bytes": pruned.kept_bytes,
            "dry_run": options.dry_run,
        }
        print(json.dumps(facts, indent=2), file=out)
        return Exit.OK
    verb = "would remove" if options.dry_run else "removed"
    print(
        f"{verb} {len(pruned.removed)} ({entries.in_words(pruned.bytes)}), "
        f"kept {pruned.kept} ({entries.in_words(pruned.kept_bytes)})",
        file=out,
    )
    return Exit.OK
