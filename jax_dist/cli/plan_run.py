"""What `jax-dist plan` does with its options: runs the program up to its step, and plans that."""

import argparse
import contextlib
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax_dist._usage import MisuseError, human_bytes
from jax_dist.cli import terminal


def planned(options: argparse.Namespace, progress: Callable[[str], object]) -> Any:
    """The plan of the step that a program calls.

    Raises:
      MisuseError: there is no such program, step or machine.
    """
    if not options.program:
        raise MisuseError(
            "no program is given. Give one that calls the step, as in: jax-dist plan -- python "
            "train.py"
        )
    if options.on and "jax" not in sys.modules:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # what is compiled for is not here
    from jax_dist.machines import plans, runs

    state, told = _positions("--state", options.state), " ".join(options.program)
    program = _program_of(options.program)
    # What the user's code prints is no result.
    with contextlib.redirect_stdout(sys.stderr), _said_of(told):
        ways = options.ways.split(",") if options.ways else None
        plans.check_ways(ways)
        machines = plans.machines_of(options.on or _devices_here())
        if options.on or options.devices:
            _simulate(options.devices, len(machines[0].devices))
        progress(f"runs {told}, up to its step")
        step = runs.step_of(program, options.step)
        size = human_bytes(sum(leaf.size * leaf.dtype.itemsize for leaf in step.slices))
        progress(f"{step.name} takes {size} on each device")
        return plans.plan_step(
            step,
            machines,
            state=state,
            ways=ways,
            quick=options.quick,
            progress=progress,
        )


def _program_of(command: Sequence[str]) -> Callable[[], object]:
    """Runs a Python program in this process, as `python` would."""
    words = list(command)
    if re.fullmatch(r"python[\d.]*(\.exe)?", os.path.basename(words[0])):
        words.pop(0)
        while words and re.fullmatch(r"-[bBdEiIOPqsSuv]+", words[0]):  # they take no value
            words.pop(0)
    if words[:1] == ["-m"] and words[1:]:
        return lambda: _run(words[1:], os.getcwd(), runpy.run_module, words[1], alter_sys=True)
    if words and os.path.isfile(words[0]):
        folder = os.path.dirname(os.path.abspath(words[0]))
        return lambda: _run(words, folder, runpy.run_path, words[0])
    if words and words[0].endswith(".py"):
        raise MisuseError(f"there is no file {words[0]}")
    raise MisuseError(
        f"{' '.join(command)!r} cannot be run here: the program runs in this process. Give it as "
        "-- python train.py, or as -- python -m package.train."
    )


def _run(words: list[str], folder: str, run: Callable[..., object], *what: Any, **how: Any) -> None:
    sys.argv[:] = words
    sys.path.insert(0, folder)
    run(*what, run_name="__main__", **how)


def _simulate(asked: int | None, count: int) -> None:
    from jax_dist.testing import simulated_devices

    if asked is None and count > terminal.MOST_COPIES:
        raise MisuseError(
            f"the program would run here on {count} simulated devices, each with its copy of the "
            "state: give --devices 8, and a batch that leaves each device as much as on the machine"
        )
    simulated_devices(asked or count)


def _devices_here() -> list[Any]:
    import jax

    return jax.devices()


@contextlib.contextmanager
def _said_of(what: str) -> Iterator[None]:
    """What goes wrong is a mistake of the command line, or of the user's program."""
    from jax_dist import errors

    try:
        yield
    except MisuseError:
        raise
    except Exception as error:
        own = type(error).__module__ == errors.__name__
        said = str(error) if own else f"{what} cannot be planned: {type(error).__name__}: {error}"
        raise MisuseError(said) from error


def _positions(option: str, text: str | None) -> tuple[int, ...] | None:
    """
    >>> _positions("--state", "0,2")
    (0, 2)
    """
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise MisuseError(f"{option} takes positions, as in 0,1; not {text!r}")
    return tuple(map(int, parts))
