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

from . import programs, start, values
from .programs import is_traced
from .values import Difference

_SHOWN = 60  # characters of values
_TEXTS = 32  # signatures of one place whose programs are written down


class _World(threading.local):
    """What one thread traces."""

    side = ""  # "old" or "new": a form of a pair
    place: int | None = None  # that of the pair


_world = _World()
_lock = threading.RLock()  # two pairs must not be in flight together either
# Else JAX would take the trace of a function, such as the body of a scan, from the other form.
_new_traces = jax.make_user_context("")
_told: set[tuple[int, str, str]] = set()  # by place: what was made, and called
_signatures: dict[int, dict[Any, Any]] = {}  # by place: those whose texts were written


def both(place: int, old: Callable[[], Any], new: Callable[[], Any]) -> Any:
    """As `start.both`."""
    if _world.side and _is_tracing():  # inside of a pair's program: it holds one of the two
        start.note(place, "inside", side=_world.side, of=_world.place)
        return (new if _world.side == "new" else old)()
    try:
        value = old()
    except Exception as error:
        start.note(place, "raised", what=type(error).__name__)
        raise
    try:
        other = new()
    except Exception as error:  # noqa: BLE001  # the program goes on with what it had
        start.note(place, "value", problems=[_raised(error)])
        return value
    return _joined(place, value, other)


def used(place: int, value: Any) -> Any:
    """As `start.use`: what makes mapped functions is one for each of its places."""
    if type(value) is functools.partial:
        return functools.partial(used(place, value.func), *value.args, **value.keywords)
    if not isinstance(value, _Pair):
        return value
    start.note(value._pair_place, "use", by=place)
    return _Pair(place, value._pair_old, value._pair_new)


def _joined(place: int, old: Any, new: Any) -> Any:
    """The old value; functions and iterators in it go on being compared."""
    if (joined := _without_value(place, old, new)) is not None:
        return joined
    leaves, tree = jax.tree.flatten(old)
    others, other_tree = jax.tree.flatten(new)
    start.note(place, "value", problems=[*values.differences(old, new)])
    if tree != other_tree or not any(map(values.is_function, leaves)):
        return old
    return tree.unflatten(
        _Pair(place, one, other) if values.is_function(one) and values.is_function(other) else one
        for one, other in zip(leaves, others, strict=True)
    )


def _each(place: int, old: Iterator, new: Iterator) -> Iterator:
    end = object()
    for one, other in itertools.zip_longest(old, new, fillvalue=end):
        if one is end or other is end:
            start.note(place, "value", problems=[("structure", "another number of items")])
        if one is not end:
            yield one if other is end else _joined(place, one, other)


def _without_value(place: int, old: Any, new: Any) -> Any:
    """What goes on in place of the old form that has no value yet; None where both have one."""
    if values.is_function(old) and values.is_function(new):
        return _Pair(place, old, new)
    if isinstance(old, Iterator) and isinstance(new, Iterator):
        return _each(place, old, new)
    if is_traced((old, new)):  # of a larger program, of which no text is known
        start.note(place, "inside", side="", of=None)
        start.note(place, "text", why="its value is one of a larger program")
        return old
    return None


