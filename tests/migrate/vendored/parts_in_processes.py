"""What runs with `mapped` of some parts, in processes of their own."""

import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import mapped_in_processes as in_processes
import numpy as np
from jax import lax

from jax_dist.migrate import helper_module

_ALL = helper_module.PARTS[:-1]


def made(parts: Collection[str]) -> Callable[..., Any]:
    """`mapped` with some parts."""
    return _made(frozenset(parts))


@functools.cache
def _made(parts: frozenset[str]) -> Callable[..., Any]:
    namespace: dict[str, Any] = {}
    exec(compile(helper_module.module({"mapped", *parts}), "_mapped.py", "exec"), namespace)
    return namespace["mapped"]


def sums_on_all_devices() -> dict[str, Any]:
    """The same sum over all devices, by jax.pmap and by two forms."""
    x = np.arange(float(jax.device_count()))
    maps = {"core": made(()), "all": made(_ALL)}
    of = lambda pmap: pmap(lambda x: lax.psum(x, "i"), axis_name="i")(x).tolist()
    return {name: [of(jax.pmap), of(mapped)] for name, mapped in maps.items()}


def _said(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - it is data for the parent
        return type(error).__name__, str(error)
    return "", ""


def small_forms_in_two_processes() -> dict[str, Any]:
    """All cases with all parts, and what the forms for one process say."""
    mapped = made(_ALL)
    cases = {**in_processes.CASES}
    del cases["tangents of whole numbers"]

    def f(x: Any) -> Any:
        return x * 2

    own = np.ones(4, np.float32)
    local = made(("devices",))(f, devices=jax.local_devices())
    return {
        "pmap": {name: in_processes.as_plain(case(jax.pmap)) for name, case in cases.items()},
        "mapped": {name: in_processes.as_plain(case(mapped)) for name, case in cases.items()},
        "core": _said(lambda: made(())(f)(own)),
        "axes": _said(lambda: made(("axes",))(f)(own)),
        "in jit": _said(lambda: jax.jit(mapped(f))(jnp.ones(4))),
        "local devices": local(own).tolist(),
    }
