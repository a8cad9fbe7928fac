"""Which arrays a program captures, once each, and what is said of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr

from jax_dist._rewrite.captures import (
    Capture,
    find_captures,
    warning_text,
)
from jax_dist._rewrite.interpreter import (
    constants,
    open_jaxpr,
)

pytestmark = pytest.mark.rewriting

_X = jnp.ones(3)


def _found(fun, *args):
    return find_captures(jax.make_jaxpr(fun)(*args), fun)


def test_what_is_known_of_a_capture():
    w = jnp.ones((3, 5), jnp.bfloat16)
    fun = lambda x: x @ w
    (capture,) = _found(fun, _X)

    assert (capture.name, capture.kind, capture.shape) == ("w", "closure", (3, 5))
    assert (capture.dtype, capture.bytes, capture.is_key) == ("bfloat16", 30, False)
    assert capture.refused == ""
    assert capture.value is w
    line = fun.__code__.co_firstlineno
    assert capture.captured_at.endswith(f"test_captures.py:{line}")
    assert capture.used_at == capture.captured_at


def test_python_and_numpy_scalars_are_no_arrays():
    scalar, number = np.float32(2), 3.0

    assert _found(lambda x: x * scalar + number, _X) == ()


def test_an_array_used_at_many_depths_is_found_once():
    w = np.arange(3, dtype=np.float32)
    inner = jax.jit(lambda x: x * w)
    fun = lambda x: inner(x) + jax.jit(inner)(x) * w + jax.lax.cond(x[0] > 0, inner, jnp.sin, x)

    assert [capture.name for capture in _found(fun, _X)] == ["w"]


def test_a_64_bit_array_is_known_by_its_32_bit_copy():
    w = np.array([0.1, 0.2, 0.3])
    (capture,) = _found(lambda x: jax.jit(lambda x: x * w)(x) + x * w, _X)

    assert (capture.name, capture.dtype, capture.bytes) == ("w", "float32", 12)
    assert capture.value.dtype == np.float32


def test_keys_are_known_as_keys():
    new, old, plain = jax.random.key(1), jax.random.PRNGKey(2), jnp.array([3, 4], jnp.uint32)
    fun = lambda x: x + jax.random.normal(new) + jax.random.normal(old) + plain[0]

    assert {c.name: (c.is_key, c.dtype, c.bytes) for c in _found(fun, _X)} == {
        "new": (True, "key<fry>", 8),
        "old": (True, "uint32", 8),
        "plain": (False, "uint32", 8),
    }


def test_the_key_of_a_capture_is_the_same_in_the_next_trace():
    w, n, other = jnp.ones(3), np.ones(3, np.float32), np.ones(3, np.float32)
    # A new function each time, for JAX remembers what it has traced.
    keys = lambda x=_X: [capture.key for capture in _found(lambda x: x * w * n * other, x)]
    first = keys()

    assert len(set(first)) == 2  # the content of n and other is the same
    assert first == keys(jnp.ones((5, 3)))
    n[0] = 2
    assert len(set(keys())) == 3
    n[0], kept, w = 1, w, jnp.ones(3)  # kept, so that no other gets its address
    assert [new == old for new, old in zip(keys(), first, strict=True)] == [False, True, True]
    del kept


def test_a_line_is_given_for_what_a_library_uses():
    w = jnp.arange(3.0)

    def fun(x):
        x = x + 1
        return jnp.where(x > 0, jnp.var(jnp.stack([x, w])), 0)

    (capture,) = _found(fun, _X)
    assert capture.used_at.endswith(f"test_captures.py:{fun.__code__.co_firstlineno + 2}")


def test_the_line_is_that_in_the_branch():
    w = jnp.arange(3.0)
    fun = lambda x: jax.lax.cond(
        x[0] > 0,
        jnp.sin,
        lambda x: x * w,
        x,
    )

    (capture,) = _found(fun, _X)
    assert capture.used_at.endswith(f"test_captures.py:{fun.__code__.co_firstlineno + 3}")


def _without_line(jaxpr, place):
    """The jaxpr, as if one of its equations came from nowhere."""
    body = open_jaxpr(jaxpr)
    eqns = list(body.eqns)
    info = eqns[place].source_info
    eqns[place] = eqns[place].replace(source_info=type(info)(None, info.name_stack))
    return ClosedJaxpr(body.replace(eqns=eqns), constants(jaxpr))


def test_an_equation_without_a_line_does_not_take_that_of_the_next():
    w = jnp.arange(3.0)
    fun = lambda x: jnp.sin(x * w)

    (capture,) = find_captures(_without_line(jax.make_jaxpr(fun)(_X), 0), fun)
    assert capture.used_at == ""


def test_a_body_is_read_again_for_each_array_that_it_is_given():
    u, v, w = jnp.ones(3), jnp.ones(3), jnp.ones(3)

    @jax.jit
    def inner(x, y):
        x = x * 2
        return x + y

    fun = lambda x: inner(w, x) + inner(w, v) + inner(x, u)
    line = inner.__wrapped__.__code__.co_firstlineno
    found = {capture.name: capture.used_at.rpartition(":")[2] for capture in _found(fun, _X)}
    assert found == {"w": str(line + 2), "v": str(line + 3), "u": str(line + 3)}


def test_values_of_a_trace_around_are_no_constants():
    found = []

    @jax.jit
    def outer(y):
        found.append(_found(lambda x: x * y, _X))
        return y

    outer(_X)
    assert found == [()]


def _capture(name, **changed):
    known = {
        "kind": "closure",
        "shape": (4000, 4000),
        "dtype": "float32",
        "bytes": 64_000_000,
        "captured_at": "train.py:10",
        "used_at": "train.py:12",
        "is_key": False,
        "refused": "",
    }
    return Capture(name=name, key=None, value=None, **(known | changed))


def test_the_warning_for_lifted_arrays():
    found = [
        _capture("params['w']"),
        _capture(
            "<derived>", kind="", captured_at="", shape=(), dtype="int32", bytes=4, used_at="m.py:3"
        ),
    ]

    assert warning_text(found, "step") == (
        "JXD401: 'step' captures 2 arrays: params['w']: float32[4000,4000], 64.0 MB, closure of "
        "train.py:10, used at train.py:12; <derived>: int32[], 4 B, used at m.py:3. They are "
        "arguments of the program now; to avoid this warning, pass them yourself."
    )


def test_the_warning_for_arrays_that_stay():
    found = [_capture("w", refused="it is in the body of 'f', which takes no more operands")]

    assert warning_text(found, "step", kept_because="captures='warn'") == (
        "JXD401: 'step' captures an array: w: float32[4000,4000], 64.0 MB, closure of train.py:10,"
        " used at train.py:12, not lifted: it is in the body of 'f', which takes no more operands."
        " They stay in the program, because captures='warn', and it is compiled slowly, and again "
        "for other values. Pass them as arguments."
    )
