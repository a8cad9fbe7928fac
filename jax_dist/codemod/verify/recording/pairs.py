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
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jax_dist._exceptions import text_of

from . import programs, start
from .programs import is_traced

_SHOWN = 60  # characters of a value
_TEXTS = 32  # signatures of one place whose programs are written down

_Difference: TypeAlias = tuple[str, str]  # "structure", "type", "value" and so on; what differs


class _World(threading.local):
    """What one thread traces."""

    side = ""  # "old" or "new": a form of a pair
    place: int | None = None  # that of the pair


_world = _World()
_lock = threading.RLock()  # two pairs must not be in flight together either
# Else JAX would take the trace of a function, such as the body of a scan, from the other form.
_new_traces = jax.make_user_context("")
_signatures: dict[int, dict[Any, Any]] = {}  # by place: those whose texts were written


def both(place: int, old: Callable[[], Any], new: Callable[[], Any]) -> Any:
    """As `start.both`."""
    if _world.side and _is_tracing():  # inside of a pair's program: it holds one of the two
        start.note(place, "inside", side=_world.side, of=_world.place)
        return (new if _world.side == "new" else old)()
    value = old()
    try:
        other = new()
    except Exception as error:  # noqa: BLE001  # the program goes on with what it had
        start.note(place, "value", problems=[_raised(error)])
        return value
    return _joined(place, value, other)


def _joined(place: int, old: Any, new: Any) -> Any:
    """The old value; functions and iterators in it go on being compared."""
    if (joined := _without_value(place, old, new)) is not None:
        return joined
    leaves, tree = jax.tree.flatten(old)
    others, other_tree = jax.tree.flatten(new)
    start.note(place, "value", problems=[*_differences(old, new)])
    if tree != other_tree or not any(map(_is_function, leaves)):
        return old
    return tree.unflatten(
        _Pair(place, one, other) if _is_function(one) and _is_function(other) else one
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
    if _is_function(old) and _is_function(new):
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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
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
            same = type(error) is type(problem)
            said = f"{type(error).__name__} before, {type(problem).__name__} after"
            start.note(place, "call", problems=[] if same else [("error", said)], raised=True)
            raise
        if problem is not None:
            start.note(place, "call", problems=[_raised(problem)])
            return old
        if (joined := _without_value(place, old, new)) is not None:
            return joined
        donated = _donated((args, kwargs), (others, other_words))
        start.note(place, "call", problems=[*_differences(old, new), *donated])
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
        values = [arguments.leaves[i] for i in given]
        before, after = (arguments.text(form, given, values) for form in (old, new))
        sizes: dict[str, Any] = {}
        for size, resized in programs.other_sizes(before, values):
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


def _donated(old: Any, new: Any) -> list[_Difference]:
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


def _raised(error: Exception) -> _Difference:
    first = text_of(error).partition("\n")[0]
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


# --- whether two values are the same: bits, types, placement


def _differences(old: Any, new: Any) -> Iterator[_Difference]:
    """What differs, leaf by leaf; of functions, nothing is known."""
    ones, others = jax.tree_util.tree_flatten_with_path(old), jax.tree_util.tree_flatten(new)
    if ones[1] != others[1]:
        yield "structure", f"{_short(ones[1])} before, {_short(others[1])} after"
        return
    for (path, one), other in zip(ones[0], others[0], strict=True):
        where = jax.tree_util.keystr(path)
        for kind, said in _of_leaves(one, other):
            yield kind, f"{where}: {said}" if where else said


def _of_leaves(old: Any, new: Any) -> Iterator[_Difference]:
    if isinstance(old, jax.Array) and isinstance(new, jax.Array):
        yield from _of_arrays(old, new)
    elif _is_function(old) and _is_function(new):
        return
    elif isinstance(old, np.ndarray) and isinstance(new, np.ndarray):
        if type(old) is not type(new) or not _same_bits(old, new):
            yield "value", f"{_short(old)} before, {_short(new)} after"
    elif isinstance(old, jax.Array | np.ndarray) and isinstance(new, jax.Array | np.ndarray):
        kinds = (type(each).__name__ for each in (old, new))
        yield "type", " before, ".join(kinds) + " after"
        if not _same_bits(np.asarray(old), np.asarray(new)):
            yield "value", "the values differ"
    elif not _same_object(old, new):
        yield "value", f"{_short(old)} before, {_short(new)} after"


def _of_arrays(old: jax.Array, new: jax.Array) -> Iterator[_Difference]:
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        kinds = (f"{each.dtype}{list(each.shape)}" for each in (old, new))
        yield "type", " before, ".join(kinds) + " after"
        return
    if getattr(old, "weak_type", False) != getattr(new, "weak_type", False):
        yield "type", "a weak type on one side only"
    if jnp.issubdtype(old.dtype, jax.dtypes.prng_key):
        old, new = jax.random.key_data(old), jax.random.key_data(new)
    ones, others = (  # what each device holds, by its number
        {shard.device.id: (str(shard.index), np.asarray(shard.data)) for shard in shards}
        for shards in (old.addressable_shards, new.addressable_shards)
    )
    where = [{key: index for key, (index, _) in each.items()} for each in (ones, others)]
    if where[0] != where[1]:
        count, new_count = (len(each.sharding.device_set) for each in (old, new))
        if count != new_count:
            yield "placement", f"on {count} devices before, on {new_count} after"
        else:
            yield "placement", "other slices on the devices, or another order of them"
        same = _same_bits(np.asarray(old), np.asarray(new))
    else:
        same = all(_same_bits(data, others[key][1]) for key, (_, data) in ones.items())
    if not same:
        yield "value", _how_far(np.asarray(old), np.asarray(new))


def _same_bits(old: np.ndarray, new: np.ndarray) -> bool:
    if old.shape != new.shape or old.dtype != new.dtype:
        return False
    if old.dtype == object:
        return _same_object(old.tolist(), new.tolist())
    return np.ascontiguousarray(old).tobytes() == np.ascontiguousarray(new).tobytes()


def _same_object(old: Any, new: Any) -> bool:
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    try:
        return bool(old == new) or repr(old) == repr(new)
    except Exception:  # noqa: BLE001  # whatever comparing means to the program's own types
        return False


def _how_far(old: np.ndarray, new: np.ndarray) -> str:
    try:
        with np.errstate(all="ignore"):
            far = np.abs(old.astype(np.float64) - new.astype(np.float64))
        return f"differs by up to {float(np.nanmax(far)):.3g}"
    except (TypeError, ValueError):
        return "the values differ"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _is_function(value: Any) -> bool:
    """Whether it is a function to call, and no array or class."""
    return isinstance(value, Callable) and not isinstance(value, jax.Array | np.ndarray | type)
