"""Switches JAX's persistent compilation cache on, so that it hits, and fills it ahead of time."""

import dataclasses
import enum
import importlib.util
import os
import pathlib
import time
import warnings
from collections.abc import Callable
from typing import Any, Literal

import jax

from jax_dist import _compat
from jax_dist.cache import entries, store
from jax_dist.cache.counters import CacheSettings, stats, watcher
from jax_dist.cache.keys import key
from jax_dist.errors import CacheWarning, message


class Default(enum.Enum):
    """What `enable` takes where no path is given: None has a meaning of its own."""

    PATH = "JAX_DIST_CACHE_DIR, or JAX_COMPILATION_CACHE_DIR, or a folder of this user"


_before: dict[str, Any] = {}  # JAX's settings, as they were before the first `enable`


def enable(
    path: str | os.PathLike[str] | None | Default = Default.PATH,
    *,
    max_size: int | str | None = None,
    min_compile_seconds: float = 0.0,
    writers: Literal["every", "first"] = "every",
    failures: bool = True,
    retry: bool = False,
) -> str | None:
    """Keeps compiled programs in a folder, for this run and all that follow.

    Call it once, at the start of the program and in each of its processes. Every program is kept,
    however quickly it compiles. Files are complete or absent; a damaged one is compiled again and
    replaced. If something cannot be used, a warning says so, and the program continues without it.

    Args:
      path: a folder, or a URL such as `gs://bucket/cache` (needs etils[epath] and fsspec, and is
        left to JAX). Not given: $JAX_DIST_CACHE_DIR, or else $JAX_COMPILATION_CACHE_DIR, or else a
        folder of this user, such as ~/.cache/jax_dist. None: no cache.
      max_size: the bytes that it may hold, also as "20GB"; the least recently used are removed.
      min_compile_seconds: programs that compile in less are not kept.
      writers: "every" process writes what it compiled and did not find; "first": only the first
        one, which on CPUs leaves the others without, since their keys differ.
      failures: also keep in mind which programs did not compile, and do not try them in later runs.
      retry: try those again; so does JAX_DIST_RETRY_FAILED=1.

    Returns:
      Where the programs are: a part of the folder that only machines with the same CPU and jaxlib
      share. None: there is no cache.

    Raises:
      CacheDirectoryError: anybody could change the contents of the folder.
      ValueError: `max_size` is not a size.

    >>> import tempfile
    >>> from jax_dist import cache
    >>> folder = cache.enable(tempfile.mkdtemp())
    >>> with cache.stats() as seen:
    ...     three = jax.jit(lambda: 3)()
    >>> seen.misses, seen.written
    (1, 1)
    >>> cache.enable(None)
    """
    if path is None:
        return _disable()
    asked = store.chosen(None if isinstance(path, Default) else path, os.environ)
    limit = None if max_size is None else entries.bytes_of(max_size)
    trouble, folder = _prepared(asked)
    if trouble is not None:
        warnings.warn(CacheWarning(trouble), stacklevel=2)
        return _disable()
    settings = CacheSettings(
        folder=folder,
        local=not store.is_url(asked),
        max_size=limit,
        writers=writers,
        failures=failures,
        retry=retry,
    )
    _switch_on(settings, min_compile_seconds)
    return folder


def _disable() -> None:
    watcher.settings = None
    for name, value in _before.items():
        jax.config.update(name, value)
    jax.config.update("jax_compilation_cache_dir", None)
    _compat.reset_cache()


def _switch_on(settings: CacheSettings, min_compile_seconds: float) -> None:
    wanted = {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": settings.folder,
        "jax_persistent_cache_min_compile_time_secs": min_compile_seconds,
        "jax_persistent_cache_min_entry_size_bytes": 0,
    }
    if not settings.local:
        # XLA would take the URL for a folder of its own.
        wanted["jax_persistent_cache_enable_xla_caches"] = "none"
        wanted["jax_compilation_cache_max_size"] = settings.max_size or -1
    for name, value in wanted.items():
        _before.setdefault(name, getattr(jax.config, name))
        jax.config.update(name, value)
    watcher.settings = settings
    _compat.watch_cache(watcher)
    _compat.reset_cache()  # JAX looks at its settings once


