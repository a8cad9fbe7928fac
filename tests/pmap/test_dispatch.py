"""Calls: what compiles, what runs in Python, what is donated, and what is moved."""

import functools
import gc
import operator
import weakref

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from watching import compiles, lies_on, mesh, put, python_calls

import jax_dist
from jax_dist import _compat
from jax_dist.pmap import _dispatchers as _known

_EIGHT = np.arange(8.0, dtype=np.float32)


def _double(x):
    return 2 * x


def test_decorating_again_compiles_once():
    body = lambda x: lax.psum(x, "i") * 3
    with compiles(1):
        for _ in range(3):
            jax_dist.pmap(body, "i")(_EIGHT)
    with compiles(1):  # other options, another program
        jax_dist.pmap(body, "i", out_axes=None)(_EIGHT)


@pytest.mark.parametrize("pmap", [jax_dist.pmap, jax.pmap])
def test_a_method_is_known_by_its_function_and_its_object(pmap):
    class Scaler:
        factor, traced = 2, 0

        def scale(self, x):
            self.traced += 1
            return self.factor * x

    scaler, other = Scaler(), Scaler()

    assert pmap(scaler.scale)(_EIGHT)[1] == 2
    scaler.factor = other.factor = 5
    again = pmap(scaler.scale)(_EIGHT)[1]
    assert pmap(other.scale)(_EIGHT)[1] == 5
    assert (again, scaler.traced, other.traced) == (2, 1, 1)


def test_a_partial_object_is_known_by_itself():
    traced = []

    def add(n, x):
        traced.append(n)
        return x + n

    first = functools.partial(add, 1)
    for partial in (first, first, functools.partial(add, 1)):  # what `add` reads may have changed
        assert jax_dist.pmap(partial)(_EIGHT)[1] == 2
    assert traced == [1, 1]


@pytest.mark.filterwarnings("ignore::jax_dist.CapturedArrayWarning")
@pytest.mark.parametrize("captured", [1.0, np.ones(900)], ids=["a number", "an array"])
def test_functions_die_when_their_users_drop_them(captured):
    def make():
        table = captured + 1

        def body(x):
            return x + jnp.sum(table)

        jax_dist.pmap(body)(_EIGHT)
        return weakref.ref(body)

    before = len(_known)
    dead = make()
    gc.collect()

    assert dead() is None
    assert len(_known) <= before


_LARGE = np.ones(900)


_ONCE = {  # what a body computes, and how its pmap is called
    "an argument": (lambda x: x, lambda f: f(_EIGHT)),
    "an argument elsewhere": (lambda x: x, lambda f: f(jax.device_put(_EIGHT, jax.devices()[3]))),
    "a captured array": (lambda x: x + _LARGE[0], lambda f: f(_EIGHT)),
    "a gather": (lambda x: lax.all_gather(x, "i").sum(), lambda f: f(_EIGHT)),
    "under jit": (lambda x: x, lambda f: jax.jit(f)(_EIGHT)),
}


@pytest.mark.filterwarnings("ignore::jax_dist.CapturedArrayWarning")
@pytest.mark.parametrize("case", _ONCE)
def test_python_runs_once_for_a_signature(case):
    """So that a body which counts, say for random numbers, counts as under jax.pmap."""
    compute, call = _ONCE[case]
    counts = []

    def body(x):
        counts.append(len(counts) + 1)
        return compute(x) + 100 * counts[-1]

    result = call(jax_dist.pmap(body, "i"))

    assert counts == [1]
    assert 100 <= np.asarray(result).min() <= np.asarray(result).max() < 200


_STEADY = {  # not NumPy, which JAX itself puts on the devices in Python
    "one argument": (jax_dist.pmap(_double), lambda f, x: f(x)),
    "keyword": (jax_dist.pmap(_double), lambda f, x: f(x=x)),
    "static": (jax_dist.pmap(operator.mul, static_broadcasted_argnums=0), lambda f, x: f(2, x)),
    "donated": (jax_dist.pmap(_double, donate_argnums=0), lambda f, x: f(x)),
    "a captured array": (jax_dist.pmap(lambda x: x + _LARGE[0]), lambda f, x: f(x)),
}


@pytest.mark.filterwarnings("ignore::jax_dist.CapturedArrayWarning")
@pytest.mark.parametrize("kind", _STEADY)
def test_in_the_steady_state_no_python_runs(kind, monkeypatch):
    monkeypatch.setattr(_compat, "CPU_HANGS_WHEN_FULL", False)  # True on jax 0.10
    mapped, call = _STEADY[kind]
    state = [jnp.arange(8.0)]

    def step():
        state[0] = call(mapped, state[0])

    for _ in range(3):
        step()
    names = python_calls(step)

    # jit's slow path, into which a signature falls that failed once, enters dozens.
    assert names == ["step", "<lambda>"]


_DONATING = {  # by the names of jax.jit's options; and how the argument is passed
    "number, by position": ({"donate_argnums": 0}, lambda f, x, y: f(x, y)),
    "number, by keyword": ({"donate_argnums": 0}, lambda f, x, y: f(y=y, x=x)),
    "name, by position": ({"donate_argnames": "x"}, lambda f, x, y: f(x, y)),
    "name, by keyword": ({"donate_argnames": ["x"]}, lambda f, x, y: f(y=y, x=x)),
}


