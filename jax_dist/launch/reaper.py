"""Run by `ranks.py`, as a file of its own: ends what a launcher that died has left behind.

On standard input, the launcher names the process groups that it has started, `+123`, and those that
are gone, `-123`. When it dies, the input ends.
"""

import contextlib
import os
import signal
import sys


def _main() -> None:
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends with the launcher, and not before
    groups: dict[int, None] = {}
    for line in sys.stdin:
        if line.startswith("+"):
            groups[int(line)] = None
        else:
            groups.pop(-int(line), None)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # gone
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    _main()
