"""What a guard says: where the user's code stands, which call it is, and of which types."""

import contextlib
import inspect
import os
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from jax_dist import _compat
from jax_dist.errors import shown

_NOT_THE_USER = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (os.path.dirname(__file__), jax.__file__, np.__file__)
)
_STANDARD = (contextlib.__file__,)  # its frames stand between a guard and the block


def user_frame() -> FrameType | None:
    """The innermost frame that is neither ours nor JAX's nor NumPy's."""
    frame = inspect.currentframe()
    while frame is not None and not _is_user(frame):
        frame = frame.f_back
    return frame


def frame_of(trace: TracebackType | None) -> FrameType | None:
    """The user's innermost frame in a traceback; it is still alive there."""
    found = None
    while trace is not None:
        found = trace.tb_frame if _is_user(trace.tb_frame) else found
        trace = trace.tb_next
    return found


def line_of(frame: FrameType | None) -> str:
    """Such as "train.py:12"."""
    return "?" if frame is None else f"{shown(frame.f_code.co_filename)}:{frame.f_lineno}"


def name_of(value: object, frame: FrameType | None) -> str | None:
    """What the user calls `value` there: "loss", "metrics['loss']"; None if it has no name."""
    if frame is None:
        return None
    for names in (frame.f_locals, frame.f_globals):
        for name, held in names.items():
            if held is value:
                return name
        for name, held in names.items():
            if isinstance(held, dict | list | tuple):
                for path, leaf in jax.tree.leaves_with_path(held):
                    if leaf is value:
                        return name + jax.tree_util.keystr(path)
    return None


def entered_by() -> Iterator[str]:
    """The functions between the user's line and here, the outermost last."""
    frame = inspect.currentframe()
    while frame is not None and not _is_user(frame):
        yield frame.f_code.co_name
        frame = frame.f_back


def _is_user(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return not file.startswith((*_NOT_THE_USER, "<frozen")) and file not in _STANDARD


# --- A call in the user's words, where a wrapper of ours or of JAX stands around his function


_OF_WRAPPERS = ("args[", "kwargs[", "flat_args[")


def shown_paths(call: _compat.JitCall) -> dict[str, str]:
    """How to call each argument: `args[1]['w']` of a wrapper is what the user calls that value."""
    frame, shown = user_frame(), {}
    for path, leaf in zip(call.paths, call.leaves, strict=False):
        shown[path] = (path.startswith(_OF_WRAPPERS) and name_of(leaf, frame)) or path
    return shown


def is_of_jax(fun: Any) -> bool:
    """Whether JAX itself defines the function, as it does `add` for `+`."""
    return (getattr(fun, "__module__", None) or "").split(".")[0] == "jax"


# --- what a value is, and where it lies


def placement_of(array: jax.Array) -> str:
    """Where an array lies, in words that are the same on every jax.

    >>> import jax.numpy as jnp
    >>> placement_of(jnp.zeros(3))
    'device 0, uncommitted'
    >>> placement_of(jax.device_put(jnp.zeros(3), jax.devices()[1]))
    'device 1'
    """
    sharding = array.sharding
    if isinstance(sharding, NamedSharding):
        axes = ", ".join(f"{name}={size}" for name, size in sharding.mesh.shape.items())
        spec = ", ".join(repr(part) for part in sharding.spec)
        return f"P({spec}) over {axes}"
    if isinstance(sharding, SingleDeviceSharding):
        (device,) = sharding.device_set
        return f"device {device.id}" + ("" if array.committed else ", uncommitted")
    return f"{type(sharding).__name__} over {len(sharding.device_set)} devices"


def devices_of(array: jax.Array) -> str:
    """Where an array lies, whether it is committed to that or not."""
    return placement_of(array).removesuffix(", uncommitted")


def text_of(value: Any) -> str:
    """Such as "float32[8,4]".

    >>> import numpy as np
    >>> text_of(np.ones((8, 4), np.float32)), text_of(1.5)
    ('float32[8,4]', 'float32[]')
    """
    kind = jax.typeof(value)
    return f"{kind.dtype}[{','.join(map(str, kind.shape))}]"
