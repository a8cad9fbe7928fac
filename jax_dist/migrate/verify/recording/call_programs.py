"""The programs of calls: one for each way in which a function is called, each written down once."""

from __future__ import annotations

import collections
import contextlib
import os
import random
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from . import programs

_ENOUGH = 32  # programs of one site
_NUMBER_OR_ARRAY = (jax.ShapeDtypeStruct, int, float, complex)


class Arguments:
    """The arguments and keywords of one call, with types in place of arrays."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]):
        leaves, self._tree = jax.tree.flatten((args, kwargs))
        self.leaves: list[Any] = [_abstract(leaf) for leaf in leaves]

    def signatures(self, owner: Any) -> tuple[Any, Any]:
        """What a program may depend on: all types; and the values of Python's numbers too."""
        by_type, by_value = (
            (owner, self._tree, *(_signature(leaf, whole=whole) for leaf in self.leaves))
            for whole in (False, True)
        )
        return by_type, by_value

    def paths(self) -> list[str]:
        """Where the leaves are."""
        numbers = self._tree.unflatten(range(self._tree.num_leaves))
        found, _ = jax.tree_util.tree_flatten_with_path(numbers)
        return [jax.tree_util.keystr(path[1:]) for path, _ in found]

    def described(
        self, make: Callable[[list[int]], dict[str, Any]], *, numbers: bool = True
    ) -> tuple[dict[str, Any], bool]:
        """The texts of the call, or why it has none; and whether they hold for its numbers alone.

        Python's numbers are arguments where the function takes them as such, else part of it.

        Args:
          make: the texts, by the positions of the leaves that are arguments.
          numbers: whether numbers of Python are arguments, where that can be.
        """
        if any(isinstance(each, Iterator) for each in self.leaves):
            return {"why": "it takes an iterator"}, True
        why = ""
        for kinds in (_NUMBER_OR_ARRAY, jax.ShapeDtypeStruct)[not numbers :]:
            try:
                found = make([i for i, leaf in enumerate(self.leaves) if isinstance(leaf, kinds)])
            except Exception as error:  # noqa: BLE001  # whatever the program raises when traced
                why = f"it cannot be traced: {type(error).__name__}"
            else:
                environment = {  # what a program depends on beside its text
                    "jax": jax.__version__,
                    "backend": jax.default_backend(),
                    "devices": jax.device_count(),
                    "xla_flags": os.environ.get("XLA_FLAGS", ""),
                }
                return {**found, "environment": environment}, kinds is jax.ShapeDtypeStruct
        return {"why": why}, True

    def text(
        self, call: Callable[[Any, Any], Any], given: list[int], values: list[Any]
    ) -> dict[str, Any]:
        """The program of the call as a function of some of the leaves, for values of these."""

        def program(*arguments: Any) -> Any:
            own = list(self.leaves)
            for i, argument in zip(given, arguments, strict=True):
                own[i] = argument
            return call(*self._tree.unflatten(own))

        return programs.text(program, values)


def _abstract(leaf: Any) -> Any:
    """The type of an array, as it is traced; all else as it is."""
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return leaf
    dtype = leaf.dtype
    if not isinstance(leaf, jax.Array):  # of float64, JAX 0.12 warns
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.ShapeDtypeStruct(leaf.shape, dtype, weak_type=getattr(leaf, "weak_type", False))


def _signature(leaf: Any, *, whole: bool) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return (tuple(leaf.shape), str(leaf.dtype), leaf.weak_type)
    if not whole and isinstance(leaf, _NUMBER_OR_ARRAY):
        return type(leaf)
    try:
        hash(leaf)
    except TypeError:
        return id(leaf)
    return type(leaf), leaf


def is_traced(tree: Any) -> bool:
    try:
        leaves = jax.tree.leaves(tree)
    except Exception:  # noqa: BLE001  # a constant that is no tree
        return False
    return any(isinstance(leaf, Tracer) for leaf in leaves)


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    """A trace more draws no number of the program's."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002  # that of the program
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002


class ProgramTexts:
    """Those of one process.

    Args:
      write: takes the event of a new one.
    """

    def __init__(self, write: Callable[..., None]):
        self._write = write
        self._known: dict[Any, tuple[int, Any]] = {}  # with what has an id, so that it lives on
        self._counts: collections.Counter[int] = collections.Counter()  # by site
        self._thread = threading.local()

    @property
    def is_tracing(self) -> bool:
        """Whether what runs in this thread runs for its text alone."""
        return getattr(self._thread, "is_tracing", False)

    def number(
        self, site: int, function: Callable, arguments: Arguments, *, numbers: bool = True
    ) -> int | None:
        """The number of the program of a call; it is written down where it is new.

        Args:
          site: where the function was mapped.
          function: what was called.
          arguments: with what.
          numbers: as `Arguments.described` takes it.

        Returns:
          None where there is none, and for what is called in too many ways.
        """
        identity: Any = id(function)
        if isinstance(function, types.LambdaType) and not function.__defaults__:
            # The same for the lambdas that one expression makes, one each time, of the same values.
            cells = function.__closure__ or ()
            identity = function.__code__, *(id(cell.cell_contents) for cell in cells)
        keys = arguments.signatures((site, identity))
        for key in keys:
            if key in self._known:
                return self._known[key][0]
        if self._counts[site] == _ENOUGH:
            return None
        self._counts[site] += 1
        paths = arguments.paths()

        def make(given: list[int]) -> dict[str, Any]:
            call = lambda args, kwargs: function(*args, **kwargs)
            leaves = [arguments.leaves[i] for i in given]
            found = arguments.text(call, given, leaves)
            sizes: dict[str, Any] = {}
            for size, resized in programs.other_sizes(found, leaves):
                with contextlib.suppress(Exception):  # it refuses that number of devices
                    sizes[str(size)] = arguments.text(call, given, resized)
            return {"text": found, "sizes": sizes, "paths": [paths[i] for i in given]}

        self._thread.is_tracing = True
        try:
            with _same_random_numbers():
                found, whole = arguments.described(make, numbers=numbers)
        finally:
            self._thread.is_tracing = False
        number = len(self._known)
        self._known[keys[whole]] = number, (function, arguments)
        self._write(event="text", site=site, number=number, **found)
        return number
