"""What `jax-dist plan` does, once it knows what is asked: loads the file, and plans the step."""

import argparse
import contextlib
import importlib.util
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax_dist._usage import MisuseError, hint, human_bytes
from jax_dist.commands import terminal


def planned(options: argparse.Namespace, progress: Callable[[str], object]) -> Any:
    """The plan that is asked for.

    Raises:
      MisuseError: there is no such file, name or machine, or the arguments cannot be made.
    """
    if options.on and "jax" not in sys.modules:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # what is compiled for is not here
    with contextlib.redirect_stdout(sys.stderr):  # what the user's code prints is no result
        if options.program:
            return _of_program(options, progress)
        return _of_names(options, progress)


def _of_program(options: argparse.Namespace, progress: Callable[[str], object]) -> Any:
    """The plan of the step that a program calls."""
    from jax_dist.machines import plans, runs

    told = " ".join(options.program)
    for option in ("args", "keywords"):
        if getattr(options, option) is not None:
            raise MisuseError(f"--{option} is for a step that is named: the program says it")
    program = _program_of(options.program)
    with _said_of(told):
        ways = _ways(options.ways)
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
            state=_positions("--state", options.state),
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


def _of_names(options: argparse.Namespace, progress: Callable[[str], object]) -> Any:
    """The plan of a step that is named, with its arguments."""
    from jax_dist.machines.plans import plan

    if options.step is None:
        raise MisuseError(
            "no step is given. Give a program that calls it, as in: jax-dist plan -- python "
            "train.py; or FILE:NAME and its arguments, as in: train.py:step --args example_args"
        )
    path, _, name = options.step.rpartition(":")
    if not path or not name:
        raise MisuseError(f"{options.step!r} names no function. Give FILE:NAME, as train.py:step.")
    if options.args is None:
        raise MisuseError(
            "--args is missing. Give the arguments of the step; or, behind --, a program that "
            "calls it, as in: jax-dist plan -- python train.py"
        )
    names = _names_of(path)
    step = _found(name, names, path)
    args = _arguments("--args", options.args, names)
    keywords = _keywords(options.keywords, names)
    state = _positions("--state", options.state)
    with _said_of(options.step):
        return plan(
            step,
            *args,
            keywords=keywords,
            on=options.on or _devices_here(),
            state=state,
            ways=_ways(options.ways),
            quick=options.quick,
            progress=progress,
        )


def _devices_here() -> list[Any]:
    import jax

    return jax.devices()


def _ways(text: str | None) -> list[str] | None:
    return text.split(",") if text else None


@contextlib.contextmanager
def _said_of(what: str) -> Iterator[None]:
    """What goes wrong is a mistake of the command line, or of the user's function."""
    from jax_dist import errors

    try:
        yield
    except MisuseError:
        raise
    except Exception as error:
        own = type(error).__module__ == errors.__name__
        said = str(error) if own else f"{what} cannot be planned: {_said(error)}"
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


def _names_of(path: str) -> dict[str, Any]:
    """What a file defines; what stands below `__name__ == "__main__"` does not run."""
    if not os.path.isfile(path):
        raise MisuseError(f"there is no file {path}")
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    name = os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise MisuseError(f"{path} is no Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise MisuseError(f"{path} cannot be loaded: {_said(error)}") from error
    return vars(module)


def _found(name: str, names: dict[str, Any], path: str) -> Any:
    """What a name stands for, as in `Trainer.step`."""
    first, *others = name.split(".")
    if first not in names:
        functions = [each for each, value in names.items() if callable(value)]
        near = hint(first, functions, "Give a function that stands outside of all others.")
        raise MisuseError(f"{path} has no {first!r}. {near}")
    value = names[first]
    for other in others:
        if not hasattr(value, other):
            raise MisuseError(f"{first} of {path} has no {other!r}")
        value = getattr(value, other)
    if not callable(value):
        raise MisuseError(f"{name} of {path} is no function, but {type(value).__name__}")
    return value


def _value(flag: str, text: str, names: dict[str, Any]) -> Any:
    """An expression in the names of a file; those of JAX and NumPy are there in any case."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    try:
        return eval(text, {"jax": jax, "jnp": jnp, "np": np, **names})
    except Exception as error:
        raise MisuseError(f"{flag} {text!r}: {_said(error)}") from error


def _keywords(text: str | None, names: dict[str, Any]) -> dict[str, Any]:
    if text is None:
        return {}
    (found,) = _arguments("--keywords", text, names)
    if not isinstance(found, dict):
        raise MisuseError(f"--keywords {text!r} is no dict, but {type(found).__name__}")
    return found


def _arguments(flag: str, text: str, names: dict[str, Any]) -> tuple[Any, ...]:
    """What an option stands for; arrays that it makes are only types, where it can be traced."""
    import jax
    from jax.core import Tracer

    def made() -> tuple[Any, ...]:
        value = _value(flag, text, names)
        if callable(value):
            try:
                value = value()
            except Exception as error:
                raise MisuseError(f"{flag} {text!r}: {_said(error)}") from error
        return value if isinstance(value, tuple) and not hasattr(value, "_fields") else (value,)

    kept: list[Any] = []

    def traced() -> list[Any]:
        leaves, tree = jax.tree.flatten(made())
        kept[:] = tree, leaves
        return [leaf for leaf in leaves if isinstance(leaf, Tracer)]

    try:
        types = iter(jax.eval_shape(traced))
    except Exception:  # noqa: BLE001  # it reads values, files or devices: then for real
        return made()
    tree, leaves = kept
    return jax.tree.unflatten(
        tree, [next(types) if isinstance(leaf, Tracer) else leaf for leaf in leaves]
    )


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
