"""The jit objects of a mapped function."""

from collections.abc import Callable
from typing import Any

import jax

from jax_dist.mapping.attempts import Attempt
from jax_dist.mapping.calls import Options, bind
from jax_dist.mapping.region import run_mapped


def jit_of(options: Options, trace: Callable[[tuple, dict], Any]) -> Any:
    """The jit object over `trace(args, kwargs)`, under the name of the user's function."""

    def traced(*args: Any, **kwargs: Any) -> Any:
        return trace(args, kwargs)

    # No functools.wraps: jit would read the user's signature and donate by keyword too.
    traced.__name__ = traced.__qualname__ = options.choice.fun_name
    return jax.jit(traced, static_argnums=options.static, donate_argnums=options.donated)


def jit_alone(options: Options, fun: Callable[[], Callable], *, whole: bool) -> Any:
    """A jit object that looks at no arguments.

    Args:
      options: what was said to pmap.
      fun: gives the function.
      whole: whether the arguments hold the slices of all processes, or those of this one.
    """

    def trace(args: tuple, kwargs: dict) -> Any:
        call = bind(options, fun(), args, kwargs)
        with Attempt():
            return run_mapped(options, call, whole=whole)[0]

    return jit_of(options, trace)
