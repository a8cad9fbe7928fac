"""What chex puts in the place of `jax.pmap` while a program is debugged or tested."""

import functools
from collections.abc import Callable
from typing import Any

import jax


def stand_in() -> Callable | None:
    """`jax.pmap` as `chex.fake_pmap` has replaced it for now; None where it is jax's own.

    Who asks for a pmap that maps nothing, to step through a program, means ours too.
    """
    replaced: Any = jax.pmap
    while isinstance(replaced, functools.partial):
        replaced = replaced.func
    home = getattr(replaced, "__globals__", {}).get("__name__", "")
    return jax.pmap if home.partition(".")[0] == "chex" else None
