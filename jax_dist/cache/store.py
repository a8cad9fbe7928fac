"""A folder of compiled programs that no crash, full disk or second writer can spoil.

It stands in for JAX's own store, with the same two methods and the same files. A file appears with
its final name only when it is whole. What was read and then had to be compiled all the same was
damaged, and is replaced. Nothing here raises: a program does not end because its cache is ill.
"""

import contextlib
import hashlib
import logging
import os
import pathlib
import platform
import re
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from importlib import metadata

from jax_dist import _notes
from jax_dist.cache import entries
from jax_dist.errors import CacheDirectoryError, message

_log = logging.getLogger("jax_dist.cache")


class Store:
    """The entries of one folder.

    Args:
      folder: where they are.
      max_size: the bytes that they may take together; those not used for longest go. None: all.
      said: told after each `put` why nothing was written; None: it was, or is there already.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        *,
        max_size: int | None = None,
        said: Callable[[str | None], None] = lambda reason: None,
    ) -> None:
        self.path = self._path = folder  # JAX reads the second for its log
        self._max_size = max_size
        self._said = said
        self._unusable: set[str] = set()  # keys whose entry was read, but not loaded
        self._lock = threading.Lock()
        self._warned: set[str] = set()

    def get(self, key: str) -> bytes | None:
        """The entry of a key; None where there is none, or where another one lies in its place."""
        path = self._entry(key)
        try:
            data = _notes.content(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            self.unusable(key)
            self._warn(f"cannot read {path}: {error.strerror}")
            return None
        found = entries.opened(data)
        fault = found.fault(key)
        if fault is not None:
            _log.warning("%s: it is %s, so its program is compiled again", path, fault)
        if fault is not None or not found.content:  # empty: a writer died, or its disk was full
            self.unusable(key)
            return None
        _touch(path)
        return found.content

    def unusable(self, key: str) -> None:
        """Says that the entry cannot be loaded, so that the next `put` replaces it."""
        with self._lock:
            self._unusable.add(key)

    def put(self, key: str, value: bytes) -> None:
        """Writes an entry, unless a good one is there."""
        path = self._entry(key)
        with self._lock:
            replaces = key in self._unusable
            self._unusable.discard(key)
        if not replaces and _is_whole(path):
            self._said(None)
            return
        value = entries.sealed(key, value)
        if self._max_size is not None and len(value) > self._max_size:
            self._said(f"it is larger than the whole cache may be ({self._max_size} bytes)")
            return
        try:
            if self._max_size is not None:
                self._make_room(self._max_size - len(value))
            with contextlib.suppress(OSError):  # a folder there is no entry; one with files stays
                path.rmdir()
            replace(path, value)
        except OSError as error:
            self._warn(f"cannot write into {self.path}: {error.strerror}")
            self._said(f"it could not be written: {error.strerror}")
            return
        if replaces:
            _log.info("%s: the damaged entry is replaced", path.name)
        self._said(None)

    def _make_room(self, size: int) -> None:
        """Removes what was not used for longest, until the rest takes no more than `size` bytes."""
        found = sorted(entries.of_folder(self.path), key=lambda entry: (entry.used, entry.key))
        total = sum(entry.size for entry in found)
        for entry in found:
            if total <= size:
                break
            total -= entry.remove()

    def _entry(self, key: str) -> pathlib.Path:
        return self.path / f"{key}{entries.ENTRY}"

    def _warn(self, text: str) -> None:
        """Once for each trouble: a full disk would otherwise be told for every program."""
        if text not in self._warned:
            self._warned.add(text)
            _log.warning("%s; the program goes on", text)


def _touch(path: pathlib.Path) -> None:
    """Says that an entry was used just now."""
    try:
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
    except OSError:  # read-only, or gone: then it is not ours to say
        return


def _is_whole(path: pathlib.Path) -> bool:
    """Whether an entry is there. One that another process wrote just now, is whole."""
    try:
        status = path.stat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size > 0


def replace(path: pathlib.Path, data: bytes) -> None:
    """Puts a file there as a whole, or not at all."""
    # `mkstemp` draws the name at random, and lets only its owner read; nothing of it stays.
    descriptor, temporary = tempfile.mkstemp(
        dir=path.parent, prefix=f".{os.getpid()}-", suffix=entries.UNFINISHED
    )
    try:
        os.chmod(temporary, 0o600 | path.parent.stat().st_mode & 0o060)  # a group may share it
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:  # also where the user interrupts it
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


# --- where a cache lies, and whether what lies there can be trusted: a program in it is code


_CPU_FACTS = re.compile(
    r"^(vendor_id|cpu family|model|model name|flags|Features|CPU \w+)\s*:\s*(.*)$", re.MULTILINE
)


def chosen(argument: str | os.PathLike[str] | None, environment: Mapping[str, str]) -> str:
    """The folder or URL that is asked for: argument, our variable, JAX's variable, default."""
    asked = os.fspath(argument) if argument is not None else ""
    for variable in ("JAX_DIST_CACHE_DIR", "JAX_COMPILATION_CACHE_DIR"):
        asked = asked or environment.get(variable, "")
    asked = os.path.expanduser(asked.removeprefix("file://"))
    if asked:
        return asked
    home = os.path.expanduser("~")
    if sys.platform == "darwin":
        caches = os.path.join(home, "Library", "Caches")
    else:
        caches = environment.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    return os.path.join(caches, "jax_dist")


def is_url(path: str) -> bool:
    return "://" in path


def of_this_machine(path: str) -> str:
    """The part of a cache that machines may share, such as `x86_64-3f9a1c2b-jaxlib-0.10.2`.

    Machine code of one CPU may be illegal on another, and jaxlib reads only what it wrote.
    """
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        can = platform.processor()
    else:
        core = text.split("\n\n", maxsplit=1)[0]  # one, since all are alike
        can = "\n".join(f"{name}={value}" for name, value in _CPU_FACTS.findall(core))
    cpu = hashlib.sha256(can.encode()).hexdigest()[:8]
    part = f"{platform.machine()}-{cpu}-jaxlib-{metadata.version('jaxlib')}"
    return f"{path.rstrip('/')}/{part}"


def refuse_if_open(folder: pathlib.Path) -> None:
    """Checks a folder that is there.

    Raises:
      CacheDirectoryError: others than this user and a group of this user could put code into it.
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
            do=f"Name a folder of your own, or make this one yours alone: {remedy(folder)}",
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
    if _is_only_open_to_root(status):
        return "it is another user's, and root can read it only because permissions do not bind it"
    return None


def remedy(folder: pathlib.Path) -> str:
    """The command that lets a folder be trusted which `danger` speaks of."""
    change = "chown -R root" if _is_only_open_to_root(folder.stat()) else "chmod 700"
    return f"{change} {folder}"


def _is_only_open_to_root(status: os.stat_result) -> bool:
    """Whether root looks at the folder of somebody who does not share it with a group of root."""
    groups = {os.getegid(), *os.getgroups()}
    return os.geteuid() == 0 != status.st_uid and status.st_gid not in groups
