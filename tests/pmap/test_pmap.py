"""The decorator: forms of use, values, and the program."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from watching import lies_on

import jax_dist

pytestmark = pytest.mark.mapping

_EIGHT = np.arange(8.0, dtype=np.float32)


# ------------------------------------------------------------------------------ forms of use


def _double(x):
    return 2 * x


class _Doubler:
    factor = 2

    def __call__(self, x):
        return self.factor * x

    def method(self, x):
        return self.factor * x

    @functools.partial(jax_dist.pmap, static_broadcasted_argnums=0)
    def mapped_method(self, x):
        return self.factor * x


@jax_dist.pmap
def _bare_decorator(x):
    return 2 * x


@jax_dist.pmap(axis_name="i")
def _called_decorator(x):
    return x + lax.axis_size("i") * x / 8


@functools.partial(jax_dist.pmap, axis_name="i")
def _partial_decorator(x):
    return x + lax.axis_size("i") * x / 8


_FORMS = {
    "call": jax_dist.pmap(_double),
    "axis name by position": jax_dist.pmap(_double, "i"),
    "bare decorator": _bare_decorator,
    "called decorator": _called_decorator,
    "decorator by partial": _partial_decorator,
    "lambda": jax_dist.pmap(lambda x: 2 * x),
    "partial": jax_dist.pmap(functools.partial(lambda a, x: a * x, 2)),
    "callable object": jax_dist.pmap(_Doubler()),
    "bound method": jax_dist.pmap(_Doubler().method),
    "method, self static": _Doubler().mapped_method,
    "jitted function": jax_dist.pmap(jax.jit(_double)),
    "vmap": jax_dist.pmap(jax.vmap(_double)),
    "builtin": jax_dist.pmap(abs),
    "wrapped again": functools.wraps(_double)(jax_dist.pmap(_double)),
    "alias by partial": functools.partial(jax_dist.pmap, axis_name="i")(_double),
    "lowered": lambda x: jax_dist.pmap(_double).lower(x).compile()(x),
    "traced": lambda x: jax_dist.pmap(_double).trace(x).lower().compile()(x),
    "bare jit object": jax_dist.pmap(_double).jitted,
    "no compile": lambda x: _without_jit(jax_dist.pmap(_double), x),
}


def _without_jit(mapped, x):
    with jax.disable_jit():
        return mapped(x)


@pytest.mark.parametrize("form", _FORMS)
def test_every_form_of_use_runs_on_all_devices(form):
    x = np.arange(16, dtype=np.float32).reshape(8, 2)

    result = _FORMS[form](x)

    np.testing.assert_array_equal(result, x if form == "builtin" else 2 * x)
    lies_on(result, jax.devices())


def test_the_result_looks_like_the_function():
    def step(state):
        """Takes a step."""
        return state

    mapped = jax_dist.pmap(step)

    assert (mapped.__name__, mapped.__doc__) == ("step", "Takes a step.")
    assert mapped.__wrapped__ is step


def test_pmap_is_a_value_like_any_other():
    assert jax_dist.pmap is jax_dist.pmap
    assert {"map": jax_dist.pmap}["map"] is jax_dist.pmap
    assert functools.wraps(jax_dist.pmap)(lambda: 0).__name__ == "pmap"


# ------------------------------------------------------------------------------------- values


_DTYPES = (np.float32, jnp.bfloat16, jnp.int4, np.bool_)


@pytest.mark.parametrize("dtype", _DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)], ids=str)
@pytest.mark.parametrize("axis", [0, 1, None, -1])
def test_results_of_size_zero_are_placed_as_by_jax_pmap(shape, axis, dtype):
    body = lambda x: (jnp.zeros(shape, dtype), x)
    axes = (axis, 0)
    ours = jax_dist.pmap(body, "i", out_axes=axes)(_EIGHT)[0]
    if axis == -1:  # which jax.pmap puts at 0
        assert ours.shape == (*shape, 8)
        return
    theirs = jax.pmap(body, "i", out_axes=axes)(_EIGHT)[0]

    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    assert ours.sharding == theirs.sharding


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_a_shorter_axis_takes_the_first_devices(count):
    result = jax_dist.pmap(lambda x: x - lax.pmean(x, "i"), "i")(_EIGHT[:count])

    np.testing.assert_allclose(result, _EIGHT[:count] - (count - 1) / 2, atol=1e-6)
    lies_on(result, jax.devices()[:count])


@pytest.mark.parametrize("order", [slice(None, None, -1), slice(2, 6), slice(5, None)])
def test_devices_are_used_in_the_order_given(order):
    devices = jax.devices()[order]

    result = jax_dist.pmap(lambda x: x + lax.axis_index("i"), "i", devices=devices)(
        np.zeros(len(devices), np.int32)
    )

    assert result.tolist() == list(range(len(devices)))
    lies_on(result, devices)


def test_backend_and_axis_size_are_accepted():
    mapped = jax_dist.pmap(lambda x: lax.psum(x, "i"), "i", backend="cpu", axis_size=8)

    assert mapped(_EIGHT).tolist() == [28.0] * 8


def test_axes_other_than_the_first():
    x = np.arange(24.0, dtype=np.float32).reshape(3, 8)

    result = jax_dist.pmap(lambda x: x + 1, in_axes=1, out_axes=1)(x)
    negative = jax_dist.pmap(lambda x: x[:, None] + 1, in_axes=-1, out_axes=-2)(x)

    np.testing.assert_array_equal(result, x + 1)
    assert result.sharding.spec == P(None, result.sharding.mesh.axis_names[0])
    np.testing.assert_array_equal(negative[..., 0], x + 1)
    assert negative.shape == (3, 8, 1)


def test_in_axes_are_those_of_the_decoration():
    def total(batch):
        return batch["w"].sum() + batch["x"]

    batch = {"w": np.arange(16.0, dtype=np.float32).reshape(8, 2), "x": _EIGHT}
    axes = {"w": 0, "x": 0}
    mapped = jax_dist.pmap(total, in_axes=(axes,))
    axes["w"] = None
    other = jax_dist.pmap(total, in_axes=(axes,))
    again = jax_dist.pmap(total, in_axes=({"w": 0, "x": 0},))

    wanted = (batch["w"].sum(1) + _EIGHT).tolist()
    assert mapped(batch).tolist() == again(batch).tolist() == wanted
    assert other(batch).tolist() == (batch["w"].sum() + _EIGHT).tolist()


def test_axes_that_equal_a_known_one_are_still_refused():
    jax_dist.pmap(_double, in_axes=1, out_axes=1)

    for axes in (True, 1.0, (True,)):
        for name in ("in_axes", "out_axes"):
            with pytest.raises(TypeError, match=f"pmap {name} must be an int"):
                jax_dist.pmap(_double, **{name: axes})


@pytest.mark.parametrize("numbers", [{1}, np.array([1]), {1: None}.keys()], ids=repr)
def test_numbers_of_arguments_may_come_in_any_container(numbers):
    times = jax_dist.pmap(lambda x, n: x * n, static_broadcasted_argnums=numbers)
    donating = jax_dist.pmap(lambda x, y: x + y, donate_argnums=numbers)

    assert times(_EIGHT, 3).tolist() == (_EIGHT * 3).tolist()
    assert donating(_EIGHT, jnp.array(_EIGHT)).tolist() == (_EIGHT * 2).tolist()


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")  # JAX says it, of jit too
@pytest.mark.parametrize(
    "body",
    [lambda x: x.sum() + x, lambda x: x * 2, lambda x: x + jnp.ones(()), lambda x: x],
    ids=["with its sum", "with a number", "with an array", "as it is"],
)
@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.vmap], ids=["", "jit", "vmap"])
def test_an_array_of_64_bits_while_there_are_none(body, around):
    with jax.enable_x64(True):  # noqa: FBT003 - as JAX has it
        x = jnp.arange(8.0) if around is not jax.vmap else jnp.arange(16.0).reshape(2, 8)

    found, wanted = (around(mapping(body))(x) for mapping in (jax_dist.pmap, jax.vmap))

    assert (found.dtype, found.tolist()) == (wanted.dtype, wanted.tolist())


def test_out_axes_are_those_of_the_decoration():
    out_axes = {"a": 0}
    mapped = jax_dist.pmap(lambda x: {"a": x}, out_axes=out_axes)
    out_axes["a"] = None

    assert mapped(np.arange(8.0, dtype=np.float32))["a"].shape == (8,)


def test_out_axes_none_gives_the_value_of_the_first_device():
    result = jax_dist.pmap(lambda x: x * 10, out_axes=None)(_EIGHT + 1)

    assert float(result) == 10.0
    assert result.sharding.is_fully_replicated
    assert len(result.sharding.device_set) == 8


def test_keywords_static_values_and_unmapped_arguments_together():
    def body(scale, power, x, *, shift):
        return scale * x**power + shift

    mapped = jax_dist.pmap(body, in_axes=(None, None, 0), static_broadcasted_argnums=1)

    assert mapped(2.0, 2, _EIGHT, shift=_EIGHT).tolist() == [2.0 * k * k + k for k in range(8)]


def test_gradients_are_those_of_pmap_not_n_times_as_large():
    def update(w, x):
        return lax.pmean(jax.grad(lambda w: jnp.sum(w * x))(w), "i")

    mapped = jax_dist.pmap(update, "i", in_axes=(None, 0))

    # shard_map's default check_vma=True gives 28.0 here.
    np.testing.assert_allclose(mapped(1.0, _EIGHT), [3.5] * 8)


def test_effects_of_the_body_happen_once_a_device(capfd):
    jax_dist.pmap(lambda x: jax.debug.print("saw {}", x))(np.arange(4))
    jax.effects_barrier()

    assert sorted(capfd.readouterr().out.split()) == ["0", "1", "2", "3", *["saw"] * 4]


# -------------------------------------------------------------------------------- the program


def test_program_and_cache_key_have_no_address_in_them():
    class Callable:
        def __call__(self, x):
            return lax.psum(x, "pmap_axis_0")

    text = jax_dist.pmap(functools.partial(Callable())).lower(_EIGHT).as_text()

    assert "jit_Callable" in text
    assert "pmap_axis_0" in text
    assert not re.search(r"0x[0-9a-f]{6,}", text)


def test_lower_takes_shapes():
    lowered = jax_dist.pmap(lambda x: x - lax.pmean(x, "i"), "i").lower(
        jax.ShapeDtypeStruct((8, 2), jnp.float32)
    )

    assert "all-reduce" in lowered.compile().as_text()


@pytest.mark.parametrize("name", ["args", "kwargs", "self", "fun", "call", "x"])
def test_a_keyword_argument_may_have_any_name(name):
    named = {name: _EIGHT}
    mapped = jax_dist.pmap(lambda v, **named: v + named[name])

    assert mapped(_EIGHT, **named).tolist() == [2.0 * k for k in range(8)]
    assert jax.jit(mapped)(_EIGHT, **named)[7] == mapped.jitted(_EIGHT, **named)[7] == 14
    assert mapped.lower(_EIGHT, **named).out_info.shape == (8,)
    assert mapped.eval_shape(_EIGHT, **named).shape == (8,)
    with jax.disable_jit():
        assert mapped(_EIGHT, **named)[7] == 14
