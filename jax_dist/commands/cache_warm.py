"""Compiles programs ahead of time, from the shapes of their arguments, into the cache.

PROGRAMS names a function without arguments, in a file or a module, that yields what to compile:

  def programs():
      x = jax.ShapeDtypeStruct((8, 128), jax.numpy.float32)
      yield train_step, x              # what jax_dist.cache.warm(train_step, x) takes

Compile the function that the program will call, with the same name and options, on the same kind
and number of devices.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import sys
from collections.abc import Iterable
from typing import Any, TextIO

from jax_dist.commands.terminal import Exit

HELP = "compile ahead of time, from shapes"
EPILOG = """\
exit codes: 0 all is in the cache, 1 something is not,
            2 an option is invalid

examples:
  jax-dist cache warm programs.py:programs
  jax-dist cache warm --devices 8 my.package.programs:programs      8 simulated CPU devices
  jax-dist cache warm --devices 4 --processes 2 programs.py:programs
  jax-dist cache warm --mock-gpu-topology 2x8x1 programs.py:programs
                                   needs one GPU of the kind; JAX ignores it on CPUs
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `warm` takes."""
    parser.add_argument("programs", metavar="PROGRAMS", help="as in programs.py:programs")
    parser.add_argument("--cache", metavar="FOLDER", help="(default: that of enable())")
    parser.add_argument("--devices", type=int, metavar="N", help="simulated CPU devices")
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="number of processes, joined, on this machine",
    )
    parser.add_argument(
        "--mock-gpu-topology", metavar="AxBxC", help="slices x hosts x GPUs of the real machine"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace, *, out: TextIO, err: TextIO) -> Exit:
    """Compiles and prints."""
    del err
    from jax_dist._usage import MisuseError

    if ":" not in options.programs:
        raise MisuseError(f"{options.programs} names no function; write programs.py:programs")
    if options.processes > 1:
        found = _in_processes(options)
    else:
        _set_devices(options)
        found = warm_all(options.programs, options.cache)
    if options.json:
        print(json.dumps(found, indent=2), file=out)
    else:
        out.writelines(f"{each['text']}\n" for each in found)
    return Exit.OK if found and all(each["cached"] for each in found) else Exit.FINDINGS


def _set_devices(options: argparse.Namespace) -> None:
    import jax

    if options.devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.devices)
    if options.mock_gpu_topology is not None:
        jax.config.update("jax_mock_gpu_topology", options.mock_gpu_topology)


def _in_processes(options: argparse.Namespace) -> list[dict[str, Any]]:
    from jax_dist.commands import cache_warm  # by its name, also where this runs as a script
    from jax_dist.testing import run_processes

    outcomes = run_processes(
        cache_warm.warm_all,
        options.programs,
        options.cache,
        processes=options.processes,
        cpu_devices=options.devices or 1,
        timeout=86400.0,
    )
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return [
        each | {"rank": outcome.rank, "text": f"process {outcome.rank}: {each['text']}"}
        for outcome in outcomes
        for each in outcome.value
    ]


def warm_all(name: str, folder: str | None) -> list[dict[str, Any]]:
    """Warms all programs that a function yields; what became of each, as plain data."""
    from jax_dist import cache
    from jax_dist.cache.activation import Default

    programs = _programs(name)  # first: nothing is switched on for a name that is not there
    cache.enable(Default.PATH if folder is None else folder)
    found = []
    for program in programs:
        warmed = cache.warm(*program)
        found.append(
            {
                "function": warmed.function,
                "hit": warmed.hit,
                "written": warmed.written,
                "cached": warmed.hit or warmed.written,
                "seconds": round(warmed.seconds, 3),
                "text": str(warmed),
            }
        )
    return found


def _programs(name: str) -> Iterable[tuple[Any, ...]]:
    from jax_dist._usage import MisuseError

    place, _, function = name.rpartition(":")
    sys.path.insert(0, os.getcwd())
    try:
        module = _loaded(place)
        programs = getattr(module, function)
    except (ModuleNotFoundError, FileNotFoundError, AttributeError) as error:
        raise MisuseError(f"{name} cannot be found: {error}") from error
    return programs()


def _loaded(place: str) -> Any:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = pathlib.Path(place)
    sys.path.insert(0, str(path.parent.resolve()))  # as Python does for a script
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
