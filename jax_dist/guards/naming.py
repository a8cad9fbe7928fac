"""A call in the user's words, where a wrapper of ours or of JAX stands around his function."""

from typing import Any

from jax_dist import _compat
from jax_dist.guards import places

_OF_WRAPPERS = ("args[", "kwargs[", "flat_args[")


def known_name(call: _compat.JitCall) -> str:
    """`jax.pmap` keeps no name of what it maps."""
    module = getattr(call.fun, "__module__", None)
    return "jax.pmap" if module == _compat.PMAP_MODULE else call.name


def shown_paths(call: _compat.JitCall) -> dict[str, str]:
    """How to call each argument: `args[1]['w']` of a wrapper is what the user calls that value."""
    frame = places.user_frame()
    return {
        path: _shown(path, leaf, frame) for path, leaf in zip(call.paths, call.leaves, strict=False)
    }


def is_of_jax(fun: Any) -> bool:
    """Whether JAX itself defines the function, as it does `add` for `+`."""
    return (getattr(fun, "__module__", None) or "").split(".")[0] == "jax"


def _shown(path: str, leaf: Any, frame: Any) -> str:
    if not path.startswith(_OF_WRAPPERS):
        return path
    return places.name_of(leaf, frame) or path