@pytest.mark.parametrize("case", _DONATING)
def test_arguments_are_donated_by_number_and_by_name(case):
    options, call = _DONATING[case]
    x, y = put(_EIGHT, mesh("i"), "i"), put(_EIGHT, mesh("i"), "i")

    result = call(jax_dist.pmap(lambda x, y: x + y, "i", **options), x, y)

    assert (x.is_deleted(), y.is_deleted()) == (True, False)
    assert result.tolist() == [2.0 * k for k in range(8)]


def test_one_array_twice_in_the_donated_state():
    # target = params is how a DQN starts; in the first call, both are the same buffer.
    params = jnp.arange(8.0)
    step = jax_dist.pmap(lambda s: {"p": s["p"] + 1, "target": s["target"]}, donate_argnums=0)

    state = step({"p": params, "target": params})
    state = step(state)

    chex.assert_trees_all_equal(state, {"p": jnp.arange(8.0) + 2, "target": jnp.arange(8.0)})


_MISPLACED = {
    "on another device": lambda: jax.device_put(_EIGHT, jax.devices()[3]),
    "replicated": lambda: put(_EIGHT, mesh("i")),
    "on another mesh": lambda: put(_EIGHT, mesh("a", "b", shape=(2, 4)), "b"),
    "in reversed order": lambda: put(_EIGHT, mesh("i", devices=jax.devices()[::-1]), "i"),
    "on four devices": lambda: put(_EIGHT, mesh("i", shape=(4,), devices=jax.devices()[:4]), "i"),
}


@pytest.mark.parametrize("where", _MISPLACED)
def test_misplaced_arrays_are_moved_once_and_remembered(where):
    mapped = jax_dist.pmap(lambda x, y: lax.psum(x, "i") + y, "i")
    array = _MISPLACED[where]()
    put(array, mesh("i"), "i")  # compiles JAX's own mover

    with compiles(1):
        first = mapped(array, _EIGHT)
    with compiles(0), jax.transfer_guard_device_to_device("disallow_explicit"):
        again = mapped(array, _EIGHT)
    assert first.tolist() == again.tolist() == [28.0 + k for k in range(8)]
    lies_on(again, jax.devices())
    # A right one is taken as it is, and so is the next misplaced one.
    assert mapped(first, _EIGHT).shape == (8,)
    assert mapped(_MISPLACED[where](), _EIGHT)[0] == 28.0


def test_a_moved_array_that_was_deleted_is_refused_as_by_jax():
    mapped = jax_dist.pmap(_double)
    array = jax.device_put(_EIGHT, jax.devices()[3])
    mapped(array)

    array.delete()

    for _ in range(2):
        with pytest.raises(RuntimeError, match="Array has been deleted"):
            mapped(array)


_FIRST_STATES = {  # where the state of a training loop is before the first step
    "numpy": np.copy,
    "jnp": jnp.asarray,
    "committed": lambda x: jax.device_put(x, jax.devices()[0]),
    "replicated": lambda x: put(x, mesh("i")),
    "stacked": lambda x: jax_dist.device_put_sharded(list(x), jax.devices()),
    "restored": lambda x: put(x, mesh("data"), "data"),
}
_BATCH = np.ones((8, 4), np.float32)
_BEFORE = {
    "nothing": lambda step, state: None,
    "lower": lambda step, state: step.lower(state, _BATCH),
    "trace": lambda step, state: step.trace(state, _BATCH),
    "shape": lambda step, state: step.lower(state, np.ones((8, 4, 2), np.float32)[..., 0]),
}


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("before", _BEFORE)
@pytest.mark.parametrize("first", _FIRST_STATES)
@pytest.mark.parametrize("use", ["evaluated", "donated"])
def test_a_training_loop_is_traced_and_compiled_once(first, before, use):
    traced = []

    def loss(w, batch):
        return jnp.sum((w @ batch) ** 2)

    def train(state, batch):
        traced.append(state)
        value, gradient = jax.value_and_grad(loss)(state["w"], batch)
        state = {"w": state["w"] - 0.01 * lax.pmean(gradient, "i"), "step": state["step"] + 1}
        return state, {"loss": lax.pmean(value, "i")}

    def evaluate(state, batch):
        return lax.pmean(loss(state["w"], batch), "i")

    def first_state():
        state = {"w": np.ones((8, 3, 4), np.float32), "step": np.zeros(8, np.int32)}
        return jax.tree.map(_FIRST_STATES[first], state)

    step = jax_dist.pmap(train, "i", donate_argnums=(0, 1) if use == "donated" else ())
    evaluation = jax_dist.pmap(evaluate, "i")
    _BEFORE[before](step, first_state())
    state = first_state()

    with compiles(2 if use == "evaluated" else 1, "train", "evaluate"):
        for _ in range(3):
            state, _ = step(state, _BATCH)
            if use == "evaluated":
                evaluation(state, _BATCH)

    assert len(traced) == 1 or before != "nothing"
    assert np.asarray(state["step"]).tolist() == [3] * 8
