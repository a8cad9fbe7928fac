"""The programs of recorded calls, as texts: one for each signature of a function."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax

from . import programs

_ENOUGH = 32  # of one function


class ProgramTexts:
    """Those of one process.

    Args:
      write: takes the event of a new one.
    """

    def __init__(self, write: Callable[..., None]):
        self._write = write
        self._known: dict[Any, tuple[int, Any]] = {}  # with what has an id, so that it lives on
        self._counts: dict[int, int] = {}  # by site
        self._thread = threading.local()

    @property
    def is_tracing(self) -> bool:
        """Whether what runs in this thread runs for its text alone."""
        return getattr(self._thread, "is_tracing", False)

    def number(
        self, site: int, function: Callable, leaves: list[Any], tree: Any, *, numbers: bool = True
    ) -> int | None:
        """The number of the program of a call; it is written down where it is new.

        Args:
          site: where the function was mapped.
          function: what was called.
          leaves: of the arguments and keywords, with types in place of arrays.
          tree: their structure.
          numbers: whether numbers of Python are arguments, where that can be.

        Returns:
          None where there is none, and for what is called in too many ways.
        """
        identity = _identity(function)
        keys = [
            (site, identity, tree, *(programs.signature(leaf, whole=whole) for leaf in leaves))
            for whole in (False, True)
        ]
        for key in keys:
            if key in self._known:
                return self._known[key][0]
        if self._counts.get(site, 0) == _ENOUGH:
            return None
        self._counts[site] = self._counts.get(site, 0) + 1
        text, whole = self._text(function, leaves, tree, numbers=numbers)
        number = len(self._known)
        self._known[keys[whole]] = number, (function, leaves)
        self._write(event="text", site=site, number=number, **text)
        return number

    def _text(
        self, function: Callable, leaves: list[Any], tree: Any, *, numbers: bool
    ) -> tuple[dict[str, Any], bool]:
        """The text, and whether it holds for these numbers of Python alone."""
        ways = (programs.is_number_or_array, programs.is_array)[not numbers :]
        paths = [jax.tree_util.keystr(path[1:]) for path, _ in _with_paths(tree)]
        why = "it takes an iterator" if any(isinstance(each, Iterator) for each in leaves) else ""
        for is_argument in () if why else ways:
            given = [i for i, leaf in enumerate(leaves) if is_argument(leaf)]

            def program(*arguments: Any, given: list[int] = given) -> Any:
                own = list(leaves)
                for i, argument in zip(given, arguments, strict=True):
                    own[i] = argument
                args, kwargs = tree.unflatten(own)
                return function(*args, **kwargs)

            self._thread.is_tracing = True
            try:
                text = programs.text(program, [leaves[i] for i in given])
            except Exception as error:  # noqa: BLE001  # whatever the program raises when traced
                why = f"it cannot be traced: {type(error).__name__}"
                continue
            finally:
                self._thread.is_tracing = False
            found = {"text": text, "paths": [paths[i] for i in given]}
            found["environment"] = programs.environment()
            return found, is_argument is programs.is_array
        return {"why": why}, True


def _identity(function: Any) -> Any:
    """The same for the lambdas that one expression makes, one each time, of the same values."""
    if not isinstance(function, types.LambdaType) or function.__defaults__:
        return id(function)
    return function.__code__, *(id(cell.cell_contents) for cell in function.__closure__ or ())


def _with_paths(tree: Any) -> list[tuple[Any, Any]]:
    numbers = tree.unflatten(range(tree.num_leaves))
    return jax.tree_util.tree_flatten_with_path(numbers)[0]
