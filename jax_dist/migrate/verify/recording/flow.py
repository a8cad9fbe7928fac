"""Where arrays that mapped functions take and give come from, and where they go.

Each expression of the program hands its value to `see`. An array is known by its identity for as
long as it lives, so it is known again in a tree, in a field of an object, in another function.
Nothing is kept alive, and nothing is computed with.
"""

from __future__ import annotations

import builtins
import itertools
import json
import os
import sys
import threading
import types
import weakref
from collections.abc import ItemsView, ValuesView
from typing import Any

NAME = "__jd_see__"  # of the builtin that expressions call
_ENOUGH = 40  # evaluations of one expression that hold arrays
_LATEST = 1000  # and those in which they are looked for
_FUNCTIONS = 8  # that are told apart at one place
_PLAIN = frozenset(
    (int, float, bool, complex, str, bytes, type(None), type, range, slice, property)
    + (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, types.GeneratorType)
)


class _Seen:
    """What one expression was, in its first evaluations."""

    def __init__(self) -> None:
        self.hits = 0
        self.with_arrays = 0
        self.serials: dict[int, str] = {}  # of its arrays; where in the value, "" for all of it
        self.has_numbers = False  # of Python, in a tree
        self.has_scalars = False  # arrays of rank 0
        self.on_host = True  # all arrays are of numpy
        self.has_numpy = False  # some are
        self.is_callable = False
        self.type: type = type(None)


