"""What the persistent cache did: hits, true misses, what was written, what never is and why."""

import contextlib
import types
from typing import Any, Self

from jax_dist import _compat
from jax_dist.cache.tallies import Counts, Tally, together
from jax_dist.cache.watching import watcher


class Stats:
    """Counts of the persistent cache, which grow while programs are compiled.

    A context manager counts what happens inside of it, in all threads. Printed, it is a table.
    """

    def __init__(self) -> None:
        self._tally = watcher.total
        self._inside = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._tally = Tally()
        self._inside.enter_context(watcher.counting(self._tally))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        self._inside.close()

    @property
    def functions(self) -> dict[str, Counts]:
        """The counts of each function, by the name of its program, such as `jit_step`."""
        return self._tally.functions()

    @property
    def total(self) -> Counts:
        """The counts of all functions together."""
        return together(self.functions)

    @property
    def requests(self) -> int:
        """How often a program was looked up."""
        return self.total.requests

    @property
    def hits(self) -> int:
        """How often it was there."""
        return self.total.hits

    @property
    def misses(self) -> int:
        """How often it was not: requests minus hits.

        The event `cache_misses` of JAX is different: it counts writes of entries.
        """
        return self.total.misses

    @property
    def written(self) -> int:
        """How many of the misses are in the cache now."""
        return self.total.written

    @property
    def unwritten(self) -> dict[str, int]:
        """Why others of the misses are not, and how many."""
        return dict(self.total.unwritten)

    @property
    def seconds_saved(self) -> float:
        """What loading took less than compiling had taken, which JAX notes in whole seconds."""
        return self.total.seconds_saved

    def to_dict(self) -> dict[str, Any]:
        functions = {name: counts.to_dict() for name, counts in self.functions.items()}
        return {"total": self.total.to_dict(), "functions": functions}

    def __str__(self) -> str:
        functions = self.functions
        rows = [_HEAD, *(_row(name, counts) for name, counts in functions.items())]
        if len(functions) != 1:
            rows.append(_row("all", together(functions)))
        notes = [
            f"{name}, {times} {'time' if times == 1 else 'times'} not written: {reason}"
            for name, counts in functions.items()
            for reason, times in counts.unwritten.items()
        ]
        return "\n".join([*_aligned(rows), *notes])


def stats() -> Stats:
    """Counts hits and misses of the persistent cache, in a block or in the process.

    Returns:
      With `with`, the counts of the block. Otherwise those of the process since counting began:
      with `enable`, or with the first call of this function.

    >>> import jax
    >>> def step():
    ...     return 4
    >>> with stats() as seen:
    ...     four = jax.jit(step)()
    >>> print(seen)
    function  requests  hits  misses  written  saved
    jit_step         1     0       1        0  0.0 s
    jit_step, 1 time not written: there is no cache directory
    """
    _compat.watch_cache(watcher)
    return Stats()


_HEAD = ("function", "requests", "hits", "misses", "written", "saved")


def _row(name: str, counts: Counts) -> tuple[str, ...]:
    numbers = (counts.requests, counts.hits, counts.misses, counts.written)
    return (name, *(str(number) for number in numbers), f"{counts.seconds_saved:.1f} s")


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Columns side by side: words to the left, numbers to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
