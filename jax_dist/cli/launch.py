"""Runs a program in several processes on this machine, joined as one JAX job.

Each process, or rank, gets its number and the address of rank 0 in its environment, so that
`jax.distributed.initialize()` and `jax_dist.multihost.initialize()` need no arguments. What the
ranks write is shown line by line, after the rank and the time.

When one rank fails, the others may wait for it for ever. They have a few seconds to end by
themselves, then get SIGTERM, then SIGKILL. The launcher names the rank that failed first, and shows
the end of its output. No process outlives the launcher, even if the launcher is killed.

With --restarts, the whole job restarts after a failure, and continues from its last checkpoint if
it saves any. Compiled programs are kept in the cache of jax_dist.cache.enable, so that the next
start is quick.
"""

import argparse
import contextlib
import io
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from jax_dist.cli import terminal

if TYPE_CHECKING:
    from jax_dist.launch.outcome import Printer, Stream

_USAGE = "jax-dist launch -n N [options] -- COMMAND ..."

_EPILOG = """\
exit codes: 0 all ranks ended with 0; else the code of the rank that failed first,
            or 128 plus the number of the signal that ended or stopped it;
            2 the command was invalid, 124 the time limit was reached, 130 Ctrl-C

signals:    SIGTERM and Ctrl-C are passed on. Ranks that run JAX's preemption service, as they do
            by default, keep running after SIGTERM to save their state; a second SIGTERM ends
            them after --grace seconds, a second Ctrl-C immediately.

examples:
  jax-dist launch -n 2 --cpu-devices 4 -- python train.py    8 simulated devices
  jax-dist launch -n 4 -- python train.py                    rank k has GPU k
  jax-dist launch -n 2 --gpus 4 -- python train.py           rank 0 has GPUs 0 to 3
  jax-dist launch -n 2 --restarts 3 -- python train.py       restart after a failure
  jax-dist launch -n 4 --only-rank 0 --log-dir logs -- python train.py
  jax-dist launch -n 2 --cpu-devices 1 --timeout 60 -- python -m pytest tests/multihost

On several machines, the cluster starts the processes: docs/processes.md shows the same program on
SLURM, Kubernetes, Kubeflow Trainer, Ray, TPU pods, MPI and torchrun.
"""
_RANKS = "Did you mean `-n` or `--processes`?"


def add_parser(commands: Any) -> None:
    parser = terminal.add_command(
        commands,
        "launch",
        _run,
        __doc__,
        _EPILOG,
        help="run a program in several processes on this machine",
        usage=_USAGE,
        meant=dict.fromkeys(("--np", "--nproc", "--nproc-per-node", "--num-processes"), _RANKS),
    )
    parser.add_argument(
        "-n",
        "--processes",
        type=terminal.count(terminal.MOST_PROCESSES),
        required=True,
        metavar="N",
        help="number of processes",
    )
    devices = parser.add_mutually_exclusive_group()
    devices.add_argument(
        "--cpu-devices",
        type=terminal.count(terminal.MOST_DEVICES),
        metavar="N",
        help="simulate N CPU devices in each process, and use no other devices",
    )
    devices.add_argument(
        "--gpus",
        type=terminal.count(terminal.MOST_DEVICES),
        metavar="N",
        help="GPUs for each process (1)",
    )
    parser.add_argument(
        "--timeout", type=terminal.seconds, metavar="SECONDS", help="stop the job after this time"
    )
    parser.add_argument(
        "--grace",
        type=terminal.seconds_or_none,
        default=5.0,
        metavar="SECONDS",
        help="time for the others to end after a failure (5)",
    )
    parser.add_argument(
        "--restarts",
        type=terminal.count(1_000_000, least=0),
        default=0,
        metavar="N",
        help="after a failure, start the job again, up to N times from the same checkpoint (0)",
    )
    parser.add_argument(
        "--min-interval",
        type=terminal.seconds_or_none,
        default=1.0,
        metavar="SECONDS",
        help="between two starts, at least (1)",
    )
    parser.add_argument(
        "--log-dir", type=Path, metavar="FOLDER", help="also write rank-0.log and so on there"
    )
    parser.add_argument(
        "--only-rank",
        type=_ranks,
        metavar="K[,K]",
        help="show only the output of these ranks; logs and failure reports cover all",
    )
    terminal.flag(parser, "--quiet", help="no summary if all is well")
    terminal.add_color(parser)
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _ranks(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.isdecimal() and len(word) < 20 for word in words):
        raise argparse.ArgumentTypeError("must be ranks, such as 0 or 0,2")
    return [int(word) for word in words]


def _run(options: argparse.Namespace, *, out: TextIO, err: TextIO) -> int:
    """Runs the job, and shows what the ranks write and how it ended."""
    from jax_dist._usage import MisuseError
    from jax_dist.launch import job
    from jax_dist.launch.ranks import StartError

    command = _command(options)
    settings = job.JobSettings(
        ranks=options.processes,
        cpu_devices=options.cpu_devices,
        gpus=options.gpus or 1,
        timeout=options.timeout,
        grace=options.grace,
    )
    with _printer(options, out, err) as printer:
        if sys.stdout is None:
            printer.notice("standard output is closed: what the ranks write there is lost")
        try:
            if options.restarts:
                ended = job.supervise(
                    command,
                    settings,
                    printer,
                    restarts=options.restarts,
                    min_interval=options.min_interval,
                )
            else:
                ended = job.run(command, settings, printer)
        except StartError as error:
            raise MisuseError(str(error)) from error
        for text in ended.causes():
            printer.notice(text)
        if ended.exit_code or not options.quiet:
            printer.notice(ended.summary())
    return ended.exit_code


def _command(options: argparse.Namespace) -> list[str]:
    from jax_dist._usage import MisuseError

    between = ["--"] if options.words and options.program else []  # a -- of the command itself
    command = [*options.words, *between, *options.program]
    if not command:
        raise MisuseError(f"what should the processes run?\nusage: {_USAGE}")
    if shutil.which(command[0]) is None:
        raise MisuseError(f"{command[0]}: there is no such command\nusage: {_USAGE}")
    unknown = [rank for rank in options.only_rank or () if rank not in range(options.processes)]
    if unknown:
        last = options.processes - 1
        raise MisuseError(f"--only-rank {unknown[0]}: the ranks are 0 to {last}")
    return command


@contextlib.contextmanager
def _printer(options: argparse.Namespace, out: TextIO, err: TextIO) -> "Iterator[Printer]":
    from jax_dist._usage import MisuseError
    from jax_dist.launch.outcome import Printer, log_files

    streams: dict[Stream, TextIO] = {"stdout": out, "stderr": err}
    for stream in streams.values():
        if isinstance(stream, io.TextIOWrapper):  # ranks may write what a plain terminal lacks
            stream.reconfigure(errors="backslashreplace")
    with contextlib.ExitStack() as stack:
        logs: Sequence[io.FileIO] = ()
        if options.log_dir is not None:
            try:
                logs = stack.enter_context(log_files(options.log_dir, options.processes))
            except OSError as error:
                raise MisuseError(f"--log-dir {error.filename}: {error.strerror}") from error
        yield Printer(
            out,
            err,
            ranks=options.processes,
            silence=terminal.silence,
            only=options.only_rank,
            coloured=[
                name
                for name, stream in streams.items()
                if terminal.wants_colour(options.color, stream)
            ],
            logs=logs,
        )
