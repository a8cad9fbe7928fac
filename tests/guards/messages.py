"""What a guard says about one line of a test, and how much Python runs in a call."""

import contextlib
import pathlib
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest

import jax_dist
from jax_dist.errors import shown
from jax_dist.guards import blocks

_OURS = str(pathlib.Path(jax_dist.__file__).parent)


def said_by(error: pytest.ExceptionInfo[Exception], act: Callable) -> str:
    """The message; the line that is to be blamed is `act`, and reads "HERE"."""
    line = f"{shown(act.__code__.co_filename)}:{act.__code__.co_firstlineno}"
    text = str(error.value)
    assert f"at {line}:\n" in text, f"{text}\nshould name {line}"
    return text.replace(line, "HERE")


def functions_entered(call: Callable[[], object]) -> int:
    """How many of our Python functions run."""
    entered = []

    def saw(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(_OURS):
            entered.append(frame.f_code.co_name)

    sys.setprofile(saw)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(entered)


def text(block: str) -> str:
    return textwrap.dedent(block).strip()


@contextlib.contextmanager
def refused(kind: type[Exception], match: str | None = None) -> Iterator[pytest.ExceptionInfo]:
    """Expects a refusal in a guarded block that goes on, and would raise it again."""
    with pytest.raises(kind, match=match) as error:
        yield error
    forget()


def forget() -> None:
    """The last refusal was expected."""
    for block in blocks.thread.blocks:
        block.refusal = None
