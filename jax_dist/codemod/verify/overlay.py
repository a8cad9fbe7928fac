"""Run as a file of its own: enters a copy-on-write view of the project, and becomes the command.

The first argument holds a JSON object, the others are the command:
  parent: the process that this one must not outlive.
  folder: where the command starts.
  overlays: `[below, above, work]` each: `below` is seen as before, and what is written to it lies
    in `above`, an empty folder beside `work` on one file system.

Exits with 71 where the system lets no user do that.
"""

import ctypes
import json
import os
import signal
import sys

_REFUSED = 71
_NEW_USERS, _NEW_MOUNTS = 0x10000000, 0x00020000
_RECURSIVE, _PRIVATE = 0x4000, 0x40000
_SIGNAL_ON_PARENTS_DEATH = 1


def _call(name: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _unshare() -> None:
    """A namespace of mounts of its own, in which this user may mount, and is the same user."""
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


def _overlay(below: str, above: str, work: str) -> None:
    options = f"lowerdir={below},upperdir={above},workdir={work}"
    arguments = (b"overlay", os.fsencode(below), b"overlay", 0)
    try:
        _call("mount", *arguments, os.fsencode(options + ",userxattr"))
    except OSError:  # before Linux 5.11
        _call("mount", *arguments, os.fsencode(options))


def _main() -> None:
    wanted = json.loads(sys.argv[1])
    try:
        if wanted["overlays"]:
            _unshare()
        for each in wanted["overlays"]:
            _overlay(*each)
    except (OSError, AttributeError) as error:  # or another system
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
