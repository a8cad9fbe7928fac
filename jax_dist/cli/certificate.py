"""Checks a certificate of `jax-dist migrate --verify --certificate FILE` again.

It compares the texts of the programs in it, counts again, and reads the migrated files. It neither
runs nor imports jax.
"""

import argparse
import json
from pathlib import Path
from typing import Any, TextIO

from jax_dist.cli import terminal
from jax_dist.cli.terminal import Exit

_EPILOG = """\
exit codes: 0 the certificate holds, 1 it does not, 2 it cannot be read

example:
  jax-dist migrate --write --verify --certificate proof.json src -- python train.py
  jax-dist certificate proof.json
"""


def add_parser(commands: Any) -> None:
    parser = terminal.add_command(commands, "certificate", _run, __doc__, _EPILOG)
    parser.add_argument("file", metavar="FILE", help="the certificate")


def _run(options: argparse.Namespace, *, out: TextIO, err: TextIO) -> Exit:
    from jax_dist.migrate.verify import certificate

    path = Path(options.file)
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        print(f"jax-dist certificate: {path} cannot be read: {error}", file=err)
        return Exit.USAGE
    problems = list(certificate.problems(found, path.resolve().parent))
    if problems:
        print(f"{path} does not hold:", file=out)
        for problem in problems:
            print(f"  * {problem}", file=out)
        return Exit.FINDINGS
    print(f"{path} holds: {certificate.headline(found)}.", file=out)
    for title in ("premises", "not covered"):
        if found[title]:
            print(f"{title}:", file=out)
            for each in found[title]:
                print(f"  * {each}", file=out)
    return Exit.OK
