"""What stands in for functions that map, and for mapped ones, and what tells these apart."""

import copy
import functools
import os
import pickle
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from jax_dist.migrate.verify.recording.functions import (
    OfPlaces,
    Recorded,
    described,
    name_of,
    place_of,
)


def double(x: Any, *, by: int = 2) -> Any:
    """Doubles."""
    return x * by


class Model:
    """With a method."""

    def apply(self, x: Any) -> Any:
        return self, x


def _recorded(function: Callable = double) -> Recorded:
    site = types.SimpleNamespace(kind="pmap")
    return Recorded(function, site, "double", (1,), lambda args, kwargs: (args, kwargs))


# --- a recorded function


def test_a_recorded_function_looks_like_what_it_is():
    found = _recorded()

    assert found(1, by=3) == ((1,), {"by": 3})
    assert (found.__name__, found.__qualname__) == ("double", "double")
    assert (found.__doc__, found.__module__) == ("Doubles.", __name__)
    assert (found._recorded_what, found._recorded_static) == ("double", (1,))
    assert found._recorded_site.kind == "pmap"
    assert repr(found) == repr(double)
    assert not hasattr(_recorded(functools.partial(double)), "__name__")


def test_a_recorded_function_is_a_method_too():
    class Holder:
        step = _recorded()

    holder = Holder()
    assert holder.step(1) == ((holder, 1), {})
    assert Holder.step(1) == ((1,), {})


def test_all_else_is_asked_of_the_function():
    jitted = jax.jit(double)
    found = _recorded(jitted)

    assert isinstance(found, jax.stages.Wrapped)
    for name in ("lower", "trace", "eval_shape", "clear_cache"):
        assert getattr(found, name) == getattr(jitted, name)
    with pytest.raises(AttributeError, match="no_such"):
        _ = found.no_such


def test_a_copy_that_is_being_made_has_nothing_yet():
    with pytest.raises(AttributeError, match="_recorded_function"):
        _ = Recorded.__new__(Recorded)._recorded_function
    assert copy.copy(_recorded())(1) == ((1,), {})


# --- a function that maps, of some places


def _maker(fun: Any) -> Any:
    """Maps."""
    return fun


def _made(frame: Any, places: frozenset[int], args: Any, kwargs: Any) -> Any:
    return frame.f_code.co_name, places, args, kwargs


_PLACES = frozenset({1, 2})


def test_what_it_makes_is_of_its_places_and_of_the_caller():
    found = OfPlaces(_maker, _made, _PLACES)
    here = "test_what_it_makes_is_of_its_places_and_of_the_caller"

    assert found(1, a=2) == (here, _PLACES, (1,), {"a": 2})
    assert (found.__name__, found.__doc__) == ("_maker", "Maps.")
    assert (found._recorded_maker, found._recorded_places) == (_maker, _PLACES)
    assert repr(found) == repr(_maker)


def test_it_equals_what_it_stands_for():
    one, other = (OfPlaces(_maker, _made, frozenset({place})) for place in (1, 2))

    assert one == other == _maker
    assert one != OfPlaces(double, _made, _PLACES)
    assert one != double
    assert len({one, other, _maker}) == 1
    assert pickle.loads(pickle.dumps(one)).func is _maker


def test_it_is_a_method_too():
    class Holder:
        maps = OfPlaces(_maker, _made, _PLACES)

    holder = Holder()
    assert holder.maps(1)[2] == (holder, 1)
    assert Holder.maps(1)[2] == (1,)


# --- names and places


def _wrapped() -> Callable:
    @functools.wraps(double)
    def other(*args: Any) -> Any:
        return double(*args)

    return other


