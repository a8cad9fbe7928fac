"""The decorator: forms of use, caching, compile counts, donation, what lies where."""

import contextlib
import functools
import gc
import pathlib
import re
import sys
import weakref

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dist
from jax_dist.mapping import pmap as pmap_module

pytestmark = pytest.mark.mapping

_EIGHT = np.arange(8.0, dtype=np.float32)


def _mesh(*names, shape=(8,), devices=None):
    devices = np.array(jax.devices() if devices is None else devices)
    return jax.sharding.Mesh(devices.reshape(shape), names)


# What a compile is: an event of JAX, of which only the count is used.
_compiled: list[str] = []


@functools.cache
def _listen() -> None:
    def heard(event: str, _: float, **__: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            _compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(heard)


@contextlib.contextmanager
def compiles(expected: int):
    _listen()
    before = len(_compiled)
    yield
    assert len(_compiled) - before == expected


def _lies_on(array, devices):
    """One shard a device, along the leading dimension, in this order."""
    shards = sorted(array.addressable_shards, key=lambda s: s.index[0].start or 0)
    assert [shard.device for shard in shards] == list(devices)
    assert all(shard.data.shape == (1, *array.shape[1:]) for shard in shards)


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
    _lies_on(result, jax.devices())


def test_the_result_looks_like_the_function():
    def step(state):
        """Takes a step."""
        return state

    mapped = jax_dist.pmap(step)

    assert (mapped.__name__, mapped.__doc__) == ("step", "Takes a step.")
    assert mapped.__wrapped__ is step
    assert type(mapped) is type(step)


def test_pmap_is_a_value_like_any_other():
    assert jax_dist.pmap is jax_dist.pmap
    assert {"map": jax_dist.pmap}["map"] is jax_dist.pmap
    assert functools.wraps(jax_dist.pmap)(lambda: 0).__name__ == "pmap"


# ------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_a_shorter_axis_takes_the_first_devices(count):
    result = jax_dist.pmap(lambda x: x - lax.pmean(x, "i"), "i")(_EIGHT[:count])

    np.testing.assert_allclose(result, _EIGHT[:count] - (count - 1) / 2, atol=1e-6)
    _lies_on(result, jax.devices()[:count])


@pytest.mark.parametrize("order", [slice(None, None, -1), slice(2, 6), slice(5, None)])
def test_devices_are_used_in_the_order_given(order):
    devices = jax.devices()[order]

    result = jax_dist.pmap(lambda x: x + lax.axis_index("i"), "i", devices=devices)(
        np.zeros(len(devices), np.int32)
    )

    assert result.tolist() == list(range(len(devices)))
    _lies_on(result, devices)


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


def test_axis_names_need_not_be_strings():
    class Data:
        """An axis name that is told apart by identity."""

    result = jax_dist.pmap(lambda x: lax.psum(x, Data), Data)(_EIGHT)

    assert result.tolist() == [28.0] * 8
    _lies_on(result, jax.devices())


def test_effects_of_the_body_happen_once_a_device(capfd):
    jax_dist.pmap(lambda x: jax.debug.print("saw {}", x))(np.arange(4))
    jax.effects_barrier()

    assert sorted(capfd.readouterr().out.split()) == ["0", "1", "2", "3", *["saw"] * 4]


# ------------------------------------------------------------------------------ compile counts


def test_decorating_again_compiles_once():
    def body(x):
        return lax.psum(x, "i") * 3

    with compiles(1):
        for _ in range(3):
            jax_dist.pmap(body, "i")(_EIGHT)
    with compiles(1):  # other options, another program
        jax_dist.pmap(body, "i", out_axes=None)(_EIGHT)


def test_a_function_and_one_that_wraps_it_are_not_mixed_up():
    def inner(x):
        return x + 1

    @functools.wraps(inner)
    def outer(x):
        return inner(x) * 100

    assert jax_dist.pmap(inner)(_EIGHT).tolist() == [k + 1 for k in range(8)]
    assert jax_dist.pmap(outer)(_EIGHT).tolist() == [100 * (k + 1) for k in range(8)]


def test_a_method_sees_the_present_state_of_its_object():
    doubler = _Doubler()

    assert jax_dist.pmap(doubler.method)(_EIGHT)[1] == 2
    doubler.factor = 5
    assert jax_dist.pmap(doubler.method)(_EIGHT)[1] == 5


def test_functions_die_when_their_users_drop_them():
    def make():
        def body(x):
            return x + 1

        jax_dist.pmap(body)(_EIGHT)
        return weakref.ref(body)

    before = len(pmap_module._cache._by_id)
    dead = make()
    gc.collect()

    assert dead() is None
    assert len(pmap_module._cache._by_id) <= before


def test_what_comes_off_a_temporary_keeps_its_function():
    assert jax_dist.pmap(lambda x: x + 1).jitted(_EIGHT)[7] == 8
    assert jax_dist.pmap(lambda x: x + 1).lower(_EIGHT).compile()(_EIGHT)[7] == 8


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(lambda x: np.asarray(x), id="NumPy"),
        pytest.param(lambda x: jnp.asarray(x), id="uncommitted"),
        pytest.param(lambda x: jax.device_put(x, jax.devices()[0]), id="on one device"),
        pytest.param(lambda x: jax.device_put(x, NamedSharding(_mesh("i"), P())), id="replicated"),
        pytest.param(
            lambda x: jax.device_put(x, NamedSharding(_mesh("other"), P("other"))),
            id="placed alike, another mesh",
        ),
    ],
)
def test_a_training_loop_with_donated_state_compiles_once(state):
    step = jax_dist.pmap(lambda s, b: (s + b.sum(), b.sum()), "i", donate_argnums=0)
    given = carried = state(_EIGHT)
    batch = np.ones((8, 4), np.int32)
    jax.device_put(state(_EIGHT), NamedSharding(_mesh("i"), P("i")))  # compiles JAX's own mover

    with compiles(1):
        for _ in range(3):
            carried, _ = step(carried, batch)
    assert carried.tolist() == [12.0 + k for k in range(8)]
    if isinstance(given, jax.Array):
        assert given.is_deleted()


