"""The text of exceptions that others have written, whatever their methods do.

`str(error)` may raise, return no string, be as large as the memory, or never return. A message of
ours that quotes it must come in any case: the other processes of a job wait for it.
"""

import threading
import traceback
from collections.abc import Callable
from typing import NamedTuple

LONGEST = 1 << 16  # characters of one text
_PATIENCE = 2.0  # seconds


def text_of(error: BaseException) -> str:
    """`str(error)`, cut where it is too long; what is known of the error where it has no text.

    >>> text_of(ValueError("too few devices"))
    'too few devices'
    """
    if _is_plain(error):
        return cut(str(error))
    said: list[str] = []
    _run(lambda: said.append(_exact(str(error))))
    return cut(said[0]) if said else "<its text does not come>"


class Told(NamedTuple):
    """What an exception says."""

    what: str  # as in "ValueError: its text"
    traceback: str
    is_whole: bool  # whether all of it has come


def told(error: BaseException) -> Told:
    """What an exception and those that it comes from say, each text cut where it is too long.

    >>> told(ValueError("too few devices")).what
    'ValueError: too few devices'
    """
    said: list[str] = []

    def say() -> None:
        said.append(_exact("".join(traceback.format_exception_only(error)).strip()))
        said.append(_exact("".join(traceback.format_exception(error))))

    _run(say)
    if len(said) == 2:
        return Told(cut(said[0]), cut(said[1]), is_whole=True)
    what = cut(said[0]) if said else f"{type(error).__qualname__}: {text_of(error)}"
    frames = "".join(traceback.format_tb(error.__traceback__))
    return Told(what, f"Traceback (most recent call last):\n{frames}{what}\n", is_whole=False)


def cut(text: str) -> str:
    """The text without its middle, if it is too long.

    >>> cut(100_000 * "x")[32_768:32_800]
    ' ... [34464 characters left out]'
    """
    if len(text) <= LONGEST:
        return text
    left_out = f"[{len(text) - LONGEST} characters left out]"
    return f"{text[: LONGEST // 2]} ... {left_out} ... {text[-LONGEST // 2 :]}"


def _is_plain(error: BaseException) -> bool:
    """Whether only code of Python itself makes the text."""
    args = vars(BaseException)["args"].__get__(error)
    return type(error).__str__ is BaseException.__str__ and all(type(arg) is str for arg in args)


def _exact(text: str) -> str:
    """The characters alone: the methods of a subclass of str may do anything."""
    return "".join([text])


def _run(act: Callable[[], None]) -> None:
    """Does it in a thread, and waits for no longer than one may wait for a text."""

    def run() -> None:
        try:
            act()
        except BaseException:  # noqa: BLE001  # whatever the exception's own methods raise
            return

    thread = threading.Thread(target=run, name="jax_dist text of an exception", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # Python is at its end
        return
    thread.join(_PATIENCE)
