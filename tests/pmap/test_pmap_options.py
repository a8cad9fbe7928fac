"""`captures=` and `gathers=` of pmap: the passes of `rewrite`, in the decorator."""

import re
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_dist
from jax_dist.errors import ArgumentError, CapturedArrayWarning

_X = np.arange(8.0, dtype=np.float32)
_TABLE = jnp.arange(1000.0)  # 4 kB


def _looking_up():
    """Return a new function each time, for pmap warns once of each."""

    def look_up(x):
        return x + _TABLE[3] * lax.axis_size("i")

    return look_up


def _text(mapped, *args) -> str:
    return mapped.lower(*args).as_text()


def _collectives(mapped, *args) -> dict[str, int]:
    text = mapped.lower(*args).compile().as_text()
    kinds = ("all-gather", "all-reduce")
    return {kind: len(re.findall(rf" {kind}\(", text)) for kind in kinds}


def test_a_captured_array_is_an_argument_and_not_in_the_program():
    mapped = jax_dist.pmap(_looking_up(), "i")

    with pytest.warns(CapturedArrayWarning, match=r"_TABLE: float32\[1000\], 4.0 kB"):
        np.testing.assert_array_equal(mapped(_X), _X + 24)

    assert "1000xf32" in _text(mapped, _X)
    assert not re.search(r"constant.*1000xf32", _text(mapped, _X))
    kept = jax_dist.pmap(_looking_up(), "i", captures="allow")
    assert re.search(r"constant.*1000xf32", _text(kept, _X))


def test_the_warning_comes_once_and_points_at_the_call():
    mapped = jax_dist.pmap(_looking_up(), "i")
    with pytest.warns(CapturedArrayWarning) as caught:
        mapped(_X)
    assert [warning.filename for warning in caught] == [__file__]

    mapped(_X)
    mapped(_X.astype(np.int32))  # another signature, the same array


def test_each_policy():
    with pytest.warns(CapturedArrayWarning, match="captures='warn' is set"):
        jax_dist.pmap(_looking_up(), "i", captures="warn")(_X)
    with pytest.raises(ArgumentError, match="_TABLE"):
        jax_dist.pmap(_looking_up(), "i", captures="error")(_X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax_dist.pmap(_looking_up(), "i", captures="allow")(_X)


def test_inside_a_jit_nothing_can_be_lifted_and_the_warning_says_so():
    mapped = jax_dist.pmap(_looking_up(), "i")

    with pytest.warns(CapturedArrayWarning, match="traced by a jit or a scan around it"):
        np.testing.assert_array_equal(jax.jit(lambda x: mapped(x) * 2)(_X), 2 * (_X + 24))


def test_a_gather_that_is_averaged_is_one_reduction():
    def mean(x):
        return jnp.mean(lax.all_gather(x, "i"), axis=0)

    batch = np.arange(24.0, dtype=np.float32).reshape(8, 3)
    reduced, kept = jax_dist.pmap(mean, "i"), jax_dist.pmap(mean, "i", gathers="keep")

    assert _collectives(reduced, batch) == {"all-gather": 0, "all-reduce": 1}
    assert _collectives(kept, batch) == {"all-gather": 1, "all-reduce": 0}
    expected = np.broadcast_to([10.5, 11.5, 12.5], (8, 3))
    chex.assert_trees_all_close(reduced(batch), kept(batch), expected)


@pytest.mark.parametrize("in_axes", [(0,), (0, 0), (0, None, None), (0, {"a": 1}, 7)])
def test_axes_of_static_arguments_say_nothing(in_axes: tuple):
    """They may be there or not, as with jax.pmap, which looks at the others alone."""
    x = np.arange(8.0)
    body = lambda x, n, m: x * n + m

    assert [
        pmap(body, in_axes=in_axes, static_broadcasted_argnums=(1, 2))(x, 3, 4).tolist()
        for pmap in (jax.pmap, jax_dist.pmap)
    ] == [(x * 3 + 4).tolist()] * 2
