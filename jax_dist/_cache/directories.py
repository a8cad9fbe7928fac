"""The directory of the compilation cache, and whether it is safe to load code from."""

import hashlib
import itertools
import os
import pathlib
import platform
import re
import stat
from collections.abc import Mapping
from importlib import metadata

from jax_dist.errors import ArgumentTypeError

_CPU_FACTS = re.compile(
    r"^(vendor_id|cpu family|model|model name|flags|Features|CPU \w+)\s*:\s*(.*)$", re.MULTILINE
)


def choose(path: str | os.PathLike[str], environment: Mapping[str, str]) -> str:
    """Return the directory or URL: the argument, or a variable, or the default of the user."""
    if not isinstance(path, str | bytes | os.PathLike):
        raise ArgumentTypeError(f"path={path!r} is no directory; None turns the cache off.")
    variables = ("JAX_DIST_CACHE_DIR", "JAX_COMPILATION_CACHE_DIR")
    choices = [os.fsdecode(path), *(environment.get(name, "") for name in variables)]
    chosen = next(filter(None, choices), "")
    if chosen:
        return os.path.expanduser(chosen.removeprefix("file://"))
    caches = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(caches, "jax_dist")


def is_url(path: str) -> bool:
    return "://" in path


def url_problem(url: str) -> str | None:
    """Return why JAX cannot use a URL, if so."""
    try:
        from etils import epath
    except ImportError:
        return f"{url} needs etils[epath]"
    if not re.fullmatch(r"\w+://[^/].*", url):
        return f"{url} names no bucket or host, as gs://bucket/cache does"
    try:
        epath.Path(url)
    except (KeyError, ImportError) as error:
        return f"{url}: etils knows no such place ({error})"
    return None


def add_machine(path: str) -> str:
    """Append the part of this machine, such as `x86_64-3f9a1c2b-jaxlib-0.10.2`.

    Machine code of one CPU may be illegal on another, and jaxlib reads only what it wrote.
    """
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        facts = platform.processor()
    else:
        first_core = text.split("\n\n", maxsplit=1)[0]
        facts = "\n".join(f"{name}={value}" for name, value in _CPU_FACTS.findall(first_core))
    cpu = hashlib.sha256(facts.encode()).hexdigest()[:8]
    part = f"{platform.machine()}-{cpu}-jaxlib-{metadata.version('jaxlib')}"
    return f"{path.rstrip('/')}/{part}"


def make(directory: pathlib.Path) -> None:
    """Create a directory and its missing parents, for this user alone."""
    for path in reversed((directory, *directory.parents)):
        if not path.exists():
            path.mkdir(mode=0o700, exist_ok=True)  # another process may have been faster


def untrusted_reason(directory: pathlib.Path) -> str | None:
    """Return why any user of the machine can put files into a directory, or None.

    Its owner and its group are trusted.

    Where everybody may create entries (`/tmp`), the owner of an entry decides what is below it.
    """
    if os.name == "nt":  # has no such modes; directories of a user are the user's own there
        return None
    if directory.stat().st_mode & stat.S_IWOTH:
        return f"every user can write to {directory}"
    for path in (directory, directory.resolve()):  # a link on the way is an entry too
        for entry, parent in itertools.pairwise((path, *path.parents)):
            mode = parent.stat().st_mode
            if not mode & stat.S_IWOTH:
                continue
            if not mode & stat.S_ISVTX:
                return f"every user can replace {entry}, since every user can write to {parent}"
            owner = entry.lstat().st_uid
            if owner not in (0, os.geteuid()):
                return f"{entry} belongs to user {owner}, and every user can write to {parent}"
    return None