def test_a_donated_batch_is_not_mistaken_for_state():
    # One compile, though the batch comes as NumPy each time: it is not put on the mesh.
    step = jax_dist.pmap(lambda s, b: s + b.sum(), donate_argnums=(0, 1))
    carried = jnp.zeros(8)

    with compiles(1):
        for _ in range(4):
            carried = step(carried, np.ones((8, 4), np.float32))
    assert carried.tolist() == [16.0] * 8


def test_a_donated_batch_that_looks_like_a_result_is_left_alone_in_the_end():
    step = jax_dist.pmap(lambda s, b: (s + b.sum(), b * 2), donate_argnums=(0, 1))
    carried = jnp.zeros(8)

    for _ in range(12):
        carried, _ = step(carried, np.ones((8, 4), np.float32))
    with compiles(0):
        carried, _ = step(carried, np.ones((8, 4), np.float32))
    assert carried.tolist() == [52.0] * 8


def _python_calls(call):
    """The names of all Python functions that `call` enters."""
    names = []

    def saw(frame, event, _):
        if event == "call":
            names.append(frame.f_code.co_name)

    sys.setprofile(saw)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names


_STEADY = {  # not NumPy, which JAX itself puts on the devices in Python
    "one argument": (jax_dist.pmap(_double), lambda f, x: f(x)),
    "keyword": (jax_dist.pmap(_double), lambda f, x: f(x=x)),
    "static": (
        jax_dist.pmap(lambda n, x: n * x, static_broadcasted_argnums=0),
        lambda f, x: f(2, x),
    ),
    "donated": (jax_dist.pmap(_double, donate_argnums=0), lambda f, x: f(x)),
}


@pytest.mark.parametrize("kind", _STEADY)
def test_in_the_steady_state_no_python_runs_but_the_closure(kind):
    mapped, call = _STEADY[kind]
    state = [jnp.arange(8.0)]

    def step():
        state[0] = call(mapped, state[0])

    for _ in range(3):
        step()
    names = _python_calls(step)

    # jit's slow path, into which a signature falls that failed once, enters dozens.
    assert names == ["step", "<lambda>", "mapped"]


# ------------------------------------------------------------------------------------ donation


def test_donated_arrays_are_used_up_and_others_are_not():
    placed = jax.device_put(_EIGHT, NamedSharding(_mesh("i"), P("i")))
    kept = jax.device_put(_EIGHT, NamedSharding(_mesh("i"), P("i")))

    jax_dist.pmap(lambda x, y: x + y, "i", donate_argnums=0)(placed, kept)

    assert placed.is_deleted()
    assert not kept.is_deleted()


def test_what_cannot_be_donated_survives():
    moved = jnp.arange(8.0)  # must be moved, and no result has its shape

    jax_dist.pmap(lambda x, y: y.sum(), donate_argnums=0)(moved, np.ones((8, 3), np.float32))

    assert moved.tolist() == list(range(8))


def test_nothing_is_lost_when_the_call_fails():
    state = jnp.arange(8.0)

    def body(x):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        jax_dist.pmap(body, donate_argnums=0)(state)
    assert not state.is_deleted()


