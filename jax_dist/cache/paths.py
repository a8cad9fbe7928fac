"""Where the cache lies, and whether it is safe to trust what lies there.

A cache holds machine code: anyone who can write into the folder decides what this process runs.
"""

import hashlib
import os
import pathlib
import platform
import re
import stat
import sys
from collections.abc import Mapping
from importlib import metadata

from jax_dist.errors import CacheDirectoryError, message

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
