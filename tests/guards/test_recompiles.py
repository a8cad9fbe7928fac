"""Compilations in a steady program: what changed, in which words; and that nothing is spoilt."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from messages import refused, said_by, text

from jax_dist.errors import RecompileError
from jax_dist.guards.strict import allow_recompiles, strict

_MESH = Mesh(np.array(jax.devices()[:4]), ("i",))
_FOUR, _EIGHT = jnp.ones(4), jnp.ones(8)
_WHOLE_NUMBERS = jnp.arange(4)
_CUT = jax.device_put(_FOUR, NamedSharding(_MESH, P("i")))
_ON_DEVICE_1 = jax.device_put(_FOUR, jax.devices()[1])
_COPIED = jax.device_put(_FOUR, NamedSharding(_MESH, P()))


def only_recompiles():
    return strict(transfers=False, donation=False)


def make_step():
    """New in each test, so that no test depends on what another one compiled."""

    @functools.partial(jax.jit, static_argnames="times")
    def step(x, batch=None, times=1):
        return times * (x if batch is None else x + batch["y"].sum())

    return step


def twice(act):
    with only_recompiles() as guard:
        for _ in guard.steps(range(2)):
            act()


_ERROR = """
    'step' would be compiled after the warm-up, at HERE:
      * {which}
    Because each difference in these needs another program.
    {do}, or use `with jax_dist.allow_recompiles():`.
