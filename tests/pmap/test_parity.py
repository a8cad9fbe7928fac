"""Drawn programs: the numbers and the placement of jax.pmap.

What can go wrong silently hides in combinations: an axis that is not the first, beside a tree with
None in it, beside a static argument, on fewer devices than there are. So functions are drawn, not
listed. Every comparison also says where the result lives: jit(vmap) on one device gives the same
numbers.
"""

import dataclasses
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax

from jax_dist.testing import assert_same_as_pmap

pytestmark = [
    # Drawn programs also donate what no result can take over.
    pytest.mark.filterwarnings("ignore:Some donated buffers were not usable"),
]

_DTYPES = (np.float32, np.int32, np.bool_, np.complex64, jnp.bfloat16, np.uint8, np.float16)
_NAME = "i"


def _number(x: jax.Array) -> jax.Array:
    return x.astype(jnp.int32) if x.dtype == jnp.bool_ else x


def _turn(x: jax.Array) -> jax.Array:
    size = lax.axis_size(_NAME)
    return lax.ppermute(x, _NAME, [(k, (k + 1) % size) for k in range(size)])


def _halves(x: jax.Array) -> jax.Array:
    size = lax.axis_size(_NAME)
    groups = [list(range(0, size, 2)), list(range(1, size, 2))] if size > 1 else [[0]]
    return lax.psum(_number(x), _NAME, axis_index_groups=groups)


def _noise(x: jax.Array) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(7), lax.axis_index(_NAME))
    return jax.random.uniform(key, x.shape)


def _repeated(x: jax.Array) -> jax.Array:
    return lax.scan(lambda c, _: (lax.pmax(_turn(c), _NAME), None), _number(x).real, None, 3)[0]


_PER_LEAF = {  # what the body does to each leaf
    "as it is": lambda x: x,
    "a constant": lambda x: 3,
    "psum": lambda x: lax.psum(_number(x), _NAME),
    "pmean": lambda x: lax.pmean(_number(x), _NAME),
    "pmin": lambda x: lax.pmin(x.real, _NAME),
    "gather": lambda x: lax.all_gather(x, _NAME),
    "scatter": lambda x: lax.psum_scatter(lax.all_gather(_number(x), _NAME), _NAME),
    "all to all": lambda x: lax.all_to_all(lax.all_gather(x, _NAME), _NAME, 0, 0),
    "turn": _turn,
    "index": lambda x: _number(x) + lax.axis_index(_NAME).astype(_number(x).dtype),
    "noise": _noise,
    "scan": _repeated,
    "cond": lambda x: lax.cond(lax.axis_index(_NAME) > 1, lambda: x, lambda: jnp.zeros_like(x)),
    "while": lambda x: lax.while_loop(lambda c: c < 3, lambda c: c + 1, lax.axis_index(_NAME)),
    "groups": _halves,
}


@dataclasses.dataclass(frozen=True)
class Program:
    """A drawn call of pmap."""

    size: int
    args: tuple
    in_axes: Any
    operation: str
    out_axis: int | None
    static: int | None
    keyword: bool
    donate: tuple[int, ...]
    reversed_devices: bool

    def body(self, *args: Any, **kwargs: Any) -> Any:
        if self.static is not None:
            args = args[: self.static] + args[self.static + 1 :]
        operation = _PER_LEAF[self.operation]
        return jax.tree.map(lambda x: operation(jnp.asarray(x)), (args, kwargs))

    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"in_axes": self.in_axes, "donate_argnums": self.donate}
        if self.out_axis is None:
            options["out_axes"] = None
        if self.static is not None:
            options["static_broadcasted_argnums"] = (self.static,)
        if self.reversed_devices:
            options["devices"] = jax.devices()[: self.size][::-1]
        return options


@st.composite
def leaves(draw: st.DrawFn, size: int, axis: int | None) -> np.ndarray:
    shape = draw(st.lists(st.integers(1, 3), max_size=2))
    if axis is not None:
        shape = [*shape, *[2] * max(0, axis - len(shape))]
        shape.insert(axis, size)
    dtype = draw(st.sampled_from(_DTYPES))
    values = np.arange(int(np.prod(shape))).reshape(shape) % 11
    return values.astype(dtype)


@st.composite
def trees(draw: st.DrawFn, size: int) -> tuple[Any, Any]:
    """Return an argument and its in_axes: one for all leaves, or a tree."""
    axis = draw(st.sampled_from([0, 0, 1, 2, None]))
    kind = draw(st.sampled_from(["leaf", "dict", "tuple with own axes", "with None in it"]))
    if kind == "leaf":
        return draw(leaves(size, axis)), axis
    if kind == "dict":
        return {"b": draw(leaves(size, axis)), "a": [draw(leaves(size, axis))]}, axis
    if kind == "with None in it":
        return [draw(leaves(size, axis)), None, ()], axis
    other = draw(st.sampled_from([0, 1, 2, None]))
    pair = (draw(leaves(size, axis)), {"x": draw(leaves(size, other))})
    return pair, (axis, {"x": other})


@st.composite
def programs(draw: st.DrawFn) -> Program:
    size = draw(st.sampled_from([1, 2, 4, 8]))
    drawn = draw(st.lists(trees(size), min_size=1, max_size=3))
    args, in_axes = [arg for arg, _ in drawn], [axes for _, axes in drawn]
    args.append(np.arange(size, dtype=np.float32))  # something is mapped
    in_axes.append(0)
    donate = draw(st.sampled_from([(), (len(args) - 1,)]))
    static = draw(st.sampled_from([None, None, 0, 1]))
    if static is not None:
        args.insert(static, "a value")
        in_axes.insert(static, None)
        donate = tuple(number + (number >= static) for number in donate)
    operation = draw(st.sampled_from(sorted(_PER_LEAF)))
    return Program(
        size=size,
        args=tuple(args),
        in_axes=tuple(in_axes),
        operation=operation,
        out_axis=draw(st.sampled_from([0, 0, None])),
        static=static,
        keyword=draw(st.booleans()),
        donate=donate,
        reversed_devices=draw(st.booleans()),
    )


def _check(program: Program) -> None:
    kwargs = {"extra": np.arange(program.size)} if program.keyword else {}
    result = assert_same_as_pmap(
        program.body, *program.args, axis_name=_NAME, **program.options(), kwargs=kwargs
    )
    assert result is not None  # both may raise the same error, and then compare nothing


_SETTINGS = {
    "deadline": None,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow],
}


@pytest.mark.thorough
@hypothesis.given(programs())
@hypothesis.settings(max_examples=40, derandomize=True, **_SETTINGS)
def test_drawn_programs_do_what_pmap_does(program):
    _check(program)


@pytest.mark.slow
@hypothesis.given(programs())
@hypothesis.settings(max_examples=1000, **_SETTINGS)
def test_a_thousand_new_programs_do_what_pmap_does(program):
    _check(program)
