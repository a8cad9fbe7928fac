"""Compiles a training step in several ways for machines that are not here, and says what fits.

No such machine is needed: only its compiler, `jax[tpu]` or `jax[cuda12]`. The step is found by
running the program behind `--` until it calls it.
"""

import argparse
import json
import os
from typing import TYPE_CHECKING, Any, TextIO

from jax_dist.cli import outputs, terminal
from jax_dist.cli.terminal import Exit

if TYPE_CHECKING:
    from jax_dist.machines.report import Plan

_EPILOG = """\
exit codes: 0 some way fits on each machine, 1 on one of them none does, 2 the command was invalid
or there is no program of any way

ways: jax.pmap, the program as it is; replicated, by global_view with a whole copy of the state on
each device; fsdp, with the state in parts, gathered once in a step; fsdp-regather, gathered each
time that it is read; by name only: hsdp, in parts over the devices of a host and copied over hosts

A program runs here on as many simulated devices as the first machine has (--devices), up to the
first call of its training step (the first mapped function that gets what it returned, and more), or
of NAME; then it is ended. A program without such a step runs to its end.

On each machine, every device gets as much as here.

examples:
  jax-dist plan --on v5e:4x4 -- python train.py --batch_size 256
  jax-dist plan train_step --on v5e:4x4 --on h100:2x8 -- python -m project.train
"""


def add_parser(commands: Any) -> None:
    parser = terminal.add_command(
        commands,
        "plan",
        _run,
        __doc__,
        _EPILOG,
        help="whether a step fits on a machine, and in which way",
    )
    parser.add_argument(
        "step",
        nargs="?",
        metavar="NAME",
        help="of the mapped function, as step; by default it is found",
    )
    parser.add_argument(
        "--on",
        action="append",
        metavar="MACHINE",
        help="such as v5e:4x4, v5e-64, v5p:2x2x4, h100 or h100:2x8; can be repeated; by default "
        "the devices that are here",
    )
    parser.add_argument(
        "--ways",
        metavar="NAMES",
        help="with commas between, of: jax.pmap, jax_dist.pmap, replicated, fsdp, hsdp, fsdp-"
        "regather",
    )
    parser.add_argument("--state", metavar="POSITIONS", help="of the arguments that are carried")
    parser.add_argument(
        "--devices",
        type=terminal.count(terminal.MOST_COPIES),
        metavar="N",
        help="that the program sees here; by default as many as the first machine has",
    )
    terminal.flag(
        parser,
        "--quick",
        help="compile with the least effort, some five times faster, and in full only what comes "
        "near the limit: other peaks are estimates",
    )
    terminal.flag(parser, "--json", help="print one JSON object")
    parser.add_argument("--plot", metavar="FILE.svg", help="write a picture of the memory")
    terminal.flag(parser, "--quiet", help="no progress on the standard error")


def _run(options: argparse.Namespace, *, out: TextIO, err: TextIO) -> Exit:
    if options.plot:
        outputs.check("--plot", options.plot, "a picture of jax-dist plan")
    from jax_dist.cli import plan_run  # not at the top: `--help` need not wait for jax

    try:
        with terminal.ProgressLine(err, "compiling") as line:
            found = plan_run.planned(options, (lambda text: None) if options.quiet else line.print)
    except KeyboardInterrupt:
        print("jax-dist plan: interrupted", file=err, flush=True)
        os._exit(Exit.INTERRUPTED)  # at a common exit, Python waits for what is being compiled
    print(json.dumps(found.to_dict(), indent=2) if options.json else str(found), file=out)
    if options.plot:  # it may fail, and the table is not to be lost
        outputs.save("--plot", options.plot, found.picture(), "a picture of jax-dist plan")
    if all(row.problem for row in found.rows):
        return Exit.USAGE
    fits = all(_some_fit(found, machine) for machine in found.machines)
    return Exit.OK if fits else Exit.FINDINGS


def _some_fit(found: "Plan", machine: Any) -> bool:
    return any(row.fits is not False and not row.problem for row in found.on(machine))
