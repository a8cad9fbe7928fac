"""Run as a file of its own: enters a view of the disk that is nobody else's, and becomes a command.

The first argument holds a JSON object, the others are the command:
  parent: the process that this one must not outlive.
  folder: where the command starts.
  view: `null`, or how all file systems are seen copy-on-write: `root`, an empty folder that they
    are mounted in; `uppers`, by folder, two empty folders on a disk that get what is written below
    it, while the memory gets all else; and `shared`, the folders that stay what they are.
  writable: where there is no view, the folders that may be written to, as far as Linux can see to
    that (Landlock).

Exits with 71 where the system does not allow the view.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping

_REFUSED = 71
_NEW_USERS, _NEW_MOUNTS = 0x10000000, 0x00020000
_READ_ONLY, _DETACH, _BIND, _RECURSIVE, _PRIVATE = 0x1, 0x2, 0x1000, 0x4000, 0x40000
_SIGNAL_ON_PARENTS_DEATH, _NO_NEW_PRIVILEGES = 1, 38
_PIVOT_ROOT, _MOUNT_SETATTR = {"x86_64": 155, "aarch64": 41}, 442
# Where nothing is a file: what they hold is the kernel's.
_OF_THE_KERNEL = ("/proc", "/sys", "/dev")
_SHARED_MEMORY = "/dev/shm"


def _call(name: str, *arguments: object) -> int:
    found = getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments)
    if found < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return found


# --- a view of all file systems


def _enter(root: str, uppers: Mapping[str, list[str]], shared: Iterable[str]) -> None:
    """Everything is at its path, and what is written lies elsewhere."""
    user, group = os.getuid(), os.getgid()
    _call("unshare", _NEW_USERS | _NEW_MOUNTS)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    _call("mount", None, b"/", None, _RECURSIVE | _PRIVATE, None)
    os.chdir(root)
    os.mkdir("memory")
    os.mkdir("root")
    view = _View({*mount_points()})
    own = {point: list(map(_opened, (point, *folders))) for point, folders in uppers.items()}
    kept = {point: _opened(point) for point in shared}
    for name, options in ((b"memory", None), (b"root", b"size=16m")):  # no file lies in the second
        _call("mount", b"memory", name, b"tmpfs", 0, options)
    os.chmod("root", 0o755)
    view.fill("/", "root")
    for point, (below, above, work) in own.items():
        _overlay(below, above, work, f"root{point}")
    for point, below in kept.items():
        _bind(below, f"root{point}")
    os.chdir("root")
    _call("syscall", _PIVOT_ROOT[os.uname().machine], b".", b".")
    _call("umount2", b".", _DETACH)


class _View:
    """Folders over which a mount may be laid, and the others, by what they hold.

    No overlay may have a folder below it in which another user has mounted something.

    Args:
      points: where something is mounted.
    """

    def __init__(self, points: set[str]):
        self._made = 0
        self._with_mounts = {
            point[:end] or "/"
            for point in points
            for end in (i for i, letter in enumerate(point) if letter == "/")
        }

    def fill(self, folder: str, target: str) -> None:
        """Shows what a folder holds in an empty one."""
        with contextlib.suppress(PermissionError), os.scandir(folder) as entries:
            for entry in entries:
                self._show(entry, f"{target}/{entry.name}")

    def _show(self, entry: os.DirEntry[str], target: str) -> None:
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), target)
        elif not entry.is_dir():
            open(target, "x").close()
            _bind(entry.path, target, read_only=True)
        else:
            os.mkdir(target)
            if entry.path in _OF_THE_KERNEL:
                _bind(entry.path, target)
                if entry.path == "/dev" and os.path.isdir(_SHARED_MEMORY):
                    self._lay_over(_SHARED_MEMORY, f"{target}/shm")
            elif entry.path in self._with_mounts:
                self.fill(entry.path, target)
                os.chmod(target, entry.stat().st_mode & 0o7777)
            else:
                self._lay_over(entry.path, target)

    def _lay_over(self, folder: str, target: str) -> None:
        """What is written to it lies in memory; where that cannot be, nothing is written."""
        self._made += 1
        above, work = f"memory/{self._made}", f"memory/work-{self._made}"
        os.mkdir(above)
        os.mkdir(work)
        try:
            _overlay(_opened(folder), above, work, target)
        except OSError:
            _bind(folder, target, read_only=True)


def mount_points(listed: str = "/proc/self/mountinfo") -> Iterator[str]:
    """The folders and files over which something is mounted."""
    with open(listed, "rb") as file:
        for line in file:
            point = line.split()[4].decode("unicode_escape").encode("latin-1")
            yield os.fsdecode(point)


def _opened(path: str) -> str:
    """A name of it that has no special character, and that nothing covers."""
    return f"/proc/self/fd/{os.open(path, os.O_PATH)}"


def _overlay(below: str, above: str, work: str, target: str) -> None:
    options = f"lowerdir={below},upperdir={above},workdir={work},userxattr"
    _call("mount", b"overlay", os.fsencode(target), b"overlay", 0, os.fsencode(options))


def _bind(source: str, target: str, *, read_only: bool = False) -> None:
    path = os.fsencode(target)
    _call("mount", os.fsencode(source), path, None, _BIND | _RECURSIVE, None)
    if read_only:
        wanted = (ctypes.c_uint64 * 4)(_READ_ONLY)
        _call("syscall", _MOUNT_SETATTR, -100, path, 0x8000, wanted, ctypes.sizeof(wanted))


# --- where there is none


# What they forbid, by the number of the kernel's interface: to write, remove and make; then to
# move from folder to folder; then to truncate.
_FORBIDDEN = ((1, 0x1FF2), (2, 1 << 13), (3, 1 << 14))
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF, _BENEATH = 444, 445, 446, 1


class _Rule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


def _write_only_to(folders: Iterable[str]) -> None:
    """Has the kernel refuse to write, remove or make a file elsewhere.

    Raises:
      OSError: it cannot: Linux does so from 5.13 on, where Landlock is switched on.
    """
    interface = _call("syscall", _CREATE_RULESET, None, 0, 1)
    forbidden = sum(rights for since, rights in _FORBIDDEN if since <= interface)
    rights = ctypes.c_uint64(forbidden)
    rules = _call("syscall", _CREATE_RULESET, ctypes.byref(rights), ctypes.sizeof(rights), 0)
    for folder in folders:
        rule = _Rule(forbidden, os.open(folder, os.O_PATH))
        _call("syscall", _ADD_RULE, rules, _BENEATH, ctypes.byref(rule), 0)
    _call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _call("syscall", _RESTRICT_SELF, rules, 0)


def _main() -> None:
    wanted = json.loads(sys.argv[1])
    try:
        if wanted["view"]:
            _enter(**wanted["view"])
        elif wanted["writable"]:
            _write_only_to(wanted["writable"])
    except (OSError, AttributeError, KeyError) as error:  # or another system
        sys.stderr.write(f"{error}\n")
        sys.exit(_REFUSED)
    os.chdir(wanted["folder"])
    if sys.platform == "linux":
        _call("prctl", _SIGNAL_ON_PARENTS_DEATH, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != wanted["parent"]:  # it died before it could be told
        os.kill(os.getpid(), signal.SIGKILL)
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    _main()
