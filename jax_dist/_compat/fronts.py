"""Calls that JAX dispatches in C++, with a fallback to Python that is given the arguments.

A jit object asks Python about a signature that it does not know, but Python then sees tracers, not
the arguments: where they lie, and whether they should be moved first, cannot be told any more. To
look at the arguments before each call instead costs 6 to 10 % of a call of one argument; a class
with `__call__` and `try` costs 8 to 10 %. A front costs 1 to 2 %.

The private parts, all seen in 0.10.2 and 0.12.0.1: `pjit` of `jaxlib._jax`, the class of all
jit objects; `_cache_miss` of a jit object, which runs a call and returns what such an object has to
remember; `dispatch_registry` of `jax._src.tree_util`; `cc_shard_arg` of
`jax._src.interpreters.pxla`. Where one of them is missing, every call goes
through Python: the same results, some 100 us later.

A jit object also tells what it was given as options.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

from jax_dist._compat import private
from jax_dist._compat.private import config_value

Answer: TypeAlias = tuple[Any, Any, bool]  # results, what C++ has to remember, whether it is stale
_Miss: TypeAlias = Callable[..., Answer]


def front(
    name: str,
    miss: _Miss,
    *,
    fun: Callable,
    without_jit: Callable,
    static_argnums: Sequence[int] = (),
    static_argnames: Sequence[str] = (),
) -> Callable[..., Any]:
    """A callable that remembers how to run signatures, and asks `miss` about the others.

    Args:
      name: in profiles.
      miss: makes a call. What it returns besides the results comes from `run_jit`; None instead of
        it means that this signature has to be asked about again.
      fun: what the jit objects behind trace; `jax.debug_nans` runs it once more, without jit.
      without_jit: makes a call under `jax.disable_jit`.
      static_argnums: positions of arguments whose value is part of the signature.
      static_argnames: the same by keyword.
    """
    if not _can_remember():

        def asking_always(*args: Any, **kwargs: Any) -> Any:
            if config_value("jax_disable_jit"):
                return without_jit(*args, **kwargs)
            return miss(*args, **kwargs)[0]

        return asking_always
    made: Any = _new_front(name, miss, without_jit, tuple(static_argnums), tuple(static_argnames))
    made._fun = fun
    return made


def run_jit(jitted: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Answer:
    """Calls a jit object, for a front to remember the call."""
    if _can_remember():
        return jitted._cache_miss(*args, **kwargs)
    return jitted(*args, **kwargs), None, False


@functools.cache
def _can_remember() -> bool:
    """Whether this jax has what fronts need. Starts no backend."""
    try:
        trial = _new_front("trial", _no_answer, _no_answer, (), ())
        return hasattr(jax.jit(_no_answer), "_cache_miss") and trial(1) == "asked"
    except (NotImplementedError, TypeError):
        return False


def _no_answer(*_: Any) -> Answer:
    return "asked", None, False


def _new_front(
    name: str,
    miss: _Miss,
    without_jit: Callable,
    static_argnums: tuple[int, ...],
    static_argnames: tuple[str, ...],
) -> Callable[..., Any]:
    use = "have JAX remember calls"
    pjit = private.part("jaxlib._jax", "pjit", use=use)
    registry = private.part("jax._src.tree_util", "dispatch_registry", use=use)
    pxla = "jax._src.interpreters.pxla"
    shard_arg = private.part(pxla, "cc_shard_arg", use=use)
    shared_key = object()  # of a cache that is shared by what has the same one: nothing has
    return pjit(
        name, without_jit, miss, static_argnums, static_argnames, shared_key, registry, shard_arg
    )


@dataclasses.dataclass(frozen=True, slots=True)
class JitOptions:
    """What was said to `jax.jit`, as far as a jit around it has to repeat it."""

    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    donate_argnums: tuple[int, ...] = ()
    donate_argnames: tuple[str, ...] = ()
    keep_unused: bool = False
    compiler_options: dict[str, Any] | None = None

    @classmethod
    def of(cls, fun: Any) -> "JitOptions":
        """The options of a jit object; the defaults for any other callable.

        A jit object tells what it donates (`trace(...).args_info`), but not which arguments are
        static. `_jit_info`: seen in 0.10.2 and 0.12.0.1. Where a jit object has it not,
        there is no default: taking a static argument for an array would fail far from here.
        """
        if not _is_jit(fun):
            return cls()
        info = fun._jit_info
        return cls(
            static_argnums=tuple(info.static_argnums),
            static_argnames=tuple(info.static_argnames),
            donate_argnums=tuple(info.donate_argnums),
            donate_argnames=tuple(info.donate_argnames),
            keep_unused=bool(info.keep_unused),
            compiler_options=dict(info.compiler_options_kvs) or None,
        )


def inside_jit(fun: Any) -> Callable:
    """The function in a jit object, which may remember a trace; `fun` where that says shardings."""
    if not _is_jit(fun):
        return fun
    info: Any = fun._jit_info
    shardings = (*info.in_shardings_leaves, *info.out_shardings_leaves)
    said = any(isinstance(sharding, jax.sharding.Sharding) for sharding in shardings)
    return fun if said else fun.__wrapped__


def _is_jit(fun: Any) -> bool:
    return hasattr(fun, "lower") and hasattr(fun, "clear_cache")


def jit_like(fun: Any) -> Any:
    """`fun` if it is a jit object, else `jax.jit(fun)`."""
    return fun if hasattr(fun, "clear_cache") and hasattr(fun, "trace") else jax.jit(fun)
