"""Lists the programs of a cache, largest first, and when each was last used."""

import argparse
import json
import os
import pathlib
import time
from typing import TYPE_CHECKING, TextIO

from jax_dist.commands import cache
from jax_dist.commands.terminal import Exit

if TYPE_CHECKING:
    from jax_dist.cache.entries import CacheEntry

HELP = "list the programs of a cache"
EPILOG = """\
exit codes: 0 all is well, 2 an option is invalid
"""
_DAY = 86400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `ls` takes."""
    cache.add_folder(parser)
    parser.add_argument("--function", metavar="NAME", help="only this one, as in jit_step")


def run(options: argparse.Namespace, *, out: TextIO, err: TextIO) -> Exit:
    """Reads the folder and prints."""
    del err
    from jax_dist.cache import entries, store

    path = pathlib.Path(store.chosen(options.folder, os.environ))
    found = [entry for entry in entries.all_of(path) if options.function in (None, entry.function)]
    found.sort(key=lambda entry: (-entry.size, entry.key))
    if options.json:
        print(json.dumps([entry.to_dict() for entry in found], indent=2), file=out)
        return Exit.OK
    if found:
        rows = [_row(entry, time.time()) for entry in found]
        head = ("function", "key", "size", "compiled in", "written", "used")
        print(cache.table(head, rows, numbers=(2, 3)), file=out)
    noun = "program" if len(found) == 1 else "programs"
    size = entries.in_words(sum(entry.size for entry in found))
    print(f"{path}: {len(found)} {noun}, {size}", file=out)
    return Exit.OK


def _row(entry: "CacheEntry", now: float) -> tuple[str, ...]:
    from jax_dist.cache import entries

    seconds = entries.compile_seconds(entry)
    return (
        entry.function,
        entry.key.rpartition("-")[2][:12],
        entries.in_words(entry.size),
        "damaged" if seconds is None else f"{seconds} s",
        _ago(now - entry.written),
        _ago(now - entry.used) if entry.repeated else "never",
    )


def _ago(seconds: float) -> str:
    days = int(seconds // _DAY)
    if days > 0:
        return f"{days} d ago"
    return "today" if seconds >= 3600 else "just now"