class _Pair:
    """A function in two forms, which acts as the old one."""

    def __init__(self, place: int, old: Callable, new: Callable):
        self._pair_place, self._pair_old, self._pair_new = place, old, new
        for name in ("__name__", "__qualname__", "__doc__", "__module__"):
            if hasattr(old, name):
                setattr(self, name, getattr(old, name))
        self.__wrapped__: Any = getattr(old, "__wrapped__", old)
        self._pair_what = _described(self.__wrapped__)
        self._once("made")

    def _once(self, event: str) -> None:
        """Of all that one place makes of one function."""
        if (self._pair_place, event, self._pair_what) not in _told:
            _told.add((self._pair_place, event, self._pair_what))
            start.note(self._pair_place, event, what=self._pair_what)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._once("called")
        if is_traced((args, kwargs)) or (_world.side and _is_tracing()):
            return self._inside(args, kwargs)
        with _lock:
            return self._compared(args, kwargs)

    def _compared(self, args: Any, kwargs: Any) -> Any:
        place = self._pair_place
        args, others = _two(args)
        kwargs, other_words = _two(kwargs)
        arguments = programs.Arguments(args, kwargs)  # before arrays are donated
        new: Any = None
        problem: Exception | None = None
        try:
            new = _ready(self._as("new", others, other_words))
        except Exception as error:  # noqa: BLE001  # it is the old one that counts
            problem = error
        try:
            old = _ready(self._as("old", args, kwargs))
        except Exception as error:
            if type(error) is type(problem):  # nothing is shown of what they compute
                start.note(place, "raised", what=type(error).__name__)
            else:
                said = f"{type(error).__name__} before, {type(problem).__name__} after"
                start.note(place, "call", problems=[("error", said)])
            raise
        if problem is not None:
            start.note(place, "call", problems=[_raised(problem)])
            return old
        if (joined := _without_value(place, old, new)) is not None:
            return joined
        donated = _donated((args, kwargs), (others, other_words))
        start.note(place, "call", problems=[*values.differences(old, new), *donated])
        self._write_texts(arguments)
        return old

    def _inside(self, args: Any, kwargs: Any) -> Any:
        """Part of a larger program: nothing runs, but texts can be compared."""
        start.note(self._pair_place, "inside", side=_world.side, of=_world.place)
        if _world.side == "new":
            return self._pair_new(*args, **kwargs)
        if not _world.side:  # no pair compares what becomes of the larger program
            with _lock:
                self._write_texts(programs.Arguments(args, kwargs))
        return self._pair_old(*args, **kwargs)

    def _write_texts(self, arguments: programs.Arguments) -> None:
        """The programs of both forms, once for each signature, and for other sizes of the mesh."""
        known = _signatures.setdefault(self._pair_place, {})
        by_type, by_value = arguments.signatures(id(self._pair_old))
        if by_type in known or by_value in known or len(known) > _TEXTS:
            return
        if len(known) == _TEXTS:
            found, whole = {"why": f"it has more than {_TEXTS} signatures"}, True
        else:
            make = functools.partial(self._texts, arguments)
            found, whole = arguments.described(make)
        known[by_value if whole else by_type] = self, arguments  # so that what has an id lives on
        start.note(self._pair_place, "text", **found)

    def _texts(self, arguments: programs.Arguments, given: list[int]) -> dict[str, Any]:
        """Both texts, and those of other sizes."""
        old, new = (functools.partial(self._as, side) for side in ("old", "new"))
        leaves = [arguments.leaves[i] for i in given]
        before, after = (arguments.text(form, given, leaves) for form in (old, new))
        sizes: dict[str, Any] = {}
        for size, resized in programs.other_sizes(before, leaves):
            texts = sizes[str(size)] = {}
            for name, form in (("before", old), ("after", new)):
                with contextlib.suppress(Exception):  # a form that refuses that number has none
                    texts[name] = arguments.text(form, given, resized)
        return {"before": before, "after": after, "sizes": sizes}

    def _as(self, side: str, args: Any, kwargs: Any) -> Any:
        """Calls one form; what it traces is of this form too."""
        before = _world.side, _world.place
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


def _described(function: Any) -> str:
    """A function by its name, where it is written, and the plain values that it closes over."""
    values: list[Any] = []
    while isinstance(function, functools.partial) or hasattr(function, "__func__"):
        if isinstance(function, functools.partial):
            values += [*function.args, *function.keywords.values()]
            function = function.func
        else:
            function = function.__func__
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None)
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # it is empty
            values.append(cell.cell_contents)
    plain = [repr(each) for each in values if isinstance(each, bool | int | float | str)]
    with_values = f" with {', '.join(plain)}"[:_SHOWN] if plain else ""
    if code is None:
        return name + with_values
    where = f"line {code.co_firstlineno}"
    if "<lambda>" in name:  # there may be several in a line
        where += f", column {max(column or 0 for _, _, column, _ in code.co_positions())}"
    return f"{name} ({where}){with_values}"


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


def _donated(old: Any, new: Any) -> list[Difference]:
    """Whether both calls have used up the same arguments."""
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    used = [
        (one.is_deleted(), other.is_deleted()) for one, other in pairs if isinstance(one, jax.Array)
    ]
    return [
        ("donation", f"argument {i} is donated {'before' if one else 'after'} only")
        for i, (one, other) in enumerate(used)
        if one != other
    ]


def _raised(error: Exception) -> Difference:
    first = programs.text_of(error).partition("\n")[0]
    return "error", f"raised {type(error).__name__} after: {first[:200]}"


def _ready(tree: Any) -> Any:
    """The same, computed: nothing of it is in flight any more."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and not is_traced(leaf):
            leaf.block_until_ready()
    return tree


def _is_tracing() -> bool:
    """Whether a program is being traced, so that nothing here has a value."""
    return is_traced(jnp.add(0, 0))
