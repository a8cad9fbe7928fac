"""Switches JAX's persistent compilation cache on, so that it hits.

First the folder: where it lies, and whether what lies there can be trusted, for a program in a
cache is code. Then the settings of JAX under which what was compiled is found again.
"""

import enum
import hashlib
import importlib.util
import os
import pathlib
import platform
import re
import stat
import sys
import warnings
from collections.abc import Mapping
from importlib import metadata
from typing import Any, Literal

import jax

from jax_dist import _compat
from jax_dist.cache import entries
from jax_dist.cache.counters import Settings, watcher
from jax_dist.errors import CacheDirectoryError, CacheWarning, message

_CPU_FACTS = re.compile(
    r"^(vendor_id|cpu family|model|model name|flags|Features|CPU \w+)\s*:\s*(.*)$", re.MULTILINE
)


def chosen(argument: str | os.PathLike[str] | None, environment: Mapping[str, str]) -> str:
    """The folder or URL that is asked for: argument, our variable, JAX's variable, default."""
    asked = os.fspath(argument) if argument is not None else ""
    for variable in ("JAX_DIST_CACHE_DIR", "JAX_COMPILATION_CACHE_DIR"):
        asked = asked or environment.get(variable, "")
    return os.path.expanduser(asked.removeprefix("file://")) or default(environment)


def default(environment: Mapping[str, str]) -> str:
    """The folder of this user: `~/.cache/jax_dist`, or where the system has such folders."""
    home = os.path.expanduser("~")
    if sys.platform == "darwin":
        caches = os.path.join(home, "Library", "Caches")
    else:
        caches = environment.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    return os.path.join(caches, "jax_dist")


def is_url(path: str) -> bool:
    return "://" in path


def of_this_machine(path: str) -> str:
    """The part of a cache that machines with this CPU and this jaxlib may share."""
    return f"{path.rstrip('/')}/{part_name()}"


def part_name() -> str:
    """Such as `x86_64-3f9a1c2b-jaxlib-0.10.2`.

    Machine code of one CPU may be illegal on another, and jaxlib reads only what it wrote.
    """
    cpu = hashlib.sha256(_cpu().encode()).hexdigest()[:8]
    return f"{platform.machine()}-{cpu}-jaxlib-{metadata.version('jaxlib')}"


def _cpu() -> str:
    """What the CPU can do, as the system tells; of one core, since all are alike."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        return platform.processor()
    core = text.split("\n\n", maxsplit=1)[0]
    return "\n".join(f"{name}={value}" for name, value in _CPU_FACTS.findall(core))


def make(folder: pathlib.Path) -> None:
    """Makes the folder, for this user alone; one that is there already stays as it is.

    Raises:
      OSError: it cannot be made.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)  # another process may have been faster


def refuse_if_open(folder: pathlib.Path) -> None:
    """Checks a folder that is there.

    Raises:
      CacheDirectoryError: others than its owner and its group could put code into it.
    """
    why = danger(folder)
    if why is None:
        return
    status = folder.stat()
    raise CacheDirectoryError(
        message(
            what="A compilation cache cannot be trusted where anybody can change it",
            which=[
                f"{folder} has mode {stat.S_IMODE(status.st_mode):04o} and belongs to user "
                f"{status.st_uid}"
            ],
            why=f"{why}, and JAX runs the machine code that it finds in its cache",
            do=f"Name a folder of your own, or make this one yours alone: chmod 700 {folder}",
        )
    )


def danger(folder: pathlib.Path) -> str | None:
    """Why a folder cannot be trusted, if it cannot."""
    if os.name == "nt":  # has no such modes; folders of a user are the user's own there
        return None
    status, above = folder.stat(), folder.resolve().parent.stat()
    if status.st_mode & stat.S_IWOTH:
        return "every user of this machine may write there"
    if above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX:
        return "every user of this machine may put another folder in its place"
    if above.st_mode & stat.S_IWOTH and status.st_uid not in (0, os.getuid()):
        return "another user made it, in a folder where everybody may"
    return None


# --- switches JAX's persistent compilation cache on, so that it hits


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
    asked = chosen(None if isinstance(path, Default) else path, os.environ)
    limit = None if max_size is None else entries.bytes_of(max_size)
    trouble, folder = _prepared(asked)
    if trouble is not None:
        warnings.warn(CacheWarning(trouble), stacklevel=2)
        return _disable()
    settings = Settings(
        folder=folder,
        local=not is_url(asked),
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


def _switch_on(settings: Settings, min_compile_seconds: float) -> None:
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
    if is_url(asked):
        missing = [name for name in ("etils", "fsspec") if importlib.util.find_spec(name) is None]
        return (_missing(asked, missing) if missing else None), of_this_machine(asked)
    folder = pathlib.Path(of_this_machine(os.path.abspath(asked)))
    if folder.parent.is_file():
        return _cannot_make(f"{folder.parent}: it is a file"), ""
    try:
        make(folder)
    except OSError as error:
        return _cannot_make(f"{error.filename}: {error.strerror}"), ""
    for each in (folder.parent, folder):
        refuse_if_open(each)
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
