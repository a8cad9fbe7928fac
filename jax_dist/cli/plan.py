"""Compile a training step with several strategies for machines that are not attached.

No such machine is needed: only its compiler, `jax[tpu]` or `jax[cuda12]`. The step is found by
running the program behind `--` until it calls it.
"""

import argparse
import contextlib
import json
import os
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from jax_dist._usage import MisuseError
from jax_dist.cli import terminal
from jax_dist.cli.terminal import Exit

_EPILOG = """\
exit codes: 0 some strategy fits on each machine, 1 on one of them none does, 2 the command was
invalid or there is no program of any strategy

strategies: jax.pmap, the program as it is; replicated, by global_view with a copy of the state on
each device; fsdp, with the state sharded, gathered once in a step; fsdp-regather, gathered each
time that it is read; by name only: jax_dist.pmap, and hsdp, sharded over the devices of a host and
copied over hosts

A program runs here on as many simulated devices as the first machine has (--devices), up to the
first call of its training step (the first mapped function that gets what it returned, and more), or
of NAME; then it is ended. On each machine, every device gets as much as here.

examples:
  jax-dist plan --on v5e:4x4 -- python train.py --batch_size 256
  jax-dist plan train_step --on v5e:4x4 --on h100:2x8 -- python -m project.train
"""
_MAX_SIMULATED_DEVICES = 64  # each has its copy of the state in this machine's memory


def add_parser(commands: Any) -> None:
    text = "whether a step fits on a machine, and with which strategy"
    parser = terminal.add_command(commands, "plan", _run, __doc__, _EPILOG, help=text)
    text = "name of the mapped function, such as step (default: found by running the program)"
    parser.add_argument("step", nargs="?", metavar="NAME", help=text)
    text = "target machine: v5e:4x4, v5e-64, v5p:2x2x4, h100, h100:2x8, ...; can be repeated"
    parser.add_argument("--on", action="append", metavar="MACHINE", help=text)
    text = "strategies to compile, with commas between (default: the first four below)"
    parser.add_argument("--strategies", metavar="NAMES", help=text)
    text = "positions of the arguments that carry state, with commas between"
    parser.add_argument("--state", type=positions, metavar="POSITIONS", help=text)
    text = "simulated devices of the program here (default: as many as the first machine has)"
    parser.add_argument("--devices", type=terminal.count, metavar="N", help=text)
    text = "compile with the least effort, and in full only what comes near the limit"
    terminal.flag(parser, "--quick", help=text)
    terminal.flag(parser, "--json", help="print one JSON object")
    terminal.flag(parser, "--quiet", help="no progress on the standard error")


def positions(text: str) -> tuple[int, ...]:
    """Parse the value of --state, such as "0,2"."""
    return tuple(map(int, text.split(",")))


def _run(options: argparse.Namespace, *, out: TextIO, err: TextIO) -> Exit:
    """Print the plan; return whether each machine has a strategy that fits."""

    def print_progress(text: str) -> None:
        if not options.quiet:
            print(text, file=err, flush=True)

    try:
        plan = _plan(options, print_progress)
    except KeyboardInterrupt:
        print("jax-dist plan: interrupted", file=err, flush=True)
        os._exit(Exit.INTERRUPTED)  # at a common exit, Python waits for the compiling threads
    print(json.dumps(plan.to_dict(), indent=2) if options.json else str(plan), file=out)
    if all(row.problem for row in plan.rows):
        return Exit.USAGE
    # A row whose memory limit is unknown (fits is None) counts as one that fits.
    fitting = {row.machine for row in plan.rows if row.fits is not False and not row.problem}
    return Exit.OK if fitting >= {machine.name for machine in plan.machines} else Exit.FINDINGS


def _plan(options: argparse.Namespace, progress: Callable[[str], object]) -> Any:
    """Return the plan of the program behind `--`; raise MisuseError if it fails or has no step."""
    if not options.on or not options.program:
        missing = "a program" if options.on else "a machine"
        raise MisuseError(f"give {missing}, as in: jax-dist plan --on v5e:4x4 -- python train.py")
    if "jax" not in sys.modules:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the target machines are not attached
    from jax_dist import testing  # not at the top: `--help` need not wait for jax
    from jax_dist._steps import find_step
    from jax_dist.errors import ArgumentError
    from jax_dist.plan import check_strategies, machines_of, plan

    command, program = " ".join(options.program), _load_program(options.program)
    strategies = options.strategies.split(",") if options.strategies else None
    try:  # before the program runs
        check_strategies(strategies or ())
        machines = machines_of(options.on)
    except (ArgumentError, ImportError) as error:
        raise MisuseError(str(error)) from error
    count = options.devices or len(machines[0].devices)
    if count > _MAX_SIMULATED_DEVICES:
        raise MisuseError(
            f"the program would run here on {count} simulated devices, each with its copy of the "
            "state: give --devices 8, and a batch that leaves each device as much"
        )
    testing.simulated_devices(count)
    progress(f"runs {command}, up to its step")
    how = {"state": options.state, "strategies": strategies, "quick": options.quick}
    # The program's own output does not belong to the results, which may be JSON.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            return plan(find_step(program, options.step), on=machines, progress=progress, **how)
        except Exception as error:
            if not isinstance(error, ArgumentError):  # most likely raised by the user's program
                traceback.print_exc()
            raise MisuseError(f"{command}: {type(error).__name__}: {error}") from error


def _load_program(command: Sequence[str]) -> Callable[[], object]:
    """Return a function that runs `["python", "train.py", "--steps", "2"]` in this process.

    "python" may be missing. Raises MisuseError if the command runs neither a file nor a module.
    """
    words = list(command)
    if re.fullmatch(r"python[\d.]*(\.exe)?", os.path.basename(words[0])):
        words.pop(0)
        while words and re.fullmatch(r"-[bBdEiIOPqsSuv]+", words[0]):  # flags without a value
            words.pop(0)
    is_module = words[:1] == ["-m"] and len(words) > 1
    if is_module:
        words.pop(0)
        directory = os.getcwd()
    elif words and os.path.isfile(words[0]):
        directory = os.path.dirname(os.path.abspath(words[0]))
    elif words and words[0].endswith(".py"):
        raise MisuseError(f"there is no file {words[0]}")
    else:
        raise MisuseError(f"{' '.join(command)!r} cannot be run: give -- python train.py")

    def run_program() -> None:
        sys.argv[:] = words
        sys.path.insert(0, directory)
        if is_module:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")

    return run_program
