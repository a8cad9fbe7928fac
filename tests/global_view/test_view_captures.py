"""Arrays that a step captures become arguments, once on all devices, as in `jax_dist.pmap`."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_dist import global_view
from jax_dist.errors import ArgumentError, CapturedArrayWarning

_TABLE = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)
_X = np.random.default_rng(1).normal(size=(8, 4, 64)).astype(np.float32)
_W = np.ones((16, 256), np.float32)


def _step(w, x):
    return w - lax.pmean(jnp.mean(x @ _TABLE), "i"), x @ _TABLE


def test_a_captured_array_is_an_argument_and_warned_of_once():
    kept = global_view(_step, "i", shardings="fsdp", captures="allow")
    view = global_view(_step, "i", shardings="fsdp", donate_argnums=0)

    with pytest.warns(CapturedArrayWarning, match="_TABLE: float32\\[64,16\\]"):
        state, first = view(view.place(_W), _X)
    again, _ = view(state, _X)  # a second warning would be an error

    assert state.is_deleted()
    wanted, rest = kept(kept.place(_W), _X)
    wanted, _ = kept(wanted, _X)
    assert np.array_equal(again, wanted)
    assert np.array_equal(first, rest)
    lowered = view.lower(again, _X)
    assert 'dense<"0x' not in lowered.as_text()
    assert 'dense<"0x' in kept.lower(again, _X).as_text()
    assert lowered.compile().memory_analysis().argument_size_in_bytes >= _TABLE.nbytes


def test_the_program_without_captured_arrays_is_called_as_the_step():
    view = global_view(_step, "i")
    with pytest.warns(CapturedArrayWarning):
        wanted, _ = view(_W, _X)

    lowered = view.lower(_W, _X)

    assert len(jax.tree.leaves(lowered.in_tree.unflatten(range(lowered.in_tree.num_leaves)))) == 2
    program = lowered.compile()
    state, _ = program(*jax.device_put((_W, _X), program.input_shardings[0]))
    assert np.array_equal(state, wanted)


def test_in_a_trace_around_it_says_that_the_array_is_kept():
    view = global_view(_step, "i")

    with pytest.warns(CapturedArrayWarning, match="traced by a jit"):
        inside, _ = jax.jit(view)(_W, _X)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CapturedArrayWarning)
        outside, _ = view(_W, _X)
    np.testing.assert_allclose(inside, outside, rtol=1e-6)


def test_captured_arrays_can_be_an_error():
    with pytest.raises(ArgumentError, match="_TABLE"):
        global_view(_step, "i", captures="error")(_W, _X)
