"""When is a function that is decorated anew the same one? As `jax.pmap` of this version has it.

Histories are drawn: a function of some kind is decorated and called, something that it reads is
changed (an attribute, a global, a default, a cell, an argument that is bound), and so on. Each
result is compared with that of `jax.pmap`, to the bit.
"""

import functools
import gc
import random
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import jax_dist
from jax_dist import _compat

pytestmark = pytest.mark.mapping

_X = np.arange(2.0, dtype=np.float32)
_STEPS = 6


class _Tagged(float):
    """Equal to others that have another attribute."""

    tag: int

    def __new__(cls, value: float, tag: int) -> "_Tagged":
        made = super().__new__(cls, value)
        made.tag = tag
        return made


_VALUES = (0.0, -0.0, 1, 1.0, True, _Tagged(1.0, 2), _Tagged(1.0, 3), _Tagged(0.0, 2), "one", None)


def _seen(value: Any, x: jax.Array) -> jax.Array:
    """A result that tells all of these apart, in one operation: most of the time is XLA's."""
    return x + next(number for number, each in enumerate(_VALUES) if each is value)


class _Object:
    shared: Any = _VALUES[0]

    def __init__(self, value: Any) -> None:
        self.value = value

    def step(self, x: jax.Array) -> jax.Array:
        return _seen(self.value, _seen(self.shared, x))

    def add(self, bound: Any, x: jax.Array) -> jax.Array:
        return self.step(_seen(bound, x))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.step(x)


# Each gives two functions: one that gets the mapped function's body, which may be another object
# each time; and one that changes what it reads.
_Kind = tuple[Callable[[], Callable], Callable[[Any], None]]


def _global(value: Any) -> _Kind:
    home = {"read": value, "seen": _seen}
    helper = types.FunctionType((lambda x: seen(read, x)).__code__, home)  # noqa: F821
    return (lambda: helper), lambda new: home.update(read=new)


def _default(value: Any) -> _Kind:
    def body(x: jax.Array, value: Any = value) -> jax.Array:
        return _seen(value, x)

    return (lambda: body), lambda new: setattr(body, "__defaults__", (new,))


def _keyword_default(value: Any) -> _Kind:
    def body(x: jax.Array, *, value: Any = value) -> jax.Array:
        return _seen(value, x)

    return (lambda: body), lambda new: setattr(body, "__kwdefaults__", {"value": new})


def _cell(value: Any) -> _Kind:
    def body(x: jax.Array) -> jax.Array:
        return _seen(value, x)

    def change(new: Any) -> None:
        nonlocal value
        value = new

    return (lambda: body), change


def _made_anew(value: Any) -> _Kind:
    held = [value]
    return (lambda: lambda x, value=held[0]: _seen(value, x)), lambda new: held.__setitem__(0, new)


def _attribute(value: Any) -> _Kind:
    def body(x: jax.Array) -> jax.Array:
        return _seen(body.value, x)

    body.value = value
    return (lambda: body), lambda new: setattr(body, "value", new)


def _method(value: Any) -> _Kind:
    owner = _Object(value)
    return (lambda: owner.step), lambda new: setattr(owner, "value", new)


def _method_of_class(value: Any) -> _Kind:
    class Owner(_Object):
        shared = value

    owner = Owner(_VALUES[0])
    return (lambda: owner.step), lambda new: setattr(Owner, "shared", new)


def _method_of_another(value: Any) -> _Kind:
    owners = [_Object(value)]
    return (lambda: owners[-1].step), lambda new: owners.append(_Object(new))


def _callable(value: Any) -> _Kind:
    owner = _Object(value)
    return (lambda: owner), lambda new: setattr(owner, "value", new)


def _partial(value: Any) -> _Kind:
    held = [value]
    return (lambda: functools.partial(_seen, held[0])), lambda new: held.__setitem__(0, new)


def _partial_by_keyword(value: Any) -> _Kind:
    held = [value]
    make = lambda: functools.partial(_keyword_default(value)[0](), value=held[0])
    return make, lambda new: held.__setitem__(0, new)


