"""Converts checkpoints that pmap's programs saved: every leaf has a leading device axis in them."""

import argparse
import pathlib
from typing import Any, TextIO

from jax_dist.commands import terminal
from jax_dist.commands.terminal import Exit

_EPILOG = """\
exit codes: 0 all is well, 1 something was found, 2 the command was invalid

examples:
  jax-dist checkpoint convert checkpoint_900 converted                    Flax's msgpack
  jax-dist checkpoint convert run/900 converted/900                       Orbax
  jax-dist checkpoint convert --leaf batch_stats=mean run/900 converted   where copies differ
"""
_CONVERT = """\
Drops the device axis of a checkpoint that was saved with replicated arrays.

IN is a file of Flax's msgpack, or a folder of Orbax: one tree, one step, or all steps. All copies
of a leaf must be equal to the bit, and the first is written. Where they differ, nothing is written
and the leaves are named; --leaf says what to take. OUT must not exist.
"""
_CHOICES = ("mean", "first", "keep")


def add_parser(commands: Any) -> None:
    subcommands = terminal.add_group(commands, "checkpoint", __doc__, _EPILOG)
    convert = terminal.add_command(
        subcommands, "convert", _run, _CONVERT, _EPILOG, help="drop the device axis"
    )
    convert.add_argument("source", metavar="IN", type=pathlib.Path, help="the checkpoint to read")
    convert.add_argument("target", metavar="OUT", type=pathlib.Path, help="the one to write")
    convert.add_argument(
        "--leaf",
        action="append",
        default=[],
        type=_choice,
        metavar="PART=CHOICE",
        help="for leaves with PART in their path: mean or first where copies differ, keep to "
        "leave them as they are; may be repeated, the first that fits counts",
    )


def _run(options: argparse.Namespace, *, out: TextIO, err: TextIO) -> Exit:
    """Converts one checkpoint and says what became of it."""
    from jax_dist.errors import CheckpointError
    from jax_dist.multihost import conversion

    try:
        with terminal.ProgressLine(err, "converting"):
            converted = conversion.convert(
                options.source,
                options.target,
                choices=dict(options.leaf),
                option="--leaf PART=CHOICE",
            )
    except CheckpointError as error:
        print(f"jax-dist checkpoint: {error}", file=err)
        return Exit.FINDINGS
    except (ImportError, OSError, ValueError) as error:
        print(f"jax-dist checkpoint: {error}", file=err)
        return Exit.USAGE
    print(
        f"{options.target}: {len(converted.dropped)} leaves, one copy of {converted.devices} each; "
        f"{len(converted.kept)} leaves as they were",
        file=out,
    )
    return Exit.OK


def _choice(text: str) -> tuple[str, str]:
    part, equals, choice = text.rpartition("=")
    if not equals or choice not in _CHOICES:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not PART=CHOICE; CHOICE is one of {_CHOICES}"
        )
    return part, choice
