"""What a jit object was told, and what it remembers."""

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import jax

from jax_dist._compat import private


@dataclasses.dataclass(frozen=True, slots=True)
class JitOptions:
    """What was said to `jax.jit`, as far as a jit around it has to repeat it."""

    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    donate_argnums: tuple[int, ...] = ()
    donate_argnames: tuple[str, ...] = ()
    keep_unused: bool = False
    compiler_options: dict[str, Any] | None = None


def jit_options(fun: Any) -> JitOptions:
    """The options of a jit object; the defaults for any other callable.

    A jit object tells what it donates (`trace(...).args_info`), but not which arguments are static.
    `_jit_info`: seen in 0.7.2, 0.10.2 and 0.12.0.1. Where a jit object has it not, there is no
    default: taking a static argument for an array would fail far from here.
    """
    if not (hasattr(fun, "lower") and hasattr(fun, "clear_cache")):
        return JitOptions()
    info = fun._jit_info
    return JitOptions(
        static_argnums=tuple(info.static_argnums),
        static_argnames=tuple(info.static_argnames),
        donate_argnums=tuple(info.donate_argnums),
        donate_argnames=tuple(info.donate_argnames),
        keep_unused=bool(info.keep_unused),
        compiler_options=dict(info.compiler_options_kvs) or None,
    )


def inside_jit(fun: Any) -> Callable:
    """The function in a jit object, which may remember a trace; `fun` where that says shardings."""
    if not (hasattr(fun, "lower") and hasattr(fun, "clear_cache")):
        return fun
    info: Any = fun._jit_info
    shardings = (*info.in_shardings_leaves, *info.out_shardings_leaves)
    said = any(isinstance(sharding, jax.sharding.Sharding) for sharding in shardings)
    return fun if said else fun.__wrapped__


def jit_like(fun: Any) -> Any:
    """`fun` if it is a jit object, else `jax.jit(fun)`."""
    return fun if hasattr(fun, "clear_cache") and hasattr(fun, "trace") else jax.jit(fun)


def traced_types(fun: Callable) -> list[dict[str, Any]]:
    """For which types of arguments JAX has traced `fun`: path to type, one dict a trace.

    The keys of `partial_eval.trace_to_jaxpr` in 0.10.2 and 0.12.0.1, those of `_create_pjit_jaxpr`
    in 0.7.2, which know no paths. Empty where a jax has neither.
    """
    cached = private.find("jax._src.interpreters.partial_eval", "trace_to_jaxpr")
    if cached is not None and hasattr(cached, "cache_keys"):
        keys = [key for key in cached.cache_keys() if key[0]() is fun]
        return [dict(zip(key[2][1].arg_names, key[2][0].vals, strict=False)) for key in keys]
    cached = private.find("jax._src.pjit", "_create_pjit_jaxpr")
    for cell in getattr(cached, "__closure__", None) or ():
        if isinstance(cell.cell_contents, weakref.WeakKeyDictionary):
            keys = cell.cell_contents.get(fun, {})
            return [{str(place): aval for place, aval in enumerate(key[3][0])} for key in keys]
    return []
