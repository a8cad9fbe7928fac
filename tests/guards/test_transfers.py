"""Arrays that move without being asked to: what is reported, in which words, and what is not."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from messages import refused, said_by, text

from jax_dist.errors import TransferError
from jax_dist.guards.strict import allow_transfers, strict

_MESH = Mesh(np.array(jax.devices()[:4]), ("i",))
_CUT = NamedSharding(_MESH, P("i"))
_ON_HOST = np.ones(4, np.float32)
_X = jnp.ones(4)
_SHARDED = jax.device_put(_X, _CUT)
_METRICS = {"loss": jnp.float32(2.5), "steps": [jnp.int32(3)]}


@jax.jit
def double(x):
    return 2 * x


@jax.jit
def train(state, batch):
    return jax.tree.map(lambda leaf: leaf + batch["x"].sum(), state)


on_mesh = jax.jit(lambda x, y: x + y, in_shardings=_CUT)


def only_transfers():
    return strict(recompiles=False, donation=False)


_FROM_HOST = """
    The call of '{fun}' would move arrays from the host to the devices, at HERE:
      * {which}
    Because it moves them again in each call, and strict wants explicit transfers.
    Place them with jax.device_put, once if they stay the same, or use `with \
jax_dist.allow_transfers():`.
"""
_TO_HOST = """
    An array would move from the devices to the host, at HERE:
      * {which}
    Because the program waits there until the devices have computed it.
    Use jax.device_get where you mean it, and not in each step, or `with \
jax_dist.allow_transfers():`.
"""
_LOSS = "_METRICS['loss'], float32[] on device 0, is read by "


@pytest.mark.parametrize(
    ("act", "fun", "which"),
    [
        (lambda: double(_ON_HOST), "double", "x is a NumPy array float32[4], 16 bytes"),
        (
            lambda: train({"w": _X}, {"x": _ON_HOST}),
            "train",
            "batch['x'] is a NumPy array float32[4], 16 bytes",
        ),
        (lambda: _X + _ON_HOST, "add", "_ON_HOST is a NumPy array float32[4], 16 bytes"),
    ],
    ids=["argument", "leaf of an argument", "operator"],
)
def test_arrays_from_the_host_are_named(act, fun, which):
    act()  # compiled before

    with refused(TransferError) as error, only_transfers():
        act()

    assert said_by(error, act) == text(_FROM_HOST.format(fun=fun, which=which))


@pytest.mark.parametrize(
    ("act", "which"),
    [
        (lambda: float(_METRICS["loss"]), _LOSS + "float"),
        (lambda: int(_METRICS["steps"][0]), None),
        (lambda: bool(_METRICS["loss"]), _LOSS + "bool, or if"),
        (lambda: str(_METRICS["loss"]), _LOSS + "str or print"),
        (lambda: f"{_METRICS['loss']:.2f}", _LOSS + "a formatted string"),
        (lambda: repr(_METRICS["loss"]), _LOSS + "repr or print"),
        (lambda: _METRICS["loss"].item(), _LOSS + ".item()"),
        (lambda: _METRICS["loss"].tolist(), _LOSS + ".tolist()"),
        (lambda: np.asarray(_METRICS["loss"]), _LOSS + "NumPy"),
        (lambda: np.array(_METRICS["loss"]), _LOSS + "NumPy"),
        (lambda: np.asarray(_SHARDED), "_SHARDED, float32[4] on P('i') over i=4, is read by NumPy"),
    ],
    ids=[
        "float",
        "int",
        "bool",
        "print",
        "format",
        "repr",
        "item",
        "tolist",
        "asarray",
        "array",
        "sharded",
    ],
)
def test_arrays_read_on_the_host_are_named(act, which):
    _METRICS["loss"], _METRICS["steps"] = jnp.float32(2.5), [jnp.int32(3)]
    globals()["_SHARDED"] = jax.device_put(_X, _CUT)  # not read before, so not remembered

    with refused(TransferError) as error, only_transfers():
        act()

    which = which or "_METRICS['steps'][0], int32[] on device 0, is read by int"
    assert said_by(error, act) == text(_TO_HOST.format(which=which))


@pytest.mark.skipif(sys.version_info < (3, 12), reason="memory of the CPU goes past all of Python")
def test_a_view_of_the_memory_is_reported():
    with refused(TransferError, match="is read by memoryview"), only_transfers():
        memoryview(jnp.ones(3))


def test_arrays_between_devices_are_named():
    placed = jax.device_put(_X, _CUT)
    act = lambda: on_mesh(_X, placed)
    act()

    with refused(TransferError) as error, only_transfers():
        act()

    assert said_by(error, act) == text("""
        The call of '<lambda>' would move arrays between devices, at HERE:
          * x is float32[4] on device 0
        Because it moves them again in each call, and strict wants explicit transfers.
        Place them with jax.device_put(x, sharding), once if they stay the same, or use `with \
jax_dist.allow_transfers():`.
    """)


@pytest.mark.parametrize(
    "act",
    [
        lambda: double(2.0),
        lambda: double(np.float32(2)),
        lambda: _X + 1,
        lambda: _X[0],
        lambda: _X[1:3],
        lambda: _X[-1],
        lambda: _X > 0,
        lambda: _X.at[0].set(5.0),
        lambda: jnp.ones(3),
        lambda: jax.random.key(0),
        lambda: _SHARDED + 1,
        lambda: double(_X),
        lambda: double(_SHARDED),
        lambda: jax.device_put(_ON_HOST),
        lambda: jax.device_get(_X),
        lambda: jax.device_get({"a": _SHARDED}),
        lambda: jax.block_until_ready(_X),
        lambda: list(_X),
    ],
)
def test_numbers_indices_and_what_is_said_may_move(act):
    act()

    with only_transfers():
        act()


@pytest.mark.parametrize("read", [np.asarray, lambda array: array.tolist()])
def test_what_the_host_has_already_may_be_read(read):
    cut = jax.device_put(_X, _CUT)
    jax.device_get(cut)

    with only_transfers():
        read(cut)


def test_allowed_in_a_block_and_refused_again_after_it():
    with only_transfers():
        with allow_transfers():
            assert float(_X[0]) == 1.0
            double(_ON_HOST)
        with refused(TransferError):
            double(_ON_HOST)


def test_the_guard_of_jax_inside_has_its_say():
    with only_transfers(), jax.transfer_guard("allow"):
        assert float(jnp.float32(2.5)) == 2.5


def test_a_captured_array_is_read_by_jax_while_it_compiles():
    table = jnp.arange(3.0)

    with only_transfers():
        assert jax.device_get(jax.jit(lambda x: x + table)(jnp.ones(3))).tolist() == [1, 2, 3]


def test_nothing_is_left_behind():
    with only_transfers():
        pass

    assert not hasattr(np.asarray, "__wrapped__")
    assert not hasattr(np.array, "__wrapped__")
    assert vars(type(_X))["_value"].fget.__module__ == "jax._src.array"
    assert type(vars(type(_X)).get("__buffer__")).__name__ in ("NoneType", "wrapper_descriptor")
    assert jax.config.jax_transfer_guard_device_to_host in (None, "allow")
    assert memoryview(jnp.ones(3)).nbytes == 12