def _deep(function: Any, depth: int) -> Any:
    """Partial objects are flattened, and so are wrappers around them not."""
    for _ in range(depth):
        outer = types.SimpleNamespace(__wrapped__=function, __qualname__="outer")
        function = outer
    return function


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (double, "double"),
        (functools.partial(double, 1), "double"),
        (Model().apply, "Model.apply"),
        (functools.partial(Model().apply, 1), "Model.apply"),
        (_wrapped(), "double"),
        (Model(), "Model"),
        (_deep(double, 7), "double"),
        (_deep(double, 8), "double"),
        (_deep(double, 9), "outer"),
    ],
)
def test_a_function_has_the_name_that_the_user_wrote(function: Any, name: str):
    assert name_of(function) == name


def _frame_here() -> Any:
    return sys._getframe()


def _nested(depth: int) -> Any:
    return _nested(depth - 1) if depth else sys._getframe()


def test_where_a_frame_is():
    frame = _frame_here()
    found = place_of(frame)

    assert found["file"] == os.path.realpath(__file__)
    assert found["line"] == _frame_here.__code__.co_firstlineno + 1
    assert found["instruction"] == frame.f_lasti
    assert found["within"] == ["_frame_here", "test_where_a_frame_is"]  # others are of pytest
    assert place_of(_nested(20))["within"] == ["_nested"] * 8
    outermost = types.SimpleNamespace(
        f_code=double.__code__, f_lineno=3, f_lasti=4, f_back=None, f_locals={}
    )
    assert place_of(outermost)["within"] == ["double"]


# --- functions that one place makes


def _closing_over(value: Any) -> Callable:
    return lambda x: x * value


def _with_default(value: Any) -> Callable:
    def scaled(x: Any, n: Any = value, *, m: Any = value) -> Any:
        return x * n * m

    return scaled


def _recursive() -> Callable:
    def first(x: Any) -> Any:
        return second(x)

    if False:
        second = first
    return first


def _calling_itself() -> Callable:
    def again(x: Any) -> Any:
        return again(x)

    return again


class _Array:
    shape = ()


def _line(function: Callable) -> int:
    return function.__code__.co_firstlineno


def _shown(function: Any) -> str:
    """Without the digest of all that it holds."""
    return re.sub(r", [0-9a-f]{12}\)", ")", described(function))


def test_a_function_is_told_by_its_name_and_line():
    assert _shown(double) == f"double (line {_line(double)}) with 2"
    assert _shown(Model().apply) == f"Model.apply (line {_line(Model.apply)})"
    assert _shown(abs) == "abs (line 0)"
    assert _shown(Model()) == "Model (line 0)"
    assert _shown(jax.jit(lambda x: x)).endswith("<lambda> (line 0)")
    assert _shown(_recursive()).startswith("_recursive.<locals>.first (line ")
    assert described(double) == described(double)


def test_a_function_is_told_by_the_plain_values_that_it_holds():
    said = f"_with_default.<locals>.scaled (line {_line(_with_default(1))})"

    assert _shown(_with_default(1)) == f"{said} with 1, 1"
    assert _shown(_with_default("a")) == f"{said} with 'a', 'a'"
    assert _shown(_with_default(None)) == said
    both = functools.partial(functools.partial(double, 1.5), by=True)
    assert _shown(both) == f"double (line {_line(double)}) with 1.5, True, 2"
    assert described(_closing_over(3)) != described(_closing_over(4))
    assert _shown(_closing_over(3)).endswith(" with 3")
    assert _shown(_with_default("a" * 100)).endswith(f" with '{'a' * 53}")
    assert described(_with_default("a" * 100)) != described(_with_default("a" * 101))


class _Slots:
    __slots__ = ()


