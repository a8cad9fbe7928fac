"""Reports of `jax_dist.explain` for the mapped functions of a program, at their first calls."""

import functools
import os
import sys
from typing import Any


def install(jax: Any, path: str) -> None:
    """Append a report to a file when a mapped function is first called.

    Args:
      jax: the module.
      path: of the file; reports end with a zero byte.
    """
    make = jax.pmap

    @functools.wraps(make)
    def pmap(fun: Any, *args: Any, **kwargs: Any) -> Any:
        mapped = make(fun, *args, **kwargs)
        frame = sys._getframe(1)
        place = f"{os.path.relpath(frame.f_code.co_filename)}:{frame.f_lineno}"
        is_reported = False

        @functools.wraps(fun, updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_reported
            leaves = jax.tree.leaves((args, kwargs))
            if not is_reported and not any(isinstance(x, jax.core.Tracer) for x in leaves):
                is_reported = True
                import jax_dist

                try:
                    report = str(jax_dist.explain(mapped, *args, **kwargs))
                except Exception as error:  # noqa: BLE001 - the program goes on
                    report = f"{type(error).__name__}: {error}"
                with open(path, "a", encoding="utf-8") as file:
                    file.write(f"{place} {report}\0")
            return mapped(*args, **kwargs)

        return call

    jax.pmap = pmap
