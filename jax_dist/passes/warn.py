"""Warnings that point at the user's line, from wherever in a trace they come."""

import inspect
import os
import warnings

import jax

_OURS_AND_JAX = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (os.path.dirname(__file__), jax.__file__)
)


def warn_user(text: str, category: type[Warning]) -> None:
    """Warns at the innermost line that is neither ours nor JAX's.

    Counted here, for a trace has as many frames as JAX likes; `skip_file_prefixes` came with
    Python 3.12.
    """
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_OURS_AND_JAX):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)