"""
_PAD = "Pad to a few sizes, or cut the data alike"
_PLACE = "Place it alike before each call, with jax.device_put, also the first state"
_STATIC = "Make it an ordinary argument, or call each value in the warm-up"


@pytest.mark.parametrize(
    ("before", "act", "which", "do"),
    [
        (
            lambda step: step(_FOUR),
            lambda step: step(_EIGHT),
            "x has the shape (8,), before (4,)",
            _PAD,
        ),
        (
            lambda step: step(_FOUR),
            lambda step: step(_WHOLE_NUMBERS),
            "x has the type int32, before float32",
            "Convert it to the same type before the call",
        ),
        (
            lambda step: step(jnp.float32(1)),
            lambda step: step(1.0),
            "x has a weak type, as Python numbers do, before a strong type, as arrays do",
            "Pass an array in each call, or a Python number in each call",
        ),
        (
            lambda step: step(_FOUR, {"y": _FOUR}),
            lambda step: step(_FOUR, {"y": _EIGHT}),
            "batch['y'] has the shape (8,), before (4,)",
            _PAD,
        ),
        (
            lambda step: step(_CUT),
            lambda step: step(_COPIED),
            "x lies on P() over i=4, before on P('i') over i=4",
            _PLACE,
        ),
        (
            lambda step: step(_FOUR),
            lambda step: step(_CUT),
            "x lies on P('i') over i=4, before on device 0, uncommitted",
            _PLACE,
        ),
        (
            lambda step: step(_FOUR, times=2),
            lambda step: step(_FOUR, times=3),
            "times is the static value 3, before 2",
            _STATIC,
        ),
        (
            lambda step: step(_FOUR, {"y": _FOUR}),
            lambda step: step(_FOUR, {"y": _FOUR, "z": _FOUR}),
            "batch['z'] is new",
            "Pass the same structure in each call",
        ),
    ],
    ids=["shape", "type", "weak", "leaf", "sharding", "placement", "static", "tree"],
)
def test_what_changed_since_a_call_in_the_guard(before, act, which, do):
    step = make_step()

    with only_recompiles() as guard:
        for number in guard.steps(range(2)):
            if number == 0:
                before(step)
            else:
                with refused(RecompileError) as error:
                    act(step)

    assert said_by(error, act) == text(_ERROR.format(which=which, do=do))


@pytest.mark.parametrize(
    ("before", "act", "which", "do"),
    [
        (
            lambda step: step(_FOUR),
            lambda step: step(_EIGHT),
            "x has the shape (8,), before (4,)",
            _PAD,
        ),
        (
            lambda step: step(_FOUR),
            lambda step: step(_CUT),
            "the arguments lie elsewhere than before: x on P('i') over i=4",
            _PLACE,
        ),
        (
            lambda step: step(_FOUR),
            lambda step: step(_ON_DEVICE_1),
            "the arguments lie elsewhere than before: x on device 1",
            _PLACE,
        ),
        (
            lambda step: step(_ON_DEVICE_1),
            lambda step: step(np.ones(4, np.float32)),
            "the arguments lie elsewhere than before: x on the host",
            _PLACE,
        ),
        (
            lambda step: step(_FOUR, times=2),
            lambda step: step(_FOUR, times=3),
            "no earlier call had the static values times=3",
            _STATIC,
        ),
        (
            lambda step: None,
            lambda step: step(_FOUR),
            "no call of 'step' came before",
            "Call it once before the block",
        ),
    ],
    ids=["shape", "placement", "device", "host", "static", "first"],
)
def test_what_changed_since_a_call_before_the_guard(monkeypatch, before, act, which, do):
    monkeypatch.setattr("jax_dist.guards.compilations._seen", {})
    step = make_step()
    before(step)

    with only_recompiles(), refused(RecompileError) as error:
        act(step)

    assert said_by(error, act) == text(_ERROR.format(which=which, do=do))


def test_the_nearest_earlier_call_is_compared_with():
    step = make_step()
    act = lambda: step(_EIGHT)

    with only_recompiles() as guard:
        for number in guard.steps(range(2)):
            if number == 0:
                step(_WHOLE_NUMBERS)
                step(_FOUR)
                step(_WHOLE_NUMBERS, times=2)
                continue
            with refused(RecompileError) as error:
                act()

    which = "x has the shape (8,), before (4,)"
    assert said_by(error, act) == text(_ERROR.format(which=which, do=_PAD))


def test_a_function_made_anew_in_each_step_is_known_by_its_source():
    act = lambda: jax.jit(lambda x: x + 1)(_FOUR)

    with refused(RecompileError) as error:
        twice(act)

    here = "'<lambda>' of HERE is another function object than before"
    assert said_by(error, act) == text(
        _ERROR.replace("step", "<lambda>").format(
            which=here, do="Make the jitted function once, outside of the loop"
        )
    )


class _Slotted:
    __slots__ = ("factor",)

    def scaled(self, x):
        return 2 * x


def test_a_method_of_an_object_without_weak_references_can_be_called():
    scaled = jax.jit(_Slotted().scaled)

    with only_recompiles() as guard:
        for _ in guard.steps(range(3)):
            assert scaled(_FOUR).shape == _FOUR.shape


def test_an_operation_of_jax_itself_is_named():
    sizes = iter([_FOUR, jnp.ones((3, 5, 7))])
    act = lambda: jnp.sinh(next(sizes))

    with refused(RecompileError) as error:
        twice(act)

    assert said_by(error, act).splitlines()[:2] == [
        "'sinh' would be compiled after the warm-up, at HERE:",
        "  * x has the shape (3, 5, 7), before (4,)",
    ]


def test_a_transformation_outside_of_jit_is_named():
    gradient = jax.grad(jax.jit(lambda x: (x**3).sum()))
    act = lambda: gradient(_FOUR)

    with only_recompiles(), refused(RecompileError) as error:
        act()

    assert said_by(error, act).splitlines()[1] == (
        "  * '<lambda>' is called outside of a jitted function, and is new for float32[4]"
    )


def test_the_refused_call_can_be_made_later():
    step = make_step()
    step(_FOUR)

    with only_recompiles():
        for _ in range(2):
            with refused(RecompileError):
                step(_EIGHT)
        step(_FOUR)
        with allow_recompiles():
            assert step(_EIGHT).shape == (8,)
        step(_EIGHT)
    assert step(jnp.ones(3)).shape == (3,)


def test_the_refused_call_has_run_nothing():
    ran = []
    step = jax.jit(lambda x: (jax.debug.callback(lambda: ran.append(1)), x + 1)[1])

    with only_recompiles(), refused(RecompileError):
        step(_FOUR)
    jax.effects_barrier()

    assert ran == []


def test_a_setting_of_jax_is_suspected_last():
    step = make_step()
    step(_FOUR)
    act = lambda: step(_FOUR)

    with only_recompiles():
        act()
        with jax.default_matmul_precision("float32"), refused(RecompileError) as error:
            act()

    which = "a setting of JAX differs, as by jax.config or jax.set_mesh, or its caches were cleared"
    do = "Set it once, before the first call"
    assert said_by(error, act) == text(_ERROR.format(which=which, do=do))
