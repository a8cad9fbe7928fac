"""What a guard says: where the user's code stands, which argument it is, and of which type."""

import contextlib
import inspect
import os
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from jax_dist import _compat
from jax_dist._rewrite.interpreter import OURS_AND_JAX
from jax_dist.errors import shown

_NOT_THE_USERS = (
    *OURS_AND_JAX,
    os.path.dirname(np.__file__) + os.sep,
    contextlib.__file__,  # its frames stand between a guard and the block
    "<frozen",
)
_OF_WRAPPERS = ("args[", "kwargs[", "flat_args[")


def frames() -> Iterator[FrameType]:
    """From here to the outermost."""
    return (frame for frame, _ in traceback.walk_stack(inspect.currentframe()))


def is_of_user(frame: FrameType) -> bool:
    """Whether its code is neither ours nor JAX's nor NumPy's."""
    return not frame.f_code.co_filename.startswith(_NOT_THE_USERS)


def user_frame() -> FrameType | None:
    """The user's innermost frame."""
    return next(filter(is_of_user, frames()), None)


def user_line() -> str:
    """Such as "train.py:12"."""
    frame = user_frame()
    return "?" if frame is None else line_of(frame, frame.f_lineno)


def line_of(frame: FrameType, line: int) -> str:
    """Such as "train.py:12"."""
    return f"{shown(frame.f_code.co_filename)}:{line}"


def name_of(value: object) -> str | None:
    """What the user calls `value` at his line: "metrics['loss']"; None if it has no name."""
    frame = user_frame()
    for names in (frame.f_locals, frame.f_globals) if frame else ():
        for name, held in names.items():
            if held is value:
                return name
        for name, held in names.items():
            if isinstance(held, dict | list | tuple):
                for path, leaf in jax.tree.leaves_with_path(held):
                    if leaf is value:
                        return name + jax.tree_util.keystr(path)
    return None


def argument_names(call: _compat.JitCall) -> dict[str, str]:
    """What the user calls each argument, by its path.

    `args[1]` of a wrapper, and `x` of a function that JAX defines, are not his words.
    """
    names = {}
    for path, leaf in zip(call.paths, call.leaves, strict=False):
        is_foreign = path.startswith(_OF_WRAPPERS) or is_of_jax(call.fun)
        names[path] = (is_foreign and name_of(leaf)) or path
    return names


def is_of_jax(fun: Any) -> bool:
    """Whether JAX itself defines the function, as it does `add` for `+`."""
    return (getattr(fun, "__module__", None) or "").split(".")[0] == "jax"


def text_of(value: Any) -> str:
    """Such as "float32[8,4]"."""
    kind = jax.typeof(value)
    return f"{kind.dtype}[{','.join(map(str, kind.shape))}]"


def placement_of(array: jax.Array) -> str:
    """Where an array lies, in words that are the same on every jax: "P('i') over i=4"."""
    sharding = array.sharding
    if isinstance(sharding, NamedSharding):
        axes = ", ".join(f"{name}={size}" for name, size in sharding.mesh.shape.items())
        return f"P({', '.join(map(repr, sharding.spec))}) over {axes}"
    if isinstance(sharding, SingleDeviceSharding):
        (device,) = sharding.device_set
        return f"device {device.id}"
    return f"{type(sharding).__name__} over {len(sharding.device_set)} devices"


def parts_of(array: jax.Array) -> list[jax.Array]:
    """The arrays, each on one device of this process, that it consists of."""
    if len(array.sharding.device_set) == 1:  # its own shard would refer back to it: a ring
        return [array]
    return [shard.data for shard in array.addressable_shards]
