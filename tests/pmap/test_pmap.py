"""The decorator: forms of use, values, and the program."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from watching import lies_on

import jax_dist
from jax_dist.testing import assert_same_as_pmap
from tests.array_classes import Counter

_EIGHT = np.arange(8.0, dtype=np.float32)


def _double(x):
    return 2 * x


def _double_over_i(x):
    return x + lax.axis_size("i") * x / 8


class _Doubler:
    factor = 2

    def __call__(self, x):
        return self.factor * x

    def method(self, x):
        return self.factor * x

    @functools.partial(jax_dist.pmap, static_broadcasted_argnums=0)
    def mapped_method(self, x):
        return self.factor * x


def _without_jit(x):
    with jax.disable_jit():
        return jax_dist.pmap(_double)(x)


_FORMS = {
    "call, or bare decorator": jax_dist.pmap(_double),
    "axis name by position": jax_dist.pmap(_double_over_i, "i"),
    "called decorator": jax_dist.pmap(axis_name="i")(_double_over_i),
    "decorator by partial": functools.partial(jax_dist.pmap, axis_name="i")(_double_over_i),
    "lambda": jax_dist.pmap(lambda x: 2 * x),
    "partial": jax_dist.pmap(functools.partial(lambda a, x: a * x, 2)),
    "callable object": jax_dist.pmap(_Doubler()),
    "bound method": jax_dist.pmap(_Doubler().method),
    "method, self static": _Doubler().mapped_method,
    "jitted function": jax_dist.pmap(jax.jit(_double)),
    "vmap": jax_dist.pmap(jax.vmap(_double)),
    "builtin": jax_dist.pmap(abs),
    "wrapped again": functools.wraps(_double)(jax_dist.pmap(_double)),
    "lowered, a temporary": lambda x: jax_dist.pmap(lambda x: 2 * x).lower(x).compile()(x),
    "traced": lambda x: jax_dist.pmap(_double).trace(x).lower().compile()(x),
    "no compile": _without_jit,
}


@pytest.mark.parametrize("form", _FORMS)
def test_every_form_of_use_runs_on_all_devices(form):
    x = np.arange(16, dtype=np.float32).reshape(8, 2)

    result = _FORMS[form](x)

    np.testing.assert_array_equal(result, x if form == "builtin" else 2 * x)
    lies_on(result, jax.devices())


def test_the_result_looks_like_the_function():
    def step(state):
        """Take a step."""
        return state

    step.answer, step.lower = 42, "an attribute that would hide a method"
    mapped = jax_dist.pmap(step)

    assert (mapped.__name__, mapped.__doc__, mapped.answer) == ("step", "Take a step.", 42)
    assert mapped.__wrapped__ is step
    assert mapped.lower(_EIGHT).out_info.shape == (8,)
    # `functools.wraps` and `jax.wraps` copy attributes: a gradient must not get our `trace`.
    assert set(vars(mapped)) == {"__module__", "__doc__", "__annotations__", "answer"}
    for wrapper in (functools.wraps(mapped)(lambda x: x), jax.grad(mapped)):
        assert not {"trace", "lower", "eval_shape"} & set(vars(wrapper))


def _rank(x):
    return x - lax.pmean(x, "i") + lax.axis_index("i")


def _slope(w, x):
    """Return a gradient that shard_map's default check_vma=True would make 8 times as large."""
    return lax.pmean(jax.grad(lambda w: jnp.sum(w * x))(w), "i")


_STATIC = {"static_broadcasted_argnums": (1, 2)}
_CALLS = {  # a function, its arguments, and options
    **{f"an axis of {n}": (_rank, (_EIGHT[:n],), {}) for n in (1, 2, 3, 8)},
    "devices in reversed order": (_rank, (_EIGHT,), {"devices": jax.devices()[::-1]}),
    "devices in the middle": (_rank, (_EIGHT[:4],), {"devices": jax.devices()[2:6]}),
    "a gradient": (_slope, (1.0, _EIGHT), {"in_axes": (None, 0)}),
    "a counter": (lambda count: Counter(count.low + 1), (Counter(np.arange(8)),), {}),
    "out_axes=None": (lambda x: x * 10, (_EIGHT + 1,), {"out_axes": None}),
    **{  # of static arguments, they say nothing
        f"in_axes={axes}": (
            lambda x, n, m: x * n + m, (_EIGHT, 3, 4), {"in_axes": axes, **_STATIC}
        )
        for axes in ((0,), (0, 0), (0, None, None), (0, {"a": 1}, 7))
    },
}  # fmt: skip


@pytest.mark.parametrize("name", _CALLS)
def test_the_numbers_and_the_devices_of_jax_pmap(name):
    fun, args, options = _CALLS[name]
    assert assert_same_as_pmap(fun, *args, axis_name="i", **options) is not None


def test_in_axes_are_those_of_the_decoration():
    total = lambda batch: batch["w"].sum() + batch["x"]
    batch = {"w": np.arange(16.0, dtype=np.float32).reshape(8, 2), "x": _EIGHT}
    axes = {"w": 0, "x": 0}
    mapped = jax_dist.pmap(total, in_axes=(axes,))
    axes["w"] = None
    other = jax_dist.pmap(total, in_axes=(axes,))
    again = jax_dist.pmap(total, in_axes=({"w": 0, "x": 0},))

    wanted = (batch["w"].sum(1) + _EIGHT).tolist()
    assert mapped(batch).tolist() == again(batch).tolist() == wanted
    assert other(batch).tolist() == (batch["w"].sum() + _EIGHT).tolist()


def test_effects_of_the_body_happen_once_a_device(capfd):
    jax_dist.pmap(lambda x: jax.debug.print("saw {}", x))(np.arange(4))
    jax.effects_barrier()

    assert sorted(capfd.readouterr().out.split()) == ["0", "1", "2", "3", *["saw"] * 4]


def test_chex_fakes_our_pmap_too():
    calls = []

    def share(x, scale):
        calls.append(x)
        return scale * x / lax.psum(x, "i")

    with chex.fake_pmap():
        mapped = jax_dist.pmap(share, "i", in_axes=(0, None))
        for _ in range(2):  # in Python each time
            result = mapped(jnp.arange(4.0), 2.0)

    assert len(calls) == 2
    assert result.tolist() == pytest.approx([0.0, 1 / 3, 2 / 3, 1.0])
    assert len(result.devices()) == 1
    real = jax_dist.pmap(share, "i", in_axes=(0, None))
    lies_on(real(jnp.arange(4.0), 2.0), jax.devices()[:4])
    with pytest.raises(ValueError, match="must not wrap JAX-transformed function"):
        chex.assert_max_traces(real, n=1)


@pytest.mark.parametrize("name", ["args", "kwargs", "self", "fun", "call", "x"])
def test_a_keyword_argument_may_have_any_name(name):
    named = {name: _EIGHT}
    mapped = jax_dist.pmap(lambda v, **named: v + named[name])

    assert mapped(_EIGHT, **named).tolist() == [2.0 * k for k in range(8)]
    assert jax.jit(mapped)(_EIGHT, **named)[7] == 14
    assert mapped.lower(_EIGHT, **named).out_info.shape == (8,)
    assert mapped.eval_shape(_EIGHT, **named).shape == (8,)
    with jax.disable_jit():
        assert mapped(_EIGHT, **named)[7] == 14
