"""Run a program in several processes on this machine, joined as one JAX job.

Each process, or rank, finds its number and the address of rank 0 in its environment, so that
`jax_dist.multihost.initialize()` and `jax.distributed.initialize()` need no arguments. Each line of
output starts with its rank.

When a rank fails, the others may wait for it in a collective: they get --grace seconds to end by
themselves, then SIGTERM, then SIGKILL.
"""

import argparse
import io
import threading
from typing import Any, TextIO

from jax_dist.cli import terminal

_EPILOG = """\
exit codes: 0 all ranks ended with 0; else the code of the rank that failed first, or 128 plus the
            number of the signal that ended it; 2 the command was invalid, 124 the time limit was
            reached, 130 Ctrl-C

signals:    SIGTERM and Ctrl-C are passed on, and SIGHUP as SIGTERM. Ranks that run JAX's preemption
            service, as by default, run on after SIGTERM to save their state; a second ends them.

examples:
  jax-dist launch -n 2 --cpu-devices 4 -- python train.py    8 simulated devices
  jax-dist launch -n 4 -- python train.py                    rank k has GPU k
  jax-dist launch -n 2 --cpu-devices 1 --timeout 60 -- python -m pytest tests/multihost

On several machines, the cluster starts the processes: see docs/processes.md.
"""
_COLORS = (36, 33, 35, 32, 34, 31)  # ANSI codes; rank k has color k of these


def add_parser(commands: Any) -> None:
    text = "run a program in several processes on this machine"
    usage = "jax-dist launch -n N [options] -- COMMAND ..."
    parser = terminal.add_command(
        commands, "launch", _run, __doc__, _EPILOG, help=text, usage=usage
    )
    add = parser.add_argument
    count, seconds = terminal.count, terminal.seconds
    add("-n", "--processes", type=count, required=True, metavar="N", help="number of processes")
    devices = parser.add_mutually_exclusive_group()
    text = "simulate N CPU devices in each process, and use no other devices"
    devices.add_argument("--cpu-devices", type=count, metavar="N", help=text)
    devices.add_argument("--gpus", type=count, metavar="N", help="GPUs for each process (1)")
    add("--timeout", type=seconds, metavar="SECONDS", help="stop the job after this time")
    text = "time for the others to end after a failure (1)"
    add("--grace", type=seconds, default=1.0, metavar="SECONDS", help=text)
    terminal.add_color(parser)


def _run(options: argparse.Namespace, *, out: TextIO, err: TextIO) -> int:
    """Run the job, and print what the ranks write and how it ended."""
    from jax_dist import launch
    from jax_dist._usage import MisuseError

    command = terminal.command_of(options, f"launch -n {options.processes}")
    printer = _Printer(out, err, options.color)
    try:
        outcome = launch.run(
            command,
            options.processes,
            printer.write,
            cpu_devices=options.cpu_devices,
            gpus=options.gpus or 1,
            timeout=options.timeout,
            grace=options.grace,
            pass_on_signals=True,
        )
    except OSError as error:
        raise MisuseError(f"{command[0]} cannot be started: {error.strerror}") from error
    for text in outcome.describe():
        print(f"jax-dist launch: {text}", file=err)
    return outcome.exit_code


class _Printer:
    """Writes the output lines of the ranks, each with its rank as prefix: "[0] loss 3.2"."""

    def __init__(self, out: TextIO, err: TextIO, color: str) -> None:
        """Write to `out` and `err`; `color` is "always", "never" or "auto"."""
        self._streams = {"stdout": out, "stderr": err}
        self._colored = {
            name: terminal.wants_color(color, stream) for name, stream in self._streams.items()
        }
        self._lock = threading.Lock()
        for stream in self._streams.values():
            if isinstance(stream, io.TextIOWrapper):  # its encoding may lack characters
                stream.reconfigure(errors="backslashreplace")

    def write(self, rank: int, stream_name: str, line: str) -> None:
        """Write a line to "stdout" or "stderr"; called by several threads."""
        stream, prefix = self._streams[stream_name], f"[{rank}]"
        if self._colored[stream_name]:
            prefix = f"\x1b[{_COLORS[rank % len(_COLORS)]}m{prefix}\x1b[0m"
        with self._lock:
            try:
                stream.write(f"{prefix} {line}\n")
                stream.flush()
            except BrokenPipeError:  # in `jax-dist launch ... | head`, the ranks keep running
                terminal.silence(stream)
