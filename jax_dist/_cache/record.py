"""Recorder of what JAX compiles, loaded into the user's program by `jax-dist cache verify`.

JAX imports the modules below `jax_plugins` in `sys.path` when it starts its first backend, and
calls `initialize`: so the program may import jax as late as it likes, or never.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import os
import pathlib
import pickle
import re
import sys
import time
from typing import Any, NamedTuple

from jax_dist._files import write_atomically

PLUGIN = """\
import sys

sys.path.append({library!r})  # last: a jax_dist that is installed comes first
from jax_dist._cache.record import initialize
"""
RECORDS, CACHE = "JAX_DIST_RECORDS", "JAX_DIST_RECORD_CACHE"

_DENSE = re.compile(r'dense<("0x[0-9A-F]*"|\[.{60,}?\])>(?= : )')
_LOCATION = re.compile(r" loc\((.*)\)$")
_FRAME = re.compile(r'"([^"]*)":(\d+):')
_LIBRARY = re.compile(r"[\\/](site|dist)-packages[\\/]|[\\/]jax_dist[\\/]")
_CONSTANT = re.compile(r"(%c\w*) = stablehlo\.constant ")


class Line(NamedTuple):
    """A line of the MLIR text of a program."""

    code: str
    source: str  # the user's line that it comes from, such as "train.py:12"; "" if unknown


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramRecord:
    """A program that a process looked up in the compilation cache."""

    name: str  # such as "jit_step"
    key: str  # its cache key
    process: int  # index of the process
    settings: dict[str, list[str]]  # "XLA flags", "compiler options", "devices", "cache directory"
    lines: list[Line]
    is_written: bool = False  # whether the cache has it after the run


def initialize() -> None:
    """Record the programs that this process looks up in the cache; JAX calls it as a plugin.

    One file is written for each program. The process uses a private cache.
    """
    import jax

    from jax_dist import _compat

    directory, private_cache = pathlib.Path(os.environ[RECORDS]), os.environ[CACHE]
    start_time, numbers = time.time_ns(), itertools.count()
    user_cache = ""  # the cache directory that the program itself has set

    def record(module: Any, devices: Any, options: Any, key: str) -> None:
        """Write down a program: its MLIR module, array of devices, compile options, cache key."""
        nonlocal user_cache
        # JAX opens its cache after this, so that this program, too, goes to the private one.
        cache = _compat.config_value("jax_compilation_cache_dir")
        jax.config.update("jax_compilation_cache_dir", private_cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        if cache != private_cache:
            user_cache = cache or ""
            _compat.reset_cache()
        settings = {
            "XLA flags": _list_flags(),
            "compiler options": [f"{k}={v}" for k, v in options.env_option_overrides],
            "devices": [str(device.id) for device in devices.flatten()],
            "cache directory": [user_cache],
        }
        name = module.operation.attributes["sym_name"].value
        program = ProgramRecord(name, key, jax.process_index(), settings, describe(module))
        # Sorted by name, the files of a run are in the order of its compilations.
        file = f"{start_time:020}-{os.getpid()}-{next(numbers):06}.pickle"
        with contextlib.suppress(OSError):  # a full disk must not end the program
            write_atomically(directory / file, pickle.dumps(program))

    _compat.watch_cache_keys(record)


def _list_flags() -> list[str]:
    """Return the XLA flags as JAX gathers them, without those that only dump."""
    variables = (os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"))
    arguments = (argument for argument in sys.argv if argument.startswith("--xla"))
    flags = itertools.chain(*(text.split() for text in variables), arguments)
    return sorted(flag for flag in flags if not flag.lstrip("-").startswith("xla_dump"))


def describe(module: Any) -> list[Line]:
    """Return the lines of an MLIR module, with hashes for the numbers of large constants."""
    text = module.operation.get_asm(enable_debug_info=True, use_local_scope=True)
    lines = []
    for line in text.splitlines():
        location = _LOCATION.search(line)
        code = line[: location.start()] if location else line
        code = re.sub(r' loc\("[^()]*"\)', "", code)  # locations of the arguments of a function
        lines.append(Line(_DENSE.sub(_hash_constant, code).strip(), _user_line(location)))
    # JAX locates a constant where the jitted function is called. Its first use tells more.
    for index, line in enumerate(lines):
        constant = _CONSTANT.match(line.code)
        if constant:
            use = re.compile(rf"{constant[1]}(?![\w:])")
            sources = (user.source for user in lines[index + 1 :] if use.search(user.code))
            lines[index] = Line(line.code, next(filter(None, sources), line.source))
    return lines


def _hash_constant(match: re.Match[str]) -> str:
    """Return `dense<[1.0, 2.0, ... #1a2b3c4d>` for a long constant that `_DENSE` matches."""
    digest = hashlib.sha256(match[1].encode()).hexdigest()[:8]
    is_hexadecimal = match[1].startswith('"')
    start = "" if is_hexadecimal else f"{match[1][:40]}... "
    return f"dense<{start}#{digest}>"


def _user_line(location: re.Match[str] | None) -> str:
    """Return the innermost line of a location, as "train.py:12"; outside of libraries if any is."""
    frames = _FRAME.findall(location[1]) if location else []
    user_frames = [(file, line) for file, line in frames if not _LIBRARY.search(file)]
    return next((f"{file}:{line}" for file, line in user_frames or frames), "")
