"""Each mistake that a user can make: the type of the error, and what it says."""

import functools
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_dist
from jax_dist import errors

_EIGHT = np.arange(8.0)
_TWO = jax.devices()[:2]
_AXIS, _KIND = errors.MappedAxisError, errors.ArgumentTypeError


def _identity(x):
    return x


def _decorate(**options):
    return lambda: jax_dist.pmap(_identity, **options)


def _call(*args, fun=_identity, axis_name=None, keywords=None, **options):
    return lambda: jax_dist.pmap(fun, axis_name, **options)(*args, **(keywords or {}))


def _inside(rows=2, **options):
    inner = jax_dist.pmap(_identity, "j", **options)
    return lambda: jax_dist.pmap(lambda x: inner(x), "i")(np.ones((rows, 2)))


def _in_foreign_shard_map(x):
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    inner = jax_dist.pmap(_identity, "j")
    return jax.shard_map(inner, mesh=mesh, in_specs=P("i"), out_specs=P("i"))(x)


def _under_a_mesh_of_eight():
    mesh = jax.make_mesh((8,), ("m",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        jax.jit(jax_dist.pmap(_identity))(np.ones(3))


_two = lambda x, y: x
_psum = lambda name, **options: lambda x: lax.psum(x, name, **options)

_CASES = {  # the call, the class of its error, and words of its text
    "no function": (lambda: jax_dist.pmap(3), TypeError, "pmap needs a function, got 3."),
    "unknown option": (_decorate(axis="i"), TypeError, "unexpected keyword argument 'axis'"),
    "axis name": (_decorate(axis_name=["i"]), _KIND, "must be a str, got ['i']"),
    "in_axes type": (_decorate(in_axes="i"), _KIND, "pmap in_axes must be an int, None"),
    "out_axes type": (_decorate(out_axes=True), _KIND, "pmap out_axes must be an int, None"),
    "axes in a tuple": (_decorate(in_axes=(1.0,)), _KIND, "(1.0,) holds 1.0"),
    "no devices": (_decorate(devices=[]), ValueError, "must be non-empty, or None"),
    "a number of devices": (_decorate(devices=3), _KIND, "Give jax.devices()[:3]."),
    "arrays": (_decorate(arrays="whole"), ValueError, "arrays must be 'local' or 'global'"),
    "captures": (_decorate(captures="some"), ValueError, "must be 'lift' or 'warn' or"),
    "gathers": (_decorate(gathers="some"), ValueError, "gathers must be 'reduce' or 'exact'"),
    **{
        f"{name}={value!r}": (_decorate(**{name: value}), ValueError, f"{name} must hold non-neg")
        for name in ("donate_argnums", "static_broadcasted_argnums")
        for value in (-1, (0, -2), "0", 1.5)
    },
    "unequal sizes": (
        _call({"x": _EIGHT}, np.ones(7), fun=lambda batch, mask: mask),
        _AXIS,
        "got arguments of different sizes along the mapped axis; all must be equal "
        "(batch['x']: 8, mask: 7).",
    ),
    "unequal sizes, no names": (
        _call(_EIGHT, np.ones(7), fun=lambda x, *rest: x),
        _AXIS,
        "(x: 8, args[1]: 7).",
    ),
    "nothing mapped": (_call(_EIGHT, in_axes=None), _AXIS, "axis (not mapped: x). Map one"),
    "empty axis": (_call(np.ones((0, 3))), _AXIS, "got an empty mapped axis (size 0)"),
    "in_axes, path": (
        _call((_EIGHT, _EIGHT), _EIGHT, fun=_two, in_axes=((0, 0, 0), 0)),
        _AXIS,
        "in_axes ((0, 0, 0), 0) is not a tree prefix of the positional arguments: pytree "
        "structure error: different lengths of tuple at key path\n    pmap in_axes[0][0]",
    ),
    "in_axes, keywords": (
        _call(fun=_two, in_axes=(0, 0), keywords={"x": _EIGHT, "y": _EIGHT}),
        _AXIS,
        "each argument passed by keyword is mapped over its leading axis",
    ),
    "in_axes, range": (
        _call(_EIGHT, {"w": 3.0}, fun=_two),
        _AXIS,
        "in_axes 0 is out of range for y['w'], which has shape ().",
    ),
    "out_axes, range": (
        _call(_EIGHT, fun=lambda x: {"a": x}, out_axes=1),
        _AXIS,
        "out_axes 1 is out of range for output['a'] of shape () on each device.",
    ),
    "out_axes, prefix": (
        _call(_EIGHT, fun=lambda x: ((x, x), x), out_axes=((0, 0, 0), 0)),
        _AXIS,
        "is not a tree prefix of the output: pytree structure error: different lengths of tuple",
    ),
    "output": (
        _call(_EIGHT, fun=lambda x: (x, "done")),
        _KIND,
        "returned a non-array value: output[1] is a str ('done').",
    ),
    **{
        f"argument, {words}, {axis}": (
            _call(_EIGHT, value, fun=lambda x, how: x, in_axes=(0, axis)),
            _KIND,
            f"got a non-array argument: how is {words}",
        )
        for axis in (0, None)
        for value, words in (
            ("train", "a str ('train')"),
            (object(), "a object"),
            (np.array(["a", "b"]), "a ndarray (array(["),
            (np.array([object()] * 8), "a ndarray (array(["),
            (np.array(["2020-01-01"], "datetime64[D]"), "a ndarray (array(["),
        )
    },
    "too few devices": (
        _call(np.ones(9), axis_name="i"),
        errors.DeviceCountError,
        "needs 9 devices, but there are 8 (axis 'i' has size 9). Reshape the arguments to "
        "[devices, k, ...] and use jax.vmap with axis_name=, or jax.lax.map, inside",
    ),
    "too few devices, nested": (
        _inside(rows=8),
        errors.DeviceCountError,
        "needs 16 devices, but there are 8 (axis 'i' has size 8, axis 'j' has size 2)",
    ),
    "more devices": (
        _call(np.ones(1), devices=_TWO),
        errors.DeviceCountError,
        "got 2 devices for an axis of size 1",
    ),
    "axis_size": (
        _call(np.ones(4), axis_size=8),
        _AXIS,
        "axis_size=8 does not match the mapped axis, which has size 4",
    ),
    "axis_size, nested": (_inside(axis_size=8), _AXIS, "axis_size=8 does not match"),
    "devices, nested": (_inside(devices=_TWO), _AXIS, "give devices= to the outermost pmap only"),
    "in a foreign shard_map": (
        lambda: jax.jit(_in_foreign_shard_map)(np.ones((16, 2))),
        _AXIS,
        "is called inside a shard_map over ('i',), which pmap cannot extend",
    ),
    "under another mesh": (_under_a_mesh_of_eight, _AXIS, "but is traced under a mesh of 8"),
    "under a vmap of its name": (
        lambda: jax.vmap(jax_dist.pmap(_psum("i"), "i"), axis_name="i")(np.ones((2, 8))),
        _AXIS,
        "has collectives over axis 'i', which a vmap around it maps, too",  # jax.pmap gives 2
    ),
    "static, unhashable": (
        _call(_EIGHT, [3, 4], fun=lambda x, layers: x, static_broadcasted_argnums=1),
        ValueError,  # of JAX
        "Non-hashable static arguments are not supported",
    ),
    "static, missing": (
        _call(_EIGHT, fun=_two, static_broadcasted_argnums=1, keywords={"y": 3}),
        errors.ArgumentError,
        "has static_broadcasted_argnums (1,), but the call has only 1 positional arguments",
    ),
    "unbound axis": (_call(_EIGHT, fun=_psum("batch")), NameError, "unbound axis name: batch"),
    "shards": (
        lambda: jax_dist.device_put_sharded([1.0], _TWO),
        errors.ArgumentError,
        "got 1 shards for 2 devices",
    ),
    "shards, shapes": (
        lambda: jax_dist.device_put_sharded([{"w": np.ones(2)}, {"w": np.ones(3)}], _TWO),
        errors.ArgumentError,
        "got shards['w'] that differ in shape or dtype: float32[2], float32[3]",
    ),
    "copies, no devices": (
        lambda: jax_dist.device_put_replicated(1.0, []),
        errors.ArgumentError,
        "device_put_replicated got no devices",
    ),
    "unreplicate, scalar": (
        lambda: jax_dist.unreplicate({"w": 3}),
        errors.ArgumentError,
        "but tree['w'] has shape ().",
    ),
    "shard, rows": (
        lambda: jax_dist.shard({"x": np.ones((9, 2))}),
        errors.ArgumentError,
        "tree['x'] of shape (9, 2); the leading dimension must be a multiple of the 8 devices",
    ),
}


@pytest.mark.parametrize("name", _CASES)
def test_the_error_of_a_mistake(name):
    call, kind, words = _CASES[name]

    for _ in range(2):  # the same each time
        with pytest.raises(kind, match=re.escape(words)) as caught:
            call()
    again = pickle.loads(pickle.dumps(caught.value))  # errors travel between processes
    assert (type(again), str(again)) == (type(caught.value), str(caught.value))


@pytest.mark.parametrize("error", [ValueError("mine"), TypeError("mine"), KeyError("mine")])
@pytest.mark.parametrize("place", [lambda x: x, lambda x: jax.device_put(x, jax.devices()[3])])
def test_errors_of_the_body_come_through_once(error, place):
    calls = []

    @functools.partial(jax_dist.pmap, axis_name="i")
    def body(x):
        calls.append(x.shape)
        raise error

    with pytest.raises(type(error), match="mine") as caught:
        body(place(jnp.arange(8.0)))
    assert caught.value.__context__ is None
    assert calls == [()]


def test_a_right_call_after_a_wrong_one_and_the_same_error_again():
    step = jax_dist.pmap(lambda x, y: x + y)

    for _ in range(2):
        with pytest.raises(errors.MappedAxisError):
            step(_EIGHT, np.ones(7))
        assert step(_EIGHT, _EIGHT).tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
