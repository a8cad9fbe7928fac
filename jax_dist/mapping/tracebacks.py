"""Tracebacks of the user's errors, without the frames of this package.

JAX hides its own frames likewise, and only at its own functions; `JAX_TRACEBACK_FILTERING=off`
shows all, here as there.
"""

import os
import types

from jax_dist import _compat

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def hide_own_frames(error: Exception) -> None:
    """Takes the frames of this package out of the traceback."""
    if _compat.config_value("jax_traceback_filtering") == "off":
        return
    frames = []
    step = error.__traceback__
    while step is not None:
        if not step.tb_frame.f_code.co_filename.startswith(_PACKAGE):
            frames.append(step)
        step = step.tb_next
    shown: types.TracebackType | None = None
    for step in reversed(frames):
        shown = types.TracebackType(shown, step.tb_frame, step.tb_lasti, step.tb_lineno)
    error.__traceback__ = shown
