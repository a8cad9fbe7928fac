"""The line of a loop of Python, told from the lines of what it made."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jax.extend.core import JaxprEqn

from jax_dist.passes.interpreter import place_of
from jax_dist.passes.user_lines import OURS_AND_JAX


class _Frame(NamedTuple):
    file: str
    function: str
    line: int


def loop_line(eqns: Sequence[JaxprEqn]) -> str:
    """Where a copy begins, in the innermost function that made all of it; "" if unknown.

    Of a body of one line, it is the line; of one of several, the first.
    """
    stacks = [list(_user_frames(eqn)) for eqn in eqns]
    found = ""
    for level in zip(*stacks, strict=False):  # as far as the shortest goes
        first = min(level)
        if any(frame[:2] != first[:2] for frame in level):
            break
        found = place_of(first.file, first.line)
        if len(set(level)) > 1:
            break
    return found


def _user_frames(eqn: JaxprEqn) -> Iterator[_Frame]:
    """The outermost first."""
    traceback = eqn.source_info.traceback
    for frame in reversed(traceback.frames if traceback is not None else ()):
        if not frame.file_name.startswith(OURS_AND_JAX):
            yield _Frame(frame.file_name, frame.function_name, frame.line_num)
