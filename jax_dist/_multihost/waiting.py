"""End of a job under `jax-dist launch` whose ranks wait for one that has finished.

A rank that comes to its end waits for the others there, and they may wait for it in a collective.
JAX lets them wait for `shutdown_timeout`, since a rank may also be saving its state meanwhile. On
Linux and with CPU devices, a rank that saves can be told from one that waits in vain: it uses the
CPU, has a thread that does, or its main thread waits for a file, a connection or a timer. Ranks
that do none of it tell the others after 0.75 s, and end after 1.25 s if no rank is left that works.
"""

import os
import pathlib
import sys
import threading
import time
import traceback

from jax_dist import _compat, launch

_PERIOD = 0.25  # seconds between two looks at the main thread
_IDLE_SECONDS = 0.01  # of CPU time in a period, below which the process computes nothing
_PERIODS_TO_NOTE, _PERIODS_TO_END = 3, 5  # without progress: it tells the others, and it ends
_MAIN = threading.main_thread()
_STDLIB = os.path.dirname(threading.__file__)
_PYTHON_LOCKS = (_STDLIB, os.path.join(_STDLIB, "multiprocessing"))
_OURS = "jax_dist "  # start of the names of our own threads


def watch(rank: int, ranks: int) -> None:
    """Start a thread that ends this rank, of a job of CPU devices, when it waits in vain."""
    if os.environ.get(launch.NOTES) and _compat.config_value("jax_platforms") == "cpu":
        threading.Thread(None, _watch, f"{_OURS}waiting", (rank, ranks), daemon=True).start()


def _watch(rank: int, ranks: int) -> None:
    """Look at the main thread every 0.25 s, and count the looks at which it waits as at the last.

    At the third in a row, a note "waiting" of this rank tells the other ranks; it is withdrawn when
    the thread goes on. From the fifth on, the rank ends if all ranks wait or have finished.
    """
    last_position, last_seconds, idle_periods = None, 0.0, 0
    while True:
        time.sleep(_PERIOD)
        position, seconds = _find_wait(), time.process_time()
        is_same_wait = position is not None and position == last_position
        is_idle = is_same_wait and seconds - last_seconds < _IDLE_SECONDS
        last_position, last_seconds = position, seconds
        if not is_idle and idle_periods >= _PERIODS_TO_NOTE:
            launch.note("waiting", rank, holds=False)
        idle_periods = idle_periods + 1 if is_idle else 0
        if idle_periods == _PERIODS_TO_NOTE:
            launch.note("waiting", rank, holds=True)
        if idle_periods >= _PERIODS_TO_END:
            _end_if_all_wait(rank, ranks)


def _find_wait() -> tuple[int, int] | None:
    """Return the call and instruction at which the main thread waits for a native thread.

    None if it does not, if it may wait for a thread or process of Python, or if that is not known.
    """
    others = (thread for thread in threading.enumerate() if thread is not _MAIN)
    if any(not thread.name.startswith(_OURS) for thread in others):
        return None  # it may wait for that thread, which may wait for a file or a connection
    try:
        reason = pathlib.Path(f"/proc/self/task/{_MAIN.native_id}/wchan").read_text()
    except OSError:
        return None
    frame = sys._current_frames()[_MAIN.ident or 0]
    waits_in_python = os.path.dirname(frame.f_code.co_filename) in _PYTHON_LOCKS
    is_native = reason.startswith("futex") and not waits_in_python
    return (id(frame), frame.f_lasti) if is_native else None


def _end_if_all_wait(rank: int, ranks: int) -> None:
    """End this rank and print where it waits, if every rank waits, for ones that have finished."""
    finished, waiting = launch.find_ranks("finished"), launch.find_ranks("waiting")
    if not finished or rank in finished or len({*finished, *waiting}) < ranks:
        return
    launch.note("failed", rank)
    stack = "".join(traceback.format_stack(sys._current_frames()[_MAIN.ident or 0]))
    others = ", ".join(map(str, finished))
    text = f"rank {rank} waits in vain: the program of rank {others} has ended. It waits here:\n"
    os.write(2, f"{text}{stack}".encode(errors="replace"))
    os._exit(1)
