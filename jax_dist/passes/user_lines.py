"""The line of the user, from wherever in a trace; and warnings that point at it."""

import inspect
import os
import warnings
from types import FrameType

import jax

OURS_AND_JAX = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (os.path.dirname(__file__), jax.__file__)
)


def warn_user(text: str, category: type[Warning]) -> None:
    """Warns at the innermost line that is neither ours nor JAX's.

    Counted here, for a trace has as many frames as JAX likes; `skip_file_prefixes` came with
    Python 3.12.
    """
    level, _ = _user_frame()
    warnings.warn(text, category, stacklevel=level)


def user_line() -> str:
    """Where the user's code is now: "train.py:12", or "" if there is none of it."""
    _, frame = _user_frame()
    return "" if frame is None else f"{shown(frame.f_code.co_filename)}:{frame.f_lineno}"


def shown(path: str) -> str:
    """A path as a user would type it: relative to where he is, if it lies below."""
    here = os.path.relpath(path)
    return path if here.startswith(os.pardir) else here


def _user_frame() -> tuple[int, FrameType | None]:
    """The user's innermost frame, and its level as seen by who calls this one's caller."""
    level, frame = -1, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(OURS_AND_JAX):
        level, frame = level + 1, frame.f_back
    return level + 1, frame