class Flow:
    """The flow of one process.

    Slots are what a mapped function takes and gives: `(site, "in", position)`, or
    `(site, "out", *path)` through tuples, or `(site, "word", name)`.
    """

    def __init__(self) -> None:
        self._serials = itertools.count()
        self._live: dict[int, tuple[int, weakref.ref[Any]]] = {}  # by id
        self._seen: dict[int, _Seen] = {}
        self._born: dict[int, int] = {}  # by serial: the expression that saw it first
        self._slots: dict[int, dict[tuple[Any, ...], None]] = {}  # by serial
        self._calls: dict[int, set[int]] = {}  # by expression: the sites whose results it is
        self._made: dict[int, int] = {}  # results that no expression has seen: the site
        self._static: dict[tuple[int, int], set[str]] = {}  # types of static arguments
        self._forms: dict[int, set[str]] = {}  # by site: numbers of arguments, paths of results
        self._functions: dict[int, list[Any]] = {}  # by site: what was mapped there
        self._again: set[int] = set()  # sites that map one function twice
        self._thread = threading.local()
        self._lock = threading.RLock()

    def install(self) -> None:
        """Lets expressions call it."""
        setattr(builtins, NAME, self.see)

    def see(self, number: int, value: Any) -> Any:
        """The value of an expression, unchanged."""
        seen = self._seen.get(number)
        if seen is None:
            seen = self._seen.setdefault(number, _Seen())
        seen.hits += 1
        seen.is_callable |= callable(value)
        seen.type = type(value)
        if type(value) in _PLAIN or seen.with_arrays >= _ENOUGH or seen.hits > _LATEST:
            return value
        if "jax" in sys.modules and not getattr(self._thread, "is_looking", False):
            self._thread.is_looking = True  # flattening may run code of the program
            try:
                self._look(number, seen, value)
            except Exception:  # noqa: BLE001  # what cannot be flattened holds nothing for us
                pass
            finally:
                self._thread.is_looking = False
        return value

    def _look(self, number: int, seen: _Seen, value: Any) -> None:
        import jax

        arrays, has_numbers, has_scalars = _arrays(value)
        seen.has_numbers |= has_numbers
        seen.has_scalars |= has_scalars
        if not arrays:
            return
        seen.with_arrays += 1
        of_jax = [isinstance(each, jax.Array) for _, each in arrays]
        seen.on_host &= not any(of_jax)
        seen.has_numpy |= not all(of_jax)
        with self._lock:
            for where, array in arrays:
                serial, is_new = self._serial(array)
                if is_new:
                    self._born[serial] = number
                if (site := self._made.pop(serial, None)) is not None:
                    self._calls.setdefault(number, set()).add(site)
                seen.serials[serial] = where

    def _serial(self, array: Any) -> tuple[int, bool]:
        known = self._live.get(id(array))
        if known is not None and known[1]() is array:
            return known[0], False
        serial = next(self._serials)
        self._live[id(array)] = serial, weakref.ref(array)
        return serial, True

    # --- mapped functions

    def mapped(self, site: int, function: Any) -> None:
        """That a function is mapped, perhaps once more."""
        known = self._functions.setdefault(site, [])
        if function in known or len(known) == _FUNCTIONS:
            self._again.add(site)
        else:
            known.append(function)

    def given(self, site: int, args: Any, kwargs: Any, static: tuple[int, ...]) -> None:
        """What a mapped function takes; `static` are positions of constants."""
        with self._lock:
            self._form(site, arguments=len(args), words=sorted(kwargs))
            for position, each in enumerate(args):
                if position in static:
                    kinds = self._static.setdefault((site, position), set())
                    kinds.add(type(each).__name__)
                else:
                    self._note(each, (site, "in", position))
            for name, each in kwargs.items():
                self._note(each, (site, "word", name))

    def returned(self, site: int, result: Any) -> None:
        """What it gives."""
        with self._lock:
            parts = _parts(result)
            self._form(site, results=[path for path, _ in parts])
            for path, part in parts:
                for serial in self._note(part, (site, "out", *path)):
                    self._made[serial] = site

    def _form(self, site: int, **form: Any) -> None:
        self._forms.setdefault(site, set()).add(json.dumps(form))

    def _note(self, tree: Any, slot: tuple[Any, ...]) -> list[int]:
        found = [self._serial(array)[0] for _, array in _arrays(tree)[0]]
        for serial in found:
            self._slots.setdefault(serial, {})[slot] = None
        return found

    def write(self, folder: str) -> None:
        """Writes down what concerns mapped functions."""
        slots = self._slots
        expressions = {
            number: {
                "hits": seen.hits,
                "arrays": {s: where for s, where in seen.serials.items() if s in slots},
                "others": any(s not in slots for s in seen.serials),
                "numbers": seen.has_numbers,
                "scalars": seen.has_scalars,
                "host": seen.on_host,
                "numpy": seen.has_numpy,
                "callable": seen.is_callable,
                "type": seen.type.__name__,
                "sites": sorted(self._calls.get(number, ())),
            }
            for number, seen in self._seen.items()
        }
        found = {
            "expressions": expressions,
            "slots": {serial: list(each) for serial, each in slots.items()},
            "born": {serial: each for serial, each in self._born.items() if serial in slots},
            "again": sorted(self._again),
            "static": [[*key, sorted(kinds)] for key, kinds in self._static.items()],
            "forms": {site: [json.loads(e) for e in each] for site, each in self._forms.items()},
        }
        with open(os.path.join(folder, "flow.json"), "w") as file:
            json.dump(found, file)


def _parts(tree: Any, path: tuple[int, ...] = ()) -> list[tuple[tuple[int, ...], Any]]:
    """What nested tuples hold, and where."""
    if type(tree) is not tuple or not tree:
        return [(path, tree)]
    return [part for i, each in enumerate(tree) for part in _parts(each, (*path, i))]


def _arrays(tree: Any) -> tuple[list[tuple[str, Any]], bool, bool]:
    """Its arrays of rank 1 or more, and where; and whether it has numbers of Python, and scalars.

    There are none where it is traced.
    """
    import jax
    import jax.core
    import numpy as np

    kinds = (jax.Array, np.ndarray)
    tree = [*tree] if isinstance(tree, ItemsView | ValuesView) else tree  # of `metrics.items()`
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    if any(isinstance(leaf, jax.core.Tracer) for _, leaf in leaves):
        return [], False, False
    arrays = [
        (jax.tree_util.keystr(path), leaf) for path, leaf in leaves if isinstance(leaf, kinds)
    ]
    found = [(path, leaf) for path, leaf in arrays if leaf.ndim]
    has_numbers = any(isinstance(leaf, (bool, int, float, complex)) for _, leaf in leaves)
    return found, has_numbers, len(found) < len(arrays)
