"""Files in several processes, where that pays."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
_CHUNKS_PER_JOB = 8  # so that a chunk of large files does not keep one process busy alone


def jobs_for(count: int, enough: int, asked: int | None) -> int:
    """How many processes to use.

    Args:
      count: of the files.
      enough: from how many files on it pays to start processes.
      asked: by the user; None: as many as pay.

    >>> jobs_for(3, 100, None), jobs_for(3, 100, 8)
    (1, 3)
    """
    if asked is None:
        asked = (os.cpu_count() or 1) if count > enough else 1
    return max(1, min(asked, count))


def in_chunks(
    work: Callable[[Sequence[Item]], Result],
    items: Sequence[Item],
    jobs: int,
    start: Callable[..., None],
    *arguments: Any,
) -> Iterator[Result]:
    """What `work` gives for some items at a time, in their order.

    Args:
      work: is called in one of the processes; a function of a module.
      items: all of them: paths, perhaps with what is known of them.
      jobs: how many processes, two or more.
      start: is called first in each process.
      *arguments: of `start`.
    """
    import multiprocessing
    from concurrent import futures  # only here: it is slow to load

    size = max(1, len(items) // (jobs * _CHUNKS_PER_JOB))
    chunks = [items[begin : begin + size] for begin in range(0, len(items), size)]
    # Not by fork, which a caller with threads, such as one that uses JAX, does not survive.
    context = multiprocessing.get_context("spawn")
    with futures.ProcessPoolExecutor(jobs, context, initializer=start, initargs=arguments) as pool:
        try:
            yield from pool.map(work, chunks)
        except BaseException:  # a key was pressed, or a rule is broken: the rest is not wanted
            pool.shutdown(wait=False, cancel_futures=True)
            raise
