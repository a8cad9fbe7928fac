"""Where the user is, and what he calls a value: what a message of a guard begins with."""

import contextlib
import inspect
import os
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

import jax
import numpy as np

from jax_dist.passes.user_lines import shown

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
            path = _path_in(held, value)
            if path is not None:
                return name + path
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


def _path_in(held: object, value: object) -> str | None:
    """Where `value` is in a container of the user."""
    if not isinstance(held, dict | list | tuple):
        return None
    leaves: list[tuple[Any, Any]] = jax.tree_util.tree_leaves_with_path(held)
    return next((jax.tree_util.keystr(path) for path, leaf in leaves if leaf is value), None)