_MODEL = Model()
_MANY = [object() for _ in range(101)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (_Array(), _Array()),
        (Model(), Model()),
        (Model().apply, Model().apply),
        (_Slots(), _Slots()),
        (double, abs),
        (double, _line),
        (lambda x: x, lambda x: x),
        (_closing_over(3), _closing_over(4)),
        (_closing_over(double), _closing_over(_line)),
        (_with_default(double), _with_default(_line)),
        (jax.jit(double), jax.jit(_line)),
        (np.float32(1), np.float32(2)),
        (np.dtype("int8"), np.dtype("int16")),
        ((1, double), (1, _line)),
        ((1, (2,)), (1, 2)),
        ([1], (1,)),
        ({"a": double}, {"a": _line}),
        ({"a": double}, {"b": double}),
        (functools.partial(double, "by", 3), functools.partial(double, by=3)),
        (functools.partial(double, 1), functools.partial(_line, 1)),
        (1, True),
        (b"a", "a"),
        ([1] * 101, [1] * 101),
        (dict.fromkeys(range(101)), dict.fromkeys(range(101))),
        ((*_MANY, 1), (*_MANY, 1)),
    ],
)
def test_a_function_is_told_by_what_it_holds(one: Any, other: Any):
    for holding in (_closing_over, functools.partial(functools.partial, double)):
        assert described(holding(one)) == described(holding(one))
        assert described(holding(one)) != described(holding(other))
    if callable(one):
        assert described(one) != described(other)


@pytest.mark.parametrize(
    "make",
    [
        lambda: _closing_over(3),
        lambda: _closing_over(_closing_over(double)),
        lambda: functools.partial(double, [1, {"a": (2, double)}], by=None),
        lambda: jax.jit(_closing_over(double)),
        lambda: np.float32(3),
        lambda: [1] * 100,
        lambda: dict.fromkeys(range(100)),
        _recursive,
        _calling_itself,
        lambda: _MODEL.apply,
    ],
)
def test_what_is_made_again_of_the_same_values_is_the_same(make: Callable[[], Any]):
    assert described(_closing_over(make())) == described(_closing_over(make()))


def test_a_mapped_function_is_told_by_what_it_maps():
    def mapped(number: int, what: str) -> Any:
        site = types.SimpleNamespace(number=number)
        return _closing_over(Recorded(double, site, what, (), lambda *_: None))

    assert described(mapped(1, "f")) == described(mapped(1, "f"))
    assert len({described(mapped(*each)) for each in ((1, "f"), (2, "f"), (1, "g"))}) == 3


def test_of_many_values_the_last_are_told_by_which_they_are():
    def nested(depth: int) -> Any:
        return [nested(depth - 1)] if depth else [3]

    assert described(_closing_over(nested(98))) == described(_closing_over(nested(98)))
    assert described(_closing_over(nested(99))) != described(_closing_over(nested(99)))


def test_a_function_that_is_loaded_again_is_another_one():
    def load() -> Callable:
        names: dict[str, Any] = {}
        exec("def f(x):\n    return x\n", names)
        return names["f"]

    one, other = load(), load()
    assert described(one) == described(one)
    assert described(one) != described(other)


def test_an_object_that_takes_the_place_of_another_is_another_one():
    """Of those that are gone, some lay where others come to lie."""
    assert len({described(_closing_over(Model())) for _ in range(20)}) == 20
    assert len({described(_closing_over(_Slots())) for _ in range(20)}) == 20


def test_a_lambda_is_told_by_its_column_too():
    one, other = (lambda x: x + 1), (lambda x: x + 2)

    assert described(one) != described(other)
    assert "<lambda> (line " in described(one)
    assert int(_shown(one).split("column ")[1].rstrip(")")) < int(
        _shown(other).split("column ")[1].rstrip(")")
    )


def test_one_function_that_is_mapped_in_several_ways():
    options = ([0], {"out_axes": 1, "devices": jax.devices()})
    assert described(abs, options) == described(abs, ([0], {**options[1]}))
    assert described(abs, options) != described(abs, ([0], {**options[1], "out_axes": 0}))
    assert described(abs, options) != described(abs, ([1], options[1]))


def test_functions_that_have_other_attributes():
    def with_scale(scale):
        def scaled(x):
            return x * scaled.scale

        scaled.scale = scale
        return scaled

    assert described(with_scale(2)) == described(with_scale(2))
    assert described(with_scale(2)) != described(with_scale(3))
