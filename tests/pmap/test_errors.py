"""Each mistake that a user can make: the type of the error, and what it says."""

import functools
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jax_dist
from jax_dist import errors

_EIGHT = np.arange(8.0)
_TWO = jax.devices()[:2]


def _first(x, *rest, **keywords):
    return x


def _decorate(**options):
    return lambda: jax_dist.pmap(_first, **options)


def _call(*args, fun=_first, keywords=None, **options):
    return lambda: jax_dist.pmap(fun, **options)(*args, **(keywords or {}))


def _nested(rows=2, **options):
    inner = jax_dist.pmap(_first, "j", **options)
    return lambda: jax_dist.pmap(lambda x: inner(x), "i")(np.ones((rows, 2)))


def _in_foreign_shard_map():
    mesh, inner = Mesh(np.array(jax.devices()), ("i",)), jax_dist.pmap(_first, "j")
    mapped = jax.shard_map(inner, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    jax.jit(mapped)(np.ones((16, 2)))


def _under_a_mesh_of_eight():
    with jax.set_mesh(jax.make_mesh((8,), ("m",), axis_types=(AxisType.Explicit,))):
        jax.jit(jax_dist.pmap(_first))(np.ones(3))


def _under_a_vmap_of_its_name():  # where jax.pmap gives 2
    mapped = jax_dist.pmap(lambda x: lax.psum(x, "i"), "i")
    jax.vmap(mapped, axis_name="i")(np.ones((2, 8)))


_MISTAKES = {  # by the class of the error: words of its text, and the call
    TypeError: {
        "pmap needs a function, got 3.": lambda: jax_dist.pmap(3),
        "unexpected keyword argument 'axis'": _decorate(axis="i"),
    },
    NameError: {
        "unbound axis name: batch": _call(_EIGHT, fun=lambda x: lax.psum(x, "batch")),
    },
    ValueError: {
        "'devices' argument to pmap must be non-empty, or None": _decorate(devices=[]),
        "arrays must be 'local' or 'global'": _decorate(arrays="whole"),
        "captures must be 'lift' or 'warn' or": _decorate(captures="some"),
        "gathers must be 'reduce' or 'exact'": _decorate(gathers="some"),
        **{
            f"{name} must hold non-negative integers, got {value!r}": _decorate(**{name: value})
            for name in ("donate_argnums", "static_broadcasted_argnums")
            for value in (-1, (0, -2), "0", 1.5)
        },
        "Non-hashable static arguments": _call(_EIGHT, [3, 4], static_broadcasted_argnums=1),
    },
    errors.ArgumentTypeError: {
        "must be a str, got ['i']": _decorate(axis_name=["i"]),
        "pmap in_axes must be an int, None": _decorate(in_axes="i"),
        "pmap out_axes must be an int, None": _decorate(out_axes=True),
        "(1.0,) holds 1.0": _decorate(in_axes=(1.0,)),
        "Give jax.devices()[:3].": _decorate(devices=3),
        "non-array value: output[1] is a str ('done').": _call(_EIGHT, fun=lambda x: (x, "done")),
        **{
            f"got a non-array argument: y[{name!r}] is a {kind} (": _call(
                _EIGHT, {name: value}, fun=lambda x, y: x, in_axes=(0, axis)
            )
            for axis in (0, None)
            for kind, name, value in (
                ("str", f"text, {axis}", "train"),
                ("object", f"object, {axis}", object()),
                ("ndarray", f"texts, {axis}", np.array(["a", "b"])),
                ("ndarray", f"objects, {axis}", np.array([object()] * 8)),
                ("ndarray", f"times, {axis}", np.array(["2020-01-01"], "datetime64[D]")),
            )
        },
    },
    errors.MappedAxisError: {
        "different sizes along the mapped axis; all must be equal (batch['x']: 8, mask: 7).": (
            _call({"x": _EIGHT}, np.ones(7), fun=lambda batch, mask: mask)
        ),
        "(x: 8, args[1]: 7).": _call(_EIGHT, np.ones(7)),
        "axis (not mapped: x). Map one": _call(_EIGHT, in_axes=None),
        "got an empty mapped axis (size 0)": _call(np.ones((0, 3))),
        "in_axes ((0, 0, 0), 0) is not a tree prefix of the positional arguments: pytree "
        "structure error: different lengths of tuple at key path\n    pmap in_axes[0][0]": _call(
            (_EIGHT, _EIGHT), _EIGHT, in_axes=((0, 0, 0), 0)
        ),
        "each argument passed by keyword is mapped over its leading axis": _call(
            in_axes=(0, 0), keywords={"x": _EIGHT, "y": _EIGHT}
        ),
        "in_axes 0 is out of range for x['w'], which has shape ().": _call({"w": 3.0}, _EIGHT),
        "out_axes 1 is out of range for output['a'] of shape () on each device.": _call(
            _EIGHT, fun=lambda x: {"a": x}, out_axes=1
        ),
        "is not a tree prefix of the output: pytree structure error: different lengths": _call(
            _EIGHT, fun=lambda x: ((x, x), x), out_axes=((0, 0, 0), 0)
        ),
        "size=8 does not match the mapped axis, which has size 4": _call(np.ones(4), axis_size=8),
        "size=8 does not match the mapped axis, which has size 2": _nested(axis_size=8),
        "give devices= to the outermost pmap only": _nested(devices=_TWO),
        "inside a shard_map over ('i',), which pmap cannot extend": _in_foreign_shard_map,
        "but is traced under a mesh of 8": _under_a_mesh_of_eight,
        "over axis 'i', which a vmap around it maps, too": _under_a_vmap_of_its_name,
    },
    errors.DeviceCountError: {
        "needs 9 devices, but there are 8 (axis 'i' has size 9). Reshape the arguments to "
        "[devices, k, ...] and use jax.vmap with axis_name=, or jax.lax.map, inside": _call(
            np.ones(9), axis_name="i"
        ),
        "16 devices, but there are 8 (axis 'i' has size 8, axis 'j' has size 2)": _nested(rows=8),
        "got 2 devices for an axis of size 1": _call(np.ones(1), devices=_TWO),
    },
    errors.ArgumentError: {
        "static_broadcasted_argnums (1,), but the call has only 1 positional arguments": _call(
            _EIGHT, static_broadcasted_argnums=1, keywords={"y": 3}
        ),
        "got 1 shards for 2 devices": lambda: jax_dist.device_put_sharded([1.0], _TWO),
        "got shards['w'] that differ in shape or dtype: float32[2], float32[3]": (
            lambda: jax_dist.device_put_sharded([{"w": np.ones(2)}, {"w": np.ones(3)}], _TWO)
        ),
        "device_put_replicated got no devices": lambda: jax_dist.device_put_replicated(1.0, []),
        "but tree['w'] has shape ().": lambda: jax_dist.unreplicate({"w": 3}),
        "tree['x'] of shape (9, 2); the leading dimension must be a multiple of the 8 devices": (
            lambda: jax_dist.shard({"x": np.ones((9, 2))})
        ),
    },
}


@pytest.mark.parametrize(
    ("kind", "words"), [(kind, words) for kind, calls in _MISTAKES.items() for words in calls]
)
def test_the_error_of_a_mistake(kind, words):
    for _ in range(2):  # the same each time
        with pytest.raises(kind, match=re.escape(words)) as caught:
            _MISTAKES[kind][words]()
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