def test_one_array_twice_in_the_donated_state():
    # target = params is how a DQN starts; in the first call, both are the same buffer.
    params = jnp.arange(8.0)
    step = jax_dist.pmap(lambda s: {"p": s["p"] + 1, "target": s["target"]}, donate_argnums=0)

    state = step({"p": params, "target": params})
    state = step(state)

    chex.assert_trees_all_equal(state, {"p": jnp.arange(8.0) + 2, "target": jnp.arange(8.0)})


# ---------------------------------------------------------------------------- misplaced arrays

_MISPLACED = {
    "on another device": lambda: jax.device_put(_EIGHT, jax.devices()[3]),
    "replicated": lambda: jax.device_put(_EIGHT, NamedSharding(_mesh("i"), P())),
    "on another mesh": lambda: jax.device_put(
        _EIGHT, NamedSharding(_mesh("a", "b", shape=(2, 4)), P("b"))
    ),
    "in reversed order": lambda: jax.device_put(
        _EIGHT, NamedSharding(_mesh("i", devices=jax.devices()[::-1]), P("i"))
    ),
    "on four devices": lambda: jax.device_put(
        _EIGHT, NamedSharding(_mesh("i", shape=(4,), devices=jax.devices()[:4]), P("i"))
    ),
}


@pytest.mark.parametrize("where", _MISPLACED)
def test_misplaced_arrays_are_moved_once_and_remembered(where):
    mapped = jax_dist.pmap(lambda x, y: lax.psum(x, "i") + y, "i")
    array = _MISPLACED[where]()
    jax.device_put(array, NamedSharding(_mesh("i"), P("i")))  # compiles JAX's own mover

    with compiles(1):
        first = mapped(array, _EIGHT)
    with compiles(0), jax.transfer_guard_device_to_device("disallow_explicit"):
        again = mapped(array, _EIGHT)
    assert first.tolist() == again.tolist() == [28.0 + k for k in range(8)]
    _lies_on(again, jax.devices())
    # A right one is taken as it is, and so is the next misplaced one.
    assert mapped(first, _EIGHT).shape == (8,)
    assert mapped(_MISPLACED[where](), _EIGHT)[0] == 28.0


def test_the_program_for_a_moved_array_has_no_transfer_in_it():
    mapped = jax_dist.pmap(lambda x: x + 1, "i")
    array = _MISPLACED["on another mesh"]()
    mapped(array)

    text = mapped.lower(mapped(array)).compile().as_text()

    assert re.findall(r"all-\w+|collective-permute|dynamic-slice", text) == []


def test_an_array_on_the_right_mesh_but_cut_otherwise_is_moved_too():
    mapped = jax_dist.pmap(lambda x: lax.psum(x, "i"), "i")
    right = mapped(mapped(_EIGHT))
    replicated = jax.device_put(right, NamedSharding(right.sharding.mesh, P()))

    mapped(replicated)  # has the type of a right one, so jit compiles without a trace

    with compiles(0), jax.transfer_guard_device_to_device("disallow_explicit"):
        mapped(right)
    assert len(_dispatcher_of(mapped)._to_place) == 1
    mapped(replicated)
    with compiles(0), jax.transfer_guard_device_to_device("disallow_explicit"):
        assert mapped(replicated).tolist() == [1792.0] * 8


def test_another_shape_of_a_misplaced_argument_stays_fast():
    mapped = jax_dist.pmap(lambda x: x + 1, "i")
    for shape in ((8,), (8, 2)):
        for _ in range(2):
            right = mapped(jax.device_put(np.ones(shape, np.float32), jax.devices()[3]))

    jitted = _dispatcher_of(mapped).jitted

    assert _python_calls(lambda: jitted(right)) == ["<lambda>"]


def _dispatcher_of(mapped):
    cells = [cell.cell_contents for cell in mapped.__closure__]
    return next(content for content in cells if hasattr(content, "dispatch"))


def test_memory_of_moved_arrays_goes_when_they_go():
    twins = jax_dist.mapping.placement.Twins()
    array = _MISPLACED["on another device"]()

    twins.move(array, NamedSharding(_mesh("i"), P("i")))
    assert len(twins._moved) == 1
    del array
    gc.collect()
    assert len(twins._moved) == 0


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


def test_only_public_names_of_jax_outside_of_compat():
    package = pathlib.Path(jax_dist.__file__).parent
    private = re.compile(
        r"jax\._src|(import|from) jaxlib|_rewrap_|from jax\.experimental|jax\.interpreters"
    )

    found = [path.name for path in package.rglob("*.py") if private.search(path.read_text())]

    assert found == ["_compat.py"]
