"""Donated arguments: each way to lose a donation in silence, and none reported that is not lost."""

import functools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from messages import forget, functions_entered, refused, said_by, text

import jax_dist
from jax_dist._compat import JitCall
from jax_dist.errors import DonationError
from jax_dist.guards import donation
from jax_dist.guards.strict import strict

_MESH = Mesh(np.array(jax.devices()[:4]), ("i",))
_CUT = NamedSharding(_MESH, P("i"))
_VIEWS = []  # keep memory from being given up

pytestmark = pytest.mark.filterwarnings("ignore:Some donated buffers")  # at the first call only


def only_donation(when="first"):
    return strict(transfers=False, recompiles=False, donation=when)


def new(size=4):
    return jnp.arange(float(size))


def viewed():
    array = new()
    _VIEWS.append(np.asarray(array))
    return array


donating = functools.partial(jax.jit, donate_argnums=0)
double = donating(lambda x: 2 * x)
on_mesh = donating(lambda x: 2 * x, in_shardings=_CUT, out_shardings=_CUT)
cut_to_whole = donating(lambda x: 2 * x, out_shardings=NamedSharding(_MESH, P()))
only_w = donating(lambda s: {"w": 2 * s["w"]})
to_half = donating(lambda s: {"w": s["w"].astype(jnp.bfloat16)})
sums = donating(lambda s: s["w"] + s["b"])
first_row = donating(lambda x: x.sum())

_KEPT = """
    '{fun}' did not take the memory of 1 donated argument, at HERE:
      * {which}
    Because the memory of an argument can only become that of an output of the same type, on the \
same devices, if nothing else holds it.
    Mend that, or leave the argument out of donate_argnums.
"""


@pytest.mark.parametrize(
    ("act", "which"),
    [
        (
            lambda: only_w({"w": new(), "b": new(2)}),
            "s['b'] is float32[2], and the function does not use it",
        ),
        (
            lambda: only_w({"w": new(), "b": new()}),
            "s['b'] is float32[4], and the function does not use it",
        ),
        (
            lambda: to_half({"w": new()}),
            "s['w'] is float32[4], and the output of that shape is bfloat16[4]",
        ),
        (
            lambda: first_row(new()),
            "x is float32[4], and no output has this shape and type; the outputs: float32[]",
        ),
        (
            lambda: sums({"w": new(), "b": new()}),
            "s['w'] is float32[4], and all outputs of that type took other donated memory",
        ),
        (
            lambda: double(viewed()),
            "x is float32[4], and something else holds its memory, as a NumPy array does that "
            "was made from it without a copy",
        ),
        (
            lambda: double(np.ones(4, np.float32)),
            "x is a NumPy array float32[4], and has no memory on a device",
        ),
        (
            lambda: on_mesh(new(8)),
            "x is float32[8] on device 0, and the output of that type on P('i') over i=4",
        ),
        (
            lambda: cut_to_whole(jax.device_put(new(8), _CUT)),
            "x is float32[8] on P('i') over i=4, and the output of that type on P() over i=4",
        ),
    ],
    ids=[
        "unused",
        "unused-alike",
        "dtype",
        "shape",
        "taken",
        "view",
        "numpy",
        "placement",
        "output-elsewhere",
    ],
)
@pytest.mark.parametrize("compiled", [False, True], ids=["first call", "later call"])
def test_each_way_to_lose_a_donation(act, which, compiled):
    if compiled:
        act()

    with refused(DonationError) as error, only_donation():
        act()

    assert said_by(error, act) == text(_KEPT.format(fun="<lambda>", which=which))


@pytest.mark.skipif(jax.__version_info__ < (0, 8), reason="pmap was no jit then")
def test_jax_pmap_on_an_array_of_one_device():
    mapped = jax.pmap(lambda x: 2 * x, donate_argnums=0)
    act = lambda: mapped(jnp.ones((8, 2)))

    with refused(DonationError) as error, only_donation():
        act()

    assert said_by(error, act).splitlines()[0] == (
        "'jax.pmap' did not take the memory of 1 donated argument, at HERE:"
    )


def test_many_leaves_are_counted():
    keep_one = donating(lambda s: s["a0"] + 1)
    act = lambda: keep_one({f"a{i}": new() for i in range(12)})

    with refused(DonationError) as error, only_donation():
        act()

    lines = said_by(error, act).splitlines()
    assert lines[0] == "'<lambda>' did not take the memory of 11 donated arguments, at HERE:"
    assert lines[1] == "  * s['a1'] is float32[4], and the function does not use it"
    assert lines[8] == "  * s['a6'] is float32[4], and the function does not use it"
    assert lines[9] == "  * and 3 more"


def test_a_state_that_is_fed_back_and_not_donated():
    step = jax.jit(lambda state, x: {"w": state["w"] + x})
    x = new(512)
    act = lambda state: step(state, x)

    def train():
        state = {"w": new(512)}
        with only_donation() as guard:
            for _ in guard.steps(range(3)):
                state = act(state)

    with refused(DonationError) as error:
        train()

    assert said_by(error, act) == text("""
        '<lambda>' is fed its own results and does not donate them, at HERE:
          * state['w'] is float32[512]
        Because the old value was dropped after the call, so both were in memory for nothing.
        Say donate_argnums where you jit it, or strict(donation=False).
    """)


