"""Shows a recorded run: each compiled program, its key, and whether it hit the cache."""

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

from jax_dist.commands.terminal import Exit

if TYPE_CHECKING:
    from jax_dist.cache.records import Compile, Record

HELP = "show what a recorded run compiled"
EPILOG = """\
jax_dist.cache.record(PATH) and jax-dist cache verify --keep write such records.

exit codes: 0 all is well, 2 the record cannot be read
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `show` takes."""
    parser.add_argument("record", metavar="RECORD", help="a file or a folder")
    parser.add_argument(
        "--function", metavar="NAME", help="the components of the keys of this one, as in jit_step"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace, *, out: TextIO, err: TextIO) -> Exit:
    """Reads and prints."""
    del err
    record = loaded(options.record)
    if options.function is not None:
        record = _only(record, options.function)
    if options.json:
        print(json.dumps([_as_dict(each) for each in record.compiles], indent=2), file=out)
    elif options.function is not None:
        out.writelines(f"{line}\n" for each in record.compiles for line in _lines(each))
    else:
        print(record, file=out)
    return Exit.OK


def loaded(path: str) -> "Record":
    """The record; what is wrong with it is said to the user.

    Raises:
      MisuseError: it cannot be read, or is none.
    """
    from jax_dist._usage import MisuseError
    from jax_dist.cache.records import load
    from jax_dist.errors import RecordError

    try:
        return load(path)
    except RecordError as error:
        raise MisuseError(str(error)) from error
    except OSError as error:
        raise MisuseError(f"{path}: {error.strerror}") from error


def _only(record: "Record", function: str) -> "Record":
    import dataclasses

    from jax_dist._usage import MisuseError

    kept = tuple(each for each in record.compiles if each.key.function == function)
    if not kept:
        names = ", ".join(dict.fromkeys(each.key.function for each in record.compiles))
        raise MisuseError(f"--function {function}: the record has {names or 'no programs'}")
    return dataclasses.replace(record, compiles=kept)


def _lines(each: "Compile") -> Iterator[str]:
    yield from str(each.key).splitlines()
    yield f"  {each.outcome}" + (f" ({each.reason})" if each.reason else "")


def _as_dict(each: "Compile") -> dict[str, object]:
    return {
        "key": each.key.to_dict(),
        "outcome": each.outcome.value,
        "reason": each.reason,
        "seconds": each.seconds,
        "process": each.process,
        "settings": each.settings,
    }