def _partial_of(kind: Callable[[Any], _Kind]) -> Callable[[Any], _Kind]:
    def of(value: Any) -> _Kind:
        get, change = kind(value)
        return (lambda: functools.partial(get())), change

    return of


def _partial_of_method(value: Any) -> _Kind:
    owner = _Object(value)
    return (lambda: functools.partial(owner.add, _VALUES[0])), lambda new: setattr(
        owner, "value", new
    )


def _wrapping(value: Any) -> _Kind:
    get, change = _attribute(value)
    return (lambda: functools.wraps(get())(lambda x: get()(x) + 1)), change


_KINDS = (
    *(_global, _default, _keyword_default, _cell, _made_anew, _attribute, _method),
    *(_method_of_class, _method_of_another, _callable, _partial, _partial_by_keyword),
    *(_partial_of_method, _wrapping),
    *(_partial_of(kind) for kind in (_global, _cell, _method, _callable, _partial)),
)


def _results(pmap: Callable, seed: int) -> list[Any]:
    """What each call of a history gives."""
    rng = random.Random(seed)
    static = {"static_broadcasted_argnums": 1}
    get, change = rng.choice(_KINDS)(rng.choice(_VALUES))
    kept = get()
    mapped: list[Callable] = []
    by_value = pmap(lambda x, value: _seen(value, x), **static)
    results: list[Any] = []
    for _ in range(_STEPS):
        step = rng.random()
        if step < 0.4 or not mapped:
            fun = kept if rng.random() < 0.2 else get()
            named = rng.random() < 0.2 and _compat.PMAP_KNOWS_METHODS  # before, it then knows some
            options = {"axis_name": "i"} if named else {}
            made = pmap(fun, **options)
            del fun  # whether anybody still holds it may matter
            results.append(made(_X))
            if rng.random() < 0.5:
                mapped.append(made)
            del made
            gc.collect()  # jax 0.7.2 knows a method again for as long as a cycle holds it
        elif step < 0.75:
            change(rng.choice(_VALUES))
        elif step < 0.9:
            x = rng.choice((_X, _X.astype(np.int32)))
            results.append(rng.choice(mapped)(x))
        else:
            results.append(by_value(_X, rng.choice(_VALUES)))
    return [np.asarray(result) for result in results]


def _differences(seeds: range) -> list[str]:
    found = []
    gc.freeze()  # for `collect` to be quick
    for seed in seeds:
        expected, results = (_results(pmap, seed) for pmap in (jax.pmap, jax_dist.pmap))
        same = [
            one.dtype == other.dtype and one.tobytes() == other.tobytes()
            for one, other in zip(expected, results, strict=True)
        ]
        if not all(same):
            found.append(f"history {seed}: {results}, with jax.pmap {expected}")
        if seed % 100 == 99:
            jax.clear_caches()  # jax.pmap keeps every function alive
    gc.unfreeze()
    return found


@pytest.mark.thorough
def test_what_is_decorated_anew_is_what_it_is_to_jax_pmap():
    assert _differences(range(30)) == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 10_100, 100))
def test_10_000_histories(first: int):
    assert _differences(range(first, first + 100)) == []


@pytest.mark.parametrize(
    "equal", [(0.0, -0.0), (1, 1.0), (1, True), (_Tagged(1.0, 2), _Tagged(1.0, 3))], ids=str
)
def test_partial_objects_of_equal_values_are_two_functions(equal: tuple[Any, Any]):
    traced = []

    def body(value: Any, x: jax.Array) -> jax.Array:
        traced.append(value)
        return x

    for value in equal:
        jax_dist.pmap(functools.partial(body, value))(_X)

    assert [id(value) for value in traced] == [id(value) for value in equal]


def test_a_method_in_a_partial_object_is_traced_again_after_its_object_changed():
    owner = _Object(_VALUES[2])
    once = jax_dist.pmap(functools.partial(owner.add, _VALUES[0]))
    assert once(_X).tolist() == [2.0, 3.0]

    owner.value = _VALUES[5]

    assert once(_X).tolist() == [2.0, 3.0]  # not traced again, as under jit
    assert jax_dist.pmap(functools.partial(owner.add, _VALUES[0]))(_X).tolist() == [5.0, 6.0]