def _prepared(asked: str) -> tuple[str | None, str]:
    """Why there can be no cache, if so; and where it is."""
    if store.is_url(asked):
        missing = [name for name in ("etils", "fsspec") if importlib.util.find_spec(name) is None]
        return (_missing(asked, missing) if missing else None), store.of_this_machine(asked)
    folder = pathlib.Path(store.of_this_machine(os.path.abspath(asked)))
    if folder.parent.is_file():
        return _cannot_make(f"{folder.parent}: it is a file"), ""
    try:
        store.make(folder)
    except OSError as error:
        return _cannot_make(f"{error.filename}: {error.strerror}"), ""
    for each in (folder.parent, folder):
        store.refuse_if_open(each)
    return None, str(folder)


def _cannot_make(which: str) -> str:
    return message(
        what="The compilation cache is off",
        which=[which],
        why="no folder can be made there",
        do="Name another folder, in enable(...) or in JAX_DIST_CACHE_DIR.",
    )


def _missing(asked: str, packages: list[str]) -> str:
    return message(
        what="The compilation cache is off",
        which=[f"{asked} needs {' and '.join(packages)}"],
        why="JAX reads and writes URLs through these packages",
        do="Install etils[epath] and fsspec, with the one that knows the URL, such as gcsfs.",
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Warmed:
    """What became of one program."""

    function: str  # the name of its program, such as "jit_step"
    hit: bool  # it was in the cache already
    written: bool  # it is now
    unwritten: str | None  # why not
    seconds: float  # tracing included

    def __str__(self) -> str:
        if self.hit:
            return f"{self.function}: in the cache"
        end = "written" if self.written else f"not written: {self.unwritten}"
        return f"{self.function}: compiled in {self.seconds:.1f} s, {end}"


def warm(fun: Callable, /, *specs: Any, **named_specs: Any) -> Warmed:
    """Compiles a program into the cache without running it, so that its first call hits.

    Nothing is computed and no arguments are made, so one process can do it, on another day or
    another machine with the same CPU type and jaxlib: with JAX_NUM_CPU_DEVICES as many simulated
    devices, with `jax_mock_gpu_topology` GPUs that are not there (JAX ignores it on CPUs). Programs
    of several processes are warmed by starting as many.

    Args:
      fun: a function of arrays, or what `jax.jit` or `jax_dist.pmap` made of one.
      *specs: its arguments: trees of `jax.ShapeDtypeStruct`, with the shardings that the arrays
        will have where that is not the default; static arguments as they are.
      **named_specs: those by keyword.

    Returns:
      Whether it was in the cache before, and whether it is now.

    >>> import tempfile
    >>> from jax_dist import cache
    >>> folder = cache.enable(tempfile.mkdtemp())
    >>> def step(x):
    ...     return x * 2
    >>> x = jax.ShapeDtypeStruct((8,), jax.numpy.float32)
    >>> warm(step, x).written, warm(step, x).hit
    (True, True)
    >>> cache.enable(None)
    """
    jitted: Any = fun if hasattr(fun, "lower") else jax.jit(fun)
    start = time.monotonic()
    lowered = jitted.lower(*specs, **named_specs)
    with stats() as seen:  # only here: lowering may compile small programs of its own
        lowered.compile()
    seconds = time.monotonic() - start
    if not seen.functions:  # JAX compiled it in this process before, and asked for nothing
        return _looked_up(lowered, seconds)
    name, counts = next(iter(seen.functions.items()))
    return Warmed(
        function=name,
        hit=counts.hits > 0,
        written=counts.written > 0,
        unwritten=next(iter(counts.unwritten), None),
        seconds=seconds,
    )


def _looked_up(lowered: jax.stages.Lowered, seconds: float) -> Warmed:
    found = key(lowered)
    folder = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    there = bool(folder) and pathlib.Path(folder, found.name + entries.ENTRY).exists()
    return Warmed(
        function=found.function,
        hit=there,
        written=False,
        unwritten=None if there else "this process compiled it before, without the cache",
        seconds=seconds,
    )
