"""Which machine a process runs on, and whether another one on the same machine is stopped."""

import contextlib
import functools
import os
import pathlib
import platform

_STOPPED = ("T", "t")  # by a signal, and by a debugger


@functools.cache
def name() -> str:
    """The same for all processes that see one another's process ids, and for no others."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux; or not permitted
        return platform.node()


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine was stopped, as by SIGSTOP or a debugger. Linux tells."""
    try:
        status = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] in _STOPPED


def is_group_stopped(group: int) -> bool:
    """The same for a process group: whether a process in it is."""
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] in _STOPPED:
                return True
    return False
