"""A first state that lies anywhere is put where the next one will lie: one program, not two."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from observing import compiles, mesh_of, numbers

import jax_dist
from jax_dist._rewrite.remesh import first_places

pytestmark = pytest.mark.rewriting


def _step(state, x):  # of one device
    return {"w": state["w"] - lax.pmean(x, "i"), "n": state["n"] + 1}, lax.psum(x.sum(), "i")


def _pmapped(**options):
    return jax.pmap(_step, "i", **options)


def _state():
    return {"w": jnp.asarray(np.ones((4, 3), np.float32)), "n": jnp.asarray(np.arange(4))}


def _programs_of_three_steps(step, state):
    """How many programs named `step` three steps in a row need."""
    found = []

    def heard(event, _, **details):
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(details.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        for seed in range(3):
            state, total = step(state, numbers(4, 3, seed=seed))
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)
    return len([name for name in found if "_step" in str(name)]), state, total


def _reference(state):
    step = _pmapped()
    for seed in range(3):
        state, total = step(state, numbers(4, 3, seed=seed))
    return state, total


@pytest.mark.parametrize("mesh", [None, mesh_of(data=4)], ids=["own mesh", "given mesh"])
@pytest.mark.parametrize("kind", ["jax", "numpy"])
def test_a_state_that_the_pmap_inside_donates_is_compiled_for_once(mesh, kind):
    state = _state() if kind == "jax" else jax.tree.map(np.asarray, _state())
    plain = jax.jit(_pmapped(donate_argnums=0))

    rewritten = jax_dist.rewrite(plain, mesh=mesh)
    programs, found, total = _programs_of_three_steps(rewritten, state)

    wanted, wanted_total = _reference(_state())
    jax.tree.map(np.testing.assert_allclose, found, wanted)
    np.testing.assert_allclose(total, wanted_total)
    assert programs == 1
    assert _programs_of_three_steps(plain, _state())[0] == 2  # without us


def test_a_state_that_the_jit_outside_donates_is_compiled_for_once():
    @functools.partial(jax.jit, donate_argnames="state")
    def whole_step(x, state):
        return _pmapped()(state, x)

    rewritten = jax_dist.rewrite(whole_step)
    state = _state()
    programs, found, _ = _programs_of_three_steps(lambda s, x: rewritten(x, state=s), state)

    wanted, _ = _reference(_state())
    jax.tree.map(np.testing.assert_allclose, found, wanted)
    assert programs == 1
    plain = lambda s, x: whole_step(x, state=s)
    assert _programs_of_three_steps(plain, _state())[0] == 2


def test_so_is_a_state_that_nobody_donates():
    assert _programs_of_three_steps(jax_dist.rewrite(jax.jit(_pmapped())), _state())[0] == 1
    assert _programs_of_three_steps(jax.jit(_pmapped()), _state())[0] == 2


def test_the_first_state_is_still_there_where_jit_leaves_it():
    state = _state()

    jax_dist.rewrite(jax.jit(_pmapped(donate_argnums=0)))(state, numbers(4, 3))

    np.testing.assert_array_equal(state["w"], np.ones((4, 3)))


def test_the_function_is_traced_no_more_often_than_under_jit():
    traced = []

    def step(state, x):
        traced.append(state["w"].shape)
        return _step(state, x)

    plain = jax.jit(jax.pmap(step, "i", donate_argnums=0))
    _programs_of_three_steps(plain, _state())
    under_jit = len(traced)
    _programs_of_three_steps(jax_dist.rewrite(plain), _state())

    assert len(traced) - under_jit <= under_jit


@pytest.mark.filterwarnings("ignore::jax_dist.CapturedArrayWarning")
def test_captured_arrays_and_the_state_are_settled_together():
    table = numbers(1000)

    def step(state, x):
        state, total = _step(state, x)
        return state, total + table.sum()

    rewritten = jax_dist.rewrite(jax.jit(jax.pmap(step, "i", donate_argnums=0)))
    state, _ = rewritten(_state(), numbers(4, 3))
    with compiles(0):
        state, total = rewritten(state, numbers(4, 3))

    np.testing.assert_allclose(total, [numbers(4, 3).sum() + table.sum()] * 4, rtol=1e-5)


def test_a_state_beside_arguments_on_other_devices():
    mesh = mesh_of(i=4, j=2)
    elsewhere = jax.pmap(lambda x: x * 1)(numbers(4, 3))
    rewritten = jax_dist.rewrite(jax.jit(_pmapped(donate_argnums=0)), mesh=mesh)

    state, total = rewritten(_state(), elsewhere)

    np.testing.assert_allclose(total, [numbers(4, 3).sum()] * 4, rtol=1e-6)
    assert state["w"].sharding == NamedSharding(mesh, P("i"))


def test_a_state_that_always_comes_anew_is_placed_once_and_not_in_each_call():
    traced = []

    def step(state, x):
        traced.append(state["w"].shape)
        return _step(state, x)

    rewritten = jax_dist.rewrite(jax.jit(jax.pmap(step, "i", donate_argnums=0)))
    for _ in range(2):
        rewritten(_state(), numbers(4, 3))
    before = len(traced)
    with compiles(0):
        state, _ = rewritten(_state(), numbers(4, 3))

    assert len(traced) == before
    np.testing.assert_allclose(state["n"], np.arange(4) + 1)


def _found(fun, *args, mesh=None):
    """By number of the input, the spec."""
    found = first_places(jax.make_jaxpr(fun)(*args), mesh)
    return {number: sharding.spec for number, sharding in found.items()}


def test_what_two_pmaps_cut_in_two_ways_stays():
    def both(x, y):
        rows = jax.pmap(lambda x, y: x * y, "i")(x, y)
        columns = jax.pmap(lambda x: x + 1, "i", in_axes=1, out_axes=1)(x)
        return rows, columns

    assert _found(both, numbers(4, 4), numbers(4, 4)) == {1: P("i")}


def test_what_a_pmap_reads_itself():
    fun = jax.pmap(lambda x, y: (x + y, y * 2), "i", in_axes=(0, None))
    x, y = numbers(4, 4), numbers(4)

    assert _found(fun, x, y) == {0: P("i"), 1: P()}
    assert _found(jax.jit(lambda x, y: fun(x, y)), x, y) == {0: P("i"), 1: P()}
    assert _found(lambda x, y: fun(x + 1, y), x, y) == {1: P()}  # x + 1 is another array


def test_it_goes_where_the_pmap_goes():
    fun, x = jax.pmap(lambda x: x + 1, "i"), numbers(4, 3)

    assert _found(fun, x, mesh=mesh_of(data=4)) == {0: P("data")}
    assert _found(fun, x, mesh=mesh_of(data=2)) == {0: P("i")}  # refused: it stays


def test_where_the_user_has_put_it_stays():
    mesh = mesh_of(i=4)
    whole = jax.device_put(_state(), NamedSharding(mesh, P()))
    rewritten = jax_dist.rewrite(jax.jit(_pmapped(donate_argnums=0)), mesh=mesh)

    programs, found, _ = _programs_of_three_steps(rewritten, whole)

    jax.tree.map(np.testing.assert_allclose, found, _reference(_state())[0])
    assert programs == 2
