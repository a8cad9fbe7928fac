"""Reports of `jax_dist.explain` for the mapped functions of a program, at their first calls."""

import functools
import os
import sys
from typing import Any


def report_first_call(mapped: Any, fun: Any, path: str) -> Any:
    """Return a mapped function that appends a report to a file when it is first called.

    Args:
      mapped: what `jax_dist.pmap(fun)` returned, in a function that the program calls.
      fun: the function that it maps.
      path: of the file; reports end with a zero byte.
    """
    frame = sys._getframe(2)
    place = f"{os.path.relpath(frame.f_code.co_filename)}:{frame.f_lineno}"
    is_reported = False

    @functools.wraps(fun, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        import jax
        import jax.core

        import jax_dist

        nonlocal is_reported
        is_tracer = lambda leaf: isinstance(leaf, jax.core.Tracer)
        if not is_reported and not any(map(is_tracer, jax.tree.leaves((args, kwargs)))):
            is_reported = True
            try:
                report = str(jax_dist.explain(mapped, *args, **kwargs))
            except Exception as error:  # noqa: BLE001 - the program goes on
                report = f"{type(error).__name__}: {error}"
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{place} {report}\0")
        return mapped(*args, **kwargs)

    return call
