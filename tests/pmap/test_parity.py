"""Drawn calls: the numbers and the placement of jax.pmap.

What can go wrong silently hides in combinations: an axis that is not the first, beside a tree with
None in it, beside a static argument, on fewer devices than there are. So calls are drawn, not
listed. Every comparison also says where the result lives: jit(vmap) on one device gives the same
numbers.
"""

import functools
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax

from jax_dist.testing import assert_same_as_pmap

# Drawn calls also donate what no result can take over.
pytestmark = pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")

_DTYPES = (np.float32, np.int32, np.bool_, np.complex64, jnp.bfloat16, np.uint8, np.float16)


def _number(x: jax.Array) -> jax.Array:
    return x.astype(jnp.int32) if x.dtype == jnp.bool_ else x


def _turn(x: jax.Array) -> jax.Array:
    size = lax.axis_size("i")
    return lax.ppermute(x, "i", [(k, (k + 1) % size) for k in range(size)])


_PER_LEAF = {  # what the body does to each leaf; drawn_programs.py has longer bodies
    "as it is": lambda x: x,
    "a constant": lambda x: 3,
    "psum": lambda x: lax.psum(_number(x), "i"),
    "pmean": lambda x: lax.pmean(_number(x), "i"),
    "pmin": lambda x: lax.pmin(x.real, "i"),
    "gather": lambda x: lax.all_gather(x, "i"),
    "scatter": lambda x: lax.psum_scatter(lax.all_gather(_number(x), "i"), "i"),
    "all to all": lambda x: lax.all_to_all(lax.all_gather(x, "i"), "i", 0, 0),
    "turn": _turn,
    "index": lambda x: _number(x) + lax.axis_index("i").astype(_number(x).dtype),
    "cond": lambda x: lax.cond(lax.axis_index("i") > 1, lambda: x, lambda: jnp.zeros_like(x)),
    "while": lambda x: lax.while_loop(lambda c: c < 3, lambda c: c + 1, lax.axis_index("i")),
}


def _body(operation: str, static: int | None, *args: Any, **kwargs: Any) -> Any:
    leaves = [arg for number, arg in enumerate(args) if number != static], kwargs
    return jax.tree.map(lambda x: _PER_LEAF[operation](jnp.asarray(x)), leaves)


@st.composite
def arrays(draw: st.DrawFn, size: int, axis: int | None) -> np.ndarray:
    shape = draw(st.lists(st.integers(1, 3), max_size=2))
    if axis is not None:
        shape = [*shape, *[2] * max(0, axis - len(shape))]
        shape.insert(axis, size)
    values = np.arange(int(np.prod(shape))).reshape(shape) % 11
    return values.astype(draw(st.sampled_from(_DTYPES)))


@st.composite
def trees(draw: st.DrawFn, size: int) -> tuple[Any, Any]:
    """Return an argument and its in_axes: one for all leaves, or a tree."""
    axis, other = draw(st.sampled_from([0, 0, 1, 2, None])), draw(st.sampled_from([0, 1, 2, None]))
    one, two = draw(arrays(size, axis)), draw(arrays(size, axis))
    return draw(
        st.sampled_from(
            [
                (one, axis),
                ({"b": one, "a": [two]}, axis),
                ([one, None, ()], axis),
                ((one, {"x": draw(arrays(size, other))}), (axis, {"x": other})),
            ]
        )
    )


@st.composite
def calls(draw: st.DrawFn) -> tuple[functools.partial, list, dict[str, Any]]:
    """Return a body, its positional arguments, and options of `assert_same_as_pmap`."""
    size = draw(st.sampled_from([1, 2, 4, 8]))
    drawn = draw(st.lists(trees(size), min_size=1, max_size=3))
    drawn.append((np.arange(size, dtype=np.float32), 0))  # something is mapped
    static = draw(st.sampled_from([None, None, 0, 1]))
    if static is not None:
        drawn.insert(static, ("a value", None))
    options = {
        "in_axes": tuple(axes for _, axes in drawn),
        "out_axes": draw(st.sampled_from([0, 0, None])),
        "static_broadcasted_argnums": () if static is None else (static,),
        "donate_argnums": draw(st.sampled_from([(), (len(drawn) - 1,)])),
        "devices": draw(st.sampled_from([None, jax.devices()[:size][::-1]])),
        "kwargs": draw(st.sampled_from([{}, {"extra": np.arange(size)}])),
    }
    body = functools.partial(_body, draw(st.sampled_from(sorted(_PER_LEAF))), static)
    return body, [arg for arg, _ in drawn], options


_SETTINGS = hypothesis.settings(
    deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)


def _check(call: tuple[functools.partial, list, dict[str, Any]]) -> None:
    body, args, options = call
    result = assert_same_as_pmap(body, *args, axis_name="i", **options)
    assert result is not None  # both may raise the same error, and then compare nothing


@pytest.mark.thorough
@hypothesis.given(calls())
@hypothesis.settings(_SETTINGS, max_examples=40, derandomize=True)
def test_drawn_calls_do_what_pmap_does(call):
    _check(call)


@pytest.mark.slow
@hypothesis.given(calls())
@hypothesis.settings(_SETTINGS, max_examples=1000)
def test_a_thousand_new_calls_do_what_pmap_does(call):
    _check(call)
