"""Evaluates the old and the new form of an expression, compares them, and gives the old value.

Functions become a pair: at each call the new one runs on copies of the arguments, then the old one
on the arguments themselves, for it may donate them. The two are never in flight together, for
simulated devices would wait for each other in a collective without end.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from . import equality, journal, programs

_TEXTS = 32  # signatures of one place whose programs are written down

_lock = threading.RLock()  # two pairs must not be in flight together either
_world = threading.local()
# Else JAX would take the trace of a function, such as the body of a scan, from the other form.
_new_traces = jax.make_user_context("")
_signatures: dict[int, dict[Any, Any]] = {}  # by place: those whose texts were written


def both(place: int, old: Callable[[], Any], new: Callable[[], Any]) -> Any:
    """The value of the old form, compared with that of the new one.

    Args:
      place: its number.
      old: evaluates the old form.
      new: evaluates the new one.
    """
    side = getattr(_world, "side", "")
    if side and _is_tracing():  # inside of a pair's program: it holds one of the two
        journal.note(place, "inside", side=side, of=_world.place)
        return (new if side == "new" else old)()
    value = old()
    try:
        other = new()
    except Exception as error:  # noqa: BLE001  # the program goes on with what it had
        journal.note(place, "value", problems=[_raised(error)])
        return value
    return _joined(place, value, other)


def _joined(place: int, old: Any, new: Any) -> Any:
    """The old value; functions and iterators in it go on being compared."""
    if equality.is_function(old) and equality.is_function(new):
        return Pair(place, old, new)
    if isinstance(old, Iterator) and isinstance(new, Iterator):
        return _each(place, old, new)
    leaves, tree = jax.tree.flatten(old)
    others, other_tree = jax.tree.flatten(new)
    if _traced((leaves, others)):
        _note_traced(place)
        return old
    _compare(place, "value", old, new)
    if tree != other_tree or not any(map(equality.is_function, leaves)):
        return old
    return tree.unflatten(
        Pair(place, one, other)
        if equality.is_function(one) and equality.is_function(other)
        else one
        for one, other in zip(leaves, others, strict=True)
    )


def _each(place: int, old: Iterator, new: Iterator) -> Iterator:
    end = object()
    for one, other in itertools.zip_longest(old, new, fillvalue=end):
        if one is end or other is end:
            journal.note(place, "value", problems=[["structure", "another number of items"]])
        if one is not end:
            yield one if other is end else _joined(place, one, other)


def _compare(place: int, event: str, old: Any, new: Any) -> None:
    found = [list(each) for each in equality.differences(old, new)]
    journal.note(place, event, problems=found)


def _note_traced(place: int) -> None:
    """A value of a larger program, of which no text is known."""
    journal.note(place, "inside", side="", of=None)
    journal.note(place, "text", why="its value is one of a larger program")


class Pair:
    """A function in two forms, which acts as the old one."""

    def __init__(self, place: int, old: Callable, new: Callable):
        self._pair_place, self._pair_old, self._pair_new = place, old, new
        for name in ("__name__", "__qualname__", "__doc__", "__module__"):
            if hasattr(old, name):
                setattr(self, name, getattr(old, name))
        self.__wrapped__: Any = getattr(old, "__wrapped__", old)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        side = getattr(_world, "side", "")
        if _traced((args, kwargs)) or (side and _is_tracing()):
            return self._inside(side, args, kwargs)
        with _lock:
            return self._compared(args, kwargs)

    def _compared(self, args: Any, kwargs: Any) -> Any:
        place = self._pair_place
        args, others = _two(args)
        kwargs, other_words = _two(kwargs)
        given, tree = jax.tree.flatten((args, kwargs))
        types = [programs.abstract(leaf) for leaf in given]  # before arrays are donated
        new: Any = None
        problem: Exception | None = None
        try:
            new = _ready(self._as("new", others, other_words))
        except Exception as error:  # noqa: BLE001  # it is the old one that counts
            problem = error
        try:
            old = _ready(self._as("old", args, kwargs))
        except Exception as error:
            same = type(error) is type(problem)
            said = f"{type(error).__name__} before, {type(problem).__name__} after"
            journal.note(place, "call", problems=[] if same else [["error", said]], raised=True)
            raise
        if problem is not None:
            journal.note(place, "call", problems=[_raised(problem)])
            return old
        if equality.is_function(old) and equality.is_function(new):
            return Pair(place, old, new)
        if isinstance(old, Iterator) and isinstance(new, Iterator):
            return _each(place, old, new)
        if _traced((old, new)):
            _note_traced(place)
            return old
        found = [list(each) for each in equality.differences(old, new)]
        found += _donated((args, kwargs), (others, other_words))
        journal.note(place, "call", problems=found)
        self._write_texts(types, tree)
        return old

    def _inside(self, side: str, args: Any, kwargs: Any) -> Any:
        """Part of a larger program: nothing runs, but texts can be compared."""
        outer = _world.place if side else None
        journal.note(self._pair_place, "inside", side=side, of=outer)
        if side == "new":
            return self._pair_new(*args, **kwargs)
        if not side:  # no pair compares what becomes of the larger program
            given, tree = jax.tree.flatten((args, kwargs))
            with _lock:
                self._write_texts([programs.abstract(leaf) for leaf in given], tree)
        return self._pair_old(*args, **kwargs)

    def _write_texts(self, leaves: list[Any], tree: Any) -> None:
        """The programs of both forms, once for each signature, and for other sizes of the mesh."""
        known = _signatures.setdefault(self._pair_place, {})
        by_type, by_value = (
            (id(self._pair_old), tree, *(programs.signature(leaf, whole=whole) for leaf in leaves))
            for whole in (False, True)
        )
        if by_type in known or by_value in known or len(known) > _TEXTS:
            return
        if len(known) == _TEXTS:
            found: dict[str, Any] = {"why": f"it has more than {_TEXTS} signatures"}
        else:
            found = self._texts(leaves, tree)
        whole = not found.pop("numbers_are_arguments", False)
        known[by_value if whole else by_type] = self, leaves  # so that what has an id lives on
        journal.note(self._pair_place, "text", **found)

    def _texts(self, leaves: list[Any], tree: Any) -> dict[str, Any]:
        """Both texts, and those of other sizes; or why there are none.

        Python's numbers are arguments where the function takes them as such, else part of it.
        """
        why = "it takes an iterator" if any(isinstance(each, Iterator) for each in leaves) else ""
        for is_argument in () if why else (programs.is_number_or_array, programs.is_array):
            given = [i for i, leaf in enumerate(leaves) if is_argument(leaf)]
            text = functools.partial(self._text, leaves, tree, given)
            values = [leaves[i] for i in given]
            try:
                before, after = text(values, "old"), text(values, "new")
            except Exception as error:  # noqa: BLE001  # whatever the program raises when traced
                why = f"it cannot be traced: {type(error).__name__}"
                continue
            sizes = {
                str(size): _of_other_size(text, resized)
                for size, resized in programs.other_sizes(before, values)
            }
            numbers = is_argument is programs.is_number_or_array
            texts = {"before": before, "after": after, "sizes": sizes}
            return {
                **texts,
                "numbers_are_arguments": numbers,
                "environment": programs.environment(),
            }
        return {"why": why}

    def _text(
        self, leaves: list[Any], tree: Any, given: list[int], values: list[Any], side: str
    ) -> dict[str, Any]:
        """The program of one form as a function of some of the leaves."""

        def program(*arguments: Any) -> Any:
            own = list(leaves)
            for i, argument in zip(given, arguments, strict=True):
                own[i] = argument
            args, kwargs = tree.unflatten(own)
            return self._as(side, args, kwargs)

        return programs.text(program, values)

    def _as(self, side: str, args: Any, kwargs: Any) -> Any:
        """Calls one form; what it traces is of this form too."""
        before = getattr(_world, "side", ""), getattr(_world, "place", None)
        _world.side, _world.place = side, self._pair_place
        try:
            if side == "old":
                return self._pair_old(*args, **kwargs)
            with _new_traces("new"):
                return self._pair_new(*args, **kwargs)
        finally:
            _world.side, _world.place = before

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_pair", "__")):
            raise AttributeError(name)
        return getattr(self._pair_old, name)

    def __repr__(self) -> str:
        return repr(self._pair_old)


def _two(tree: Any) -> tuple[Any, Any]:
    """The arguments, and a copy of all that a call can use up."""
    leaves, structure = jax.tree.flatten(tree)
    ones, others = [], []
    for leaf in leaves:
        one, other = leaf, leaf
        if isinstance(leaf, jax.Array):
            if not leaf.is_deleted():
                other = jax.block_until_ready(jnp.copy(leaf))
        elif isinstance(leaf, np.ndarray):
            other = leaf.copy()
        elif isinstance(leaf, Iterator):
            one, other = itertools.tee(leaf)
        ones.append(one)
        others.append(other)
    return structure.unflatten(ones), structure.unflatten(others)


def _of_other_size(text: Callable, values: list[Any]) -> dict[str, Any]:
    """The texts for another number of devices; a form that refuses it has none."""
    found: dict[str, Any] = {}
    for name, side in (("before", "old"), ("after", "new")):
        with contextlib.suppress(Exception):
            found[name] = text(values, side)
    return found


def _donated(old: Any, new: Any) -> list[list[str]]:
    """Whether both calls have used up the same arguments."""
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    used = [
        (one.is_deleted(), other.is_deleted()) for one, other in pairs if isinstance(one, jax.Array)
    ]
    return [
        ["donation", f"argument {i} is donated {'before' if one else 'after'} only"]
        for i, (one, other) in enumerate(used)
        if one != other
    ]


def _raised(error: Exception) -> list[str]:
    first = str(error).partition("\n")[0]
    return ["error", f"raised {type(error).__name__} after: {first[:200]}"]


def _ready(tree: Any) -> Any:
    """The same, computed: nothing of it is in flight any more."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer):
            leaf.block_until_ready()
    return tree


def _traced(tree: Any) -> bool:
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


def _is_tracing() -> bool:
    """Whether a program is being traced, so that nothing here has a value."""
    return isinstance(jnp.add(0, 0), Tracer)
