"""Recorder of what JAX compiles, loaded into the user's program by `jax-dist cache verify`.

JAX imports the modules below `jax_plugins` in `sys.path` when it starts its first backend, and
calls `initialize`: so the program may import jax as late as it likes, or never.
"""

import contextlib
import hashlib
import itertools
import json
import os
import pathlib
import re
import sys
import time
from typing import Any

PLUGIN = """\
import importlib.util
import sys

if importlib.util.find_spec("jax_dist") is None:
    sys.path.append({library!r})
from jax_dist._cache.record import initialize
"""
RECORDS, CACHE = "JAX_DIST_RECORDS", "JAX_DIST_RECORD_CACHE"

_DENSE = re.compile(r'dense<("0x[0-9A-F]*"|\[.{60,}?\])>(?= : )')
_LOCATION = re.compile(r" loc\((.*)\)$")
_FRAME = re.compile(r'"([^"]*)":(\d+):')
_LIBRARY = re.compile(r"[\\/](site|dist)-packages[\\/]|[\\/]jax_dist[\\/]")
_CONSTANT = re.compile(r"(%c\w*) = stablehlo\.constant ")


def initialize() -> None:
    """Record what this process compiles, one file for each program, with a private cache."""
    import jax

    from jax_dist import _compat
    from jax_dist._files import write_atomically

    records, cache = pathlib.Path(os.environ[RECORDS]), os.environ[CACHE]
    started, numbers = time.time_ns(), itertools.count()
    asked = ""

    def record(module: Any, devices: Any, options: Any, key: str) -> None:
        nonlocal asked
        wanted = jax.config.values["jax_compilation_cache_dir"]
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        if wanted != cache:  # the program has set its own
            asked = wanted or ""
            _compat.reset_cache()
        program = {
            "name": module.operation.attributes["sym_name"].value,
            "key": key,
            "process": jax.process_index(),
            "settings": {
                "XLA flags": _list_flags(),
                "compiler options": [f"{k}={v}" for k, v in options.env_option_overrides],
                "devices": [str(device.id) for device in devices.flatten()],
                "cache directory": [asked],
            },
            "lines": describe(module),
        }
        with contextlib.suppress(OSError):  # a full disk must not end the program
            name = f"{started:020}-{os.getpid()}-{next(numbers):06}.json"
            write_atomically(records / name, json.dumps(program))

    _compat.watch_cache_keys(record)


def _list_flags() -> list[str]:
    """Return the XLA flags as JAX gathers them, without those that only dump."""
    variables = (os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"))
    arguments = (argument for argument in sys.argv if argument.startswith("--xla"))
    flags = itertools.chain(*(text.split() for text in variables), arguments)
    return sorted(flag for flag in flags if not flag.lstrip("-").startswith("xla_dump"))


def describe(module: Any) -> list[tuple[str, str]]:
    """Return the lines of an MLIR module, each with the user's line that it comes from.

    Of a large constant, a hash takes the place of the numbers.
    """
    text = module.operation.get_asm(enable_debug_info=True, use_local_scope=True)
    lines = []
    for line in text.splitlines():
        location = _LOCATION.search(line)
        code = line[: location.start()] if location else line
        code = re.sub(r' loc\("[^()]*"\)', "", code)  # of arguments
        lines.append((_DENSE.sub(_shorten, code).strip(), _user_line(location)))
    # JAX locates a constant where the jitted function is called; its first use tells more.
    for index, (code, _) in enumerate(lines):
        constant = _CONSTANT.match(code)
        if constant:
            use = rf"{constant[1]}(?![\w:])"
            later = (place for other, place in lines[index + 1 :] if re.search(use, other))
            lines[index] = (code, next(filter(None, later), lines[index][1]))
    return lines


def _shorten(match: re.Match[str]) -> str:
    digest = hashlib.sha256(match[1].encode()).hexdigest()[:8]
    start = "" if match[1].startswith('"') else f"{match[1][:40]}... "
    return f"dense<{start}#{digest}>"


def _user_line(location: re.Match[str] | None) -> str:
    """Return the innermost line that belongs to no library."""
    frames = _FRAME.findall(location[1]) if location else []
    own = [frame for frame in frames if not _LIBRARY.search(frame[0])]
    return next((f"{file}:{line}" for file, line in own or frames), "")
