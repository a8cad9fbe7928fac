"""The directory of the compilation cache, and whether it is safe to load code from."""

import errno
import hashlib
import itertools
import os
import pathlib
import platform
import re
import stat
from collections.abc import Mapping
from importlib import metadata

from jax_dist.errors import ArgumentError, ArgumentTypeError

_CPU_FACTS = re.compile(
    r"^(vendor_id|cpu family|model|model name|flags|Features|CPU \w+)\s*:\s*(.*)$", re.MULTILINE
)


def choose(path: str | os.PathLike[str], environment: Mapping[str, str]) -> str:
    """Return the directory or URL: `path`, or else that of a variable, or else of the user."""
    if not isinstance(path, str | bytes | os.PathLike):
        raise ArgumentTypeError(f"path={path!r} is no directory; None turns the cache off.")
    variables = ("JAX_DIST_CACHE_DIR", "JAX_COMPILATION_CACHE_DIR")
    for choice in (os.fsdecode(path), *map(environment.get, variables)):
        if choice:
            return os.path.expanduser(choice.removeprefix("file://"))
    caches = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(caches, "jax_dist")


def is_url(path: str) -> bool:
    """Return whether a path is a URL, such as `gs://bucket/cache`."""
    return "://" in path


def add_machine(path: str) -> str:
    """Append a directory for this CPU and jaxlib, such as `x86_64-3f9a1c2b-jaxlib-0.10.2`.

    Another CPU may not have the instructions of a program, and another jaxlib cannot read it. What
    else a program depends on, as the GPU, is part of JAX's key.
    """
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        facts = platform.processor()
    else:
        first_core = text.split("\n\n", maxsplit=1)[0]
        facts = "\n".join(f"{name}={value}" for name, value in _CPU_FACTS.findall(first_core))
    cpu = hashlib.sha256(facts.encode()).hexdigest()[:8]
    name = f"{platform.machine()}-{cpu}-jaxlib-{metadata.version('jaxlib')}"
    return f"{path.rstrip('/')}/{name}"


def prepare(path: str) -> None:
    """Create a directory and its missing parents, for this user alone; only check a URL.

    Raises:
      OSError: it cannot be created, or JAX cannot use the URL.
      ArgumentError: other users can put files into it.
    """
    if is_url(path):
        try:
            from etils import epath

            epath.Path(path).exists()
        except Exception as error:  # whatever its file system raises, if there is one
            reason = f"needs etils[epath] and its file system ({error})"
            raise OSError(errno.EINVAL, reason, path) from error
        return
    directory = pathlib.Path(path)
    for folder in reversed((directory, *directory.parents)):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)  # another process may have been faster
    reason = _untrusted_reason(directory)
    if reason is not None:
        raise ArgumentError(
            f"The cache directory {directory} is not safe to load code from: {reason}. Give "
            "another directory, or take that permission away (chmod o-w)."
        )


def _untrusted_reason(directory: pathlib.Path) -> str | None:
    """Return why any user of the machine can put files into a directory, or None.

    That takes the right to write to the directory, or to replace it or a directory above it. In a
    sticky directory (`/tmp`), only the owner of an entry can replace it. Its group is trusted.
    """
    if os.name == "nt":  # has no such modes; directories of a user are the user's own there
        return None
    if directory.stat().st_mode & stat.S_IWOTH:
        return f"every user can write to {directory}"
    for path in (directory, directory.resolve()):  # a symbolic link can be replaced, too
        for entry, parent in itertools.pairwise((path, *path.parents)):
            mode = parent.stat().st_mode
            is_public, is_sticky = mode & stat.S_IWOTH, mode & stat.S_ISVTX
            if not is_public:
                continue
            if not is_sticky:
                return f"every user can replace {entry}, since every user can write to {parent}"
            owner = entry.lstat().st_uid
            if owner not in (0, os.geteuid()):
                return f"{entry} belongs to user {owner}, and every user can write to {parent}"
    return None