def test_a_result_fed_back_once_while_the_old_one_is_kept_is_no_loss():
    step = jax.jit(lambda x: 2 * x)
    kept = [new(512)]

    with only_donation() as guard:
        for _ in guard.steps(range(4)):
            kept.append(step(kept[-1]))


class _Coder:
    def encode(self, x):
        return 2 * x

    def decode(self, x):
        return x / 2


def test_a_result_of_another_method_is_not_fed_back():
    coder = _Coder()
    encode, decode = jax.jit(coder.encode), jax.jit(coder.decode)

    with only_donation():
        decode(encode(new(512)))


@pytest.mark.parametrize(
    "transform",
    [jax.jit, jax.vmap, lambda f: jax.jit(jax.grad(lambda x: f(x).sum())), jax.jacfwd],
    ids=["jit", "vmap", "grad", "jacfwd"],
)
def test_a_donating_function_within_a_transformation(transform):
    """Its arguments are tracers then, which are neither deleted nor anywhere."""
    outer = transform(donating(lambda x: jnp.sin(x)))

    with only_donation("always"):
        for _ in range(2):
            outer(new(16))


def test_a_new_batch_in_each_step_is_not_fed_back():
    """It is gone before the next step, like a state that is fed back, and nothing else is."""
    total = jax.jit(lambda batch: batch.sum())

    with only_donation() as guard:
        for number in guard.steps(range(4)):
            total(new(512) + number)


def test_the_memory_of_each_device_is_known():
    cut = jax.device_put(new(8), _CUT)
    whole = new(8)
    alive = weakref.ref(whole)

    shards = [shard.data.unsafe_buffer_pointer() for shard in cut.addressable_shards]
    assert donation._addresses(cut) == frozenset(shards)
    assert len(set(shards)) == 4
    assert donation._addresses(whole) == {whole.unsafe_buffer_pointer()}
    del whole
    assert alive() is None  # a ring would keep it until the collector comes


def test_a_counter_is_not_worth_a_word():
    step = jax.jit(lambda n: n + 1)
    n = jnp.int32(0)

    with only_donation() as guard:
        for _ in guard.steps(range(4)):
            n = step(n)


@pytest.mark.parametrize("when", ["first", "always"])
def test_donations_that_happen_are_not_reported(when):
    cut = jax.device_put(new(8), _CUT)
    states = {
        "plain": (donating(lambda x: x + 1), new(512)),
        "tree": (donating(lambda s: {"a": s["b"], "b": s["a"]}), {"a": new(), "b": new()}),
        "shard_map": (
            donating(jax.shard_map(lambda x: x + 1, mesh=_MESH, in_specs=P("i"), out_specs=P("i"))),
            cut,
        ),
        "by name": (jax.jit(lambda x: x + 1, donate_argnames="x"), new()),
        "key": (donating(lambda key: jax.random.split(key, 1)[0]), jax.random.key(0)),
        "pmap": (jax_dist.pmap(lambda x: x + 1, donate_argnums=0), jnp.ones((8, 2))),
    }

    for step, state in states.values():
        with only_donation(when) as guard:
            for _ in guard.steps(range(6)):
                state = step(state)


def test_a_second_result_of_the_same_type_has_memory_of_its_own():
    both = donating(lambda x: (x + 1, 2 * x))

    with only_donation():
        both(new())


def test_the_first_calls_are_looked_at_and_then_one_step_in_a_thousand():
    guard = only_donation()
    state = [double(new())]
    looked_at = []

    for number in range(2005):
        with guard:
            if functions_entered(lambda: state.append(double(state.pop()))) > 0:
                looked_at.append(number)

    # The call of step 3 comes through Python too, to be hurried from then on.
    assert looked_at == [0, 1, 2, 3, 1000, 2000]


def test_always_looks_at_all():
    lost = 0
    with only_donation("always"):
        for _ in range(10):
            try:
                double(viewed())
            except DonationError:
                forget()
                lost += 1
    _VIEWS.clear()

    assert lost == 10


def checked(leaf, result):
    """A call that deletes what was donated, as `delete` does here, and gives `result`."""
    call = JitCall(lambda x: x, "f", (leaf,), ("x",), (True,), {})
    check = donation.DonationCheck()
    check.called(call)
    leaf.delete()
    check.returned(call, [result])


def test_a_leaf_marked_as_deleted_whose_memory_no_output_took():
    """What a jax would do that deletes donated arrays without giving up their memory."""
    with pytest.raises(DonationError) as error:
        checked(new(), new())

    which = "x is float32[4], marked as deleted, but no output took its memory"
    assert str(error.value).splitlines()[1] == f"  * {which}"


@pytest.mark.parametrize(
    "result", [new(2), jax.device_put(new(), jax.devices()[1])], ids=["other type", "other device"]
)
def test_a_leaf_marked_as_deleted_is_believed_if_no_result_is_like_it(result):
    checked(new(), result)


@pytest.mark.parametrize("unknown", ["leaf", "result"])
def test_a_leaf_marked_as_deleted_is_believed_where_no_address_is_known(monkeypatch, unknown):
    leaf, result = new(), new()
    known, without = donation._addresses, {"leaf": leaf, "result": result}[unknown]
    monkeypatch.setattr(
        donation, "_addresses", lambda array: None if array is without else known(array)
    )

    checked(leaf, result)
