"""`captures=` and `gathers=` of pmap; and captured arrays keep their values, as with jax.pmap."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from watching import mesh, put

import jax_dist
from jax_dist.errors import ArgumentError, CapturedArrayWarning

_X = np.arange(8.0, dtype=np.float32)
_TABLE = jnp.arange(1000.0)  # 4 kB


def _looking_up(**options):
    """Map a new function each time, for pmap warns once of each."""
    return jax_dist.pmap(lambda x: x + _TABLE[3] * lax.axis_size("i"), "i", **options)


def test_a_captured_array_is_an_argument_and_not_in_the_program():
    mapped = _looking_up()
    words = r"_TABLE: float32\[1000\], 4.0 kB.*\. They are arguments of the program now"

    with pytest.warns(CapturedArrayWarning, match=words) as caught:
        np.testing.assert_array_equal(mapped(_X), _X + 24)
    mapped(_X)  # warns no more
    mapped(_X.astype(np.int32))  # another signature, the same array

    assert [warning.filename for warning in caught] == [__file__]
    in_program = re.compile(r"constant.*1000xf32")
    assert "1000xf32" in mapped.lower(_X).as_text()
    assert not in_program.search(mapped.lower(_X).as_text())
    assert in_program.search(_looking_up(captures="allow").lower(_X).as_text())


def test_each_policy_of_captures():
    with pytest.warns(CapturedArrayWarning, match="captures='warn' is set"):
        _looking_up(captures="warn")(_X)
    mapped = _looking_up(captures="error")
    for _ in range(2):  # again in the second call, whose trace jit has kept
        with pytest.raises(ArgumentError, match="_TABLE"):
            mapped(_X)
        _looking_up(captures="allow")(_X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _looking_up(captures="allow")(_X)


def test_inside_a_jit_nothing_can_be_lifted_and_the_warning_says_so():
    mapped = _looking_up()

    with pytest.warns(CapturedArrayWarning, match="traced by a jit or a scan around it"):
        np.testing.assert_array_equal(jax.jit(lambda x: mapped(x) * 2)(_X), 2 * (_X + 24))


_ARRAYS = {
    "on one device": lambda: jnp.ones(3000),
    "on another device": lambda: jax.device_put(np.ones(3000, np.float32), jax.devices()[3]),
    "replicated": lambda: jax_dist.replicate(jnp.ones(3000)),
    "a key": lambda: jax.random.key(0),
    "a raw key": lambda: jax.random.PRNGKey(0),
    "a replicated key": lambda: jax_dist.replicate(jax.random.key(3)),
    "a mean over devices": lambda: jax_dist.pmap(lambda a: a * 2, "q")(_X).mean(),
    "a result of the same name": lambda: jax_dist.pmap(lambda a: a * 2, "i")(_X),
    "a replicated number": lambda: jax_dist.replicate(jnp.float32(2.5)),
    "NumPy": lambda: np.arange(3000.0, dtype=np.float32),
    "of weak type": lambda: jnp.full((3000,), 2.5),
    "cut, small": lambda: put(jnp.arange(8.0), mesh("q", "r", shape=(4, 2)), "q"),
    "cut, large": lambda: put(jnp.arange(800.0), mesh("q", "r", shape=(4, 2)), "q"),
}


_MAPPED = {  # functions of `[8]` from the body
    "lift": lambda body: jax_dist.pmap(body, "i"),
    "allow": lambda body: jax_dist.pmap(body, "i", captures="allow"),
    "rewrite": jax_dist.rewrite,
    "rewrite of pmap": lambda body: jax_dist.rewrite(jax.pmap(body, "i")),
}


@pytest.mark.filterwarnings("ignore::jax_dist.CapturedArrayWarning")
@pytest.mark.parametrize("way", _MAPPED)
@pytest.mark.parametrize("name", _ARRAYS)
def test_a_captured_array_keeps_its_value(name, way):
    """Wherever it lies, and when it is donated to something else and gone."""
    array = _ARRAYS[name]()

    def body(x):
        if "key" in name:
            return x + jax.random.uniform(array)
        return x - jax.jit(lambda m: m.sum())(array) - array.ravel()[0]

    expected = jax.pmap(body, "i")(_X)
    mapped = _MAPPED[way](body)

    result = mapped(_X)
    np.testing.assert_array_equal(result, expected)
    assert (result.dtype, result.weak_type) == (expected.dtype, expected.weak_type)
    np.testing.assert_array_equal(jax.jit(mapped)(_X), expected)
    np.testing.assert_array_equal(mapped.lower(_X).compile()(_X), expected)
    np.testing.assert_array_equal(mapped.trace(_X).lower().compile()(_X), expected)
    np.testing.assert_array_equal(jax.grad(lambda x: mapped(x).sum())(_X), np.ones(8))

    jax.block_until_ready(result)
    if isinstance(array, jax.Array):
        array.delete()
    np.testing.assert_array_equal(mapped(_X), expected)
    np.testing.assert_array_equal(mapped(_X + 1), expected + 1)


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", ""])
@pytest.mark.parametrize(("gathers", "kind"), [("reduce", "all-reduce"), ("keep", "all-gather")])
def test_a_gather_that_is_averaged_is_one_reduction_over_all_devices(gathers, kind, jit):
    body = lambda x: jnp.mean(lax.all_gather(x, "i"), 0)
    mapped = jit(jax_dist.pmap(body, "i", gathers=gathers))
    batch = np.arange(24.0, dtype=np.float32).reshape(8, 3)

    text = mapped.lower(batch).compile().as_text()

    assert re.findall(r" (all-gather|all-reduce)\(", text) == [kind]
    np.testing.assert_allclose(mapped(batch), [[10.5, 11.5, 12.5]] * 8)
    assert len(mapped(batch).sharding.device_set) == 8
