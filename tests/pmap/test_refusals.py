"""Each refusal has a text in four parts, and its error can travel between processes."""

import pickle
import textwrap
import typing

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_dist
from jax_dist import errors
from jax_dist._pmap import axes, meshes

pytestmark = pytest.mark.mapping

_EIGHT = np.arange(8.0)
_TWO = jax.devices()[:2]


def test_sizes_that_differ_are_named_one_by_one():
    error = axes.mapped_sizes_differ("step", {"batch['x']": 8, "mask": 7})

    assert str(error) == textwrap.dedent("""\
        pmap of 'step' got arguments of different sizes along the mapped axis:
          * batch['x'] has size 8
          * mask has size 7
        Because every device takes one slice of each mapped argument.
        Slice them alike, or give in_axes=None to what all devices share.""")


def _identity(x):
    return x


class _Device(typing.NamedTuple):
    process_index: int
    id: int
    platform: str = "cpu"


def _on_processes(*counts):
    """Lays 7 slices over devices of several processes, so many each."""
    devices = [_Device(owner, number) for owner, n in enumerate(counts) for number in range(n)]
    choice = meshes.DeviceChoice("f", "i", tuple(devices), None, None, virtual=False)
    choice.lay_out(7, whole=True)


def _in_foreign_shard_map(x):
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    inner = jax_dist.pmap(_identity, "j")
    return jax.shard_map(inner, mesh=mesh, in_specs=P("i"), out_specs=P("i"))(x)


def _inside(**options):
    inner = jax_dist.pmap(_identity, "j", **options)
    return lambda: jax_dist.pmap(lambda x: inner(x), "i")(np.ones((2, 2)))


def _over(collective, **options):
    return lambda: jax_dist.pmap(collective, "i", **options)(_EIGHT)


def _under_a_mesh_of_eight():
    mesh = jax.make_mesh((8,), ("m",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        jax.jit(jax_dist.pmap(_identity))(np.ones(3))


_REFUSED = {
    "not_callable": lambda: jax_dist.pmap(3),
    "no_devices": lambda: jax_dist.pmap(_identity, devices=[]),
    "not_devices": lambda: jax_dist.pmap(_identity, devices=8),
    "not_devices, a text": lambda: jax_dist.pmap(_identity, devices="cpu"),
    "nothing_in_axis": lambda: jax_dist.pmap(_identity)(np.ones(0)),
    "arguments_are_no_arrays": lambda: jax_dist.pmap(_identity)("train"),
    "list_of_numbers": lambda: jax_dist.pmap(_identity)([1.0] * 8),
    "unbound_axis": lambda: jax_dist.pmap(lambda x: lax.psum(x, "i"), "j")(_EIGHT),
    "groups_leave_some_out": _over(
        lambda x: lax.psum(x, "i", axis_index_groups=((0, 1), (2, 3))),
    ),
    "unknown_choice, arrays": lambda: jax_dist.pmap(_identity, arrays="whole"),
    "unknown_choice, captures": lambda: jax_dist.pmap(_identity, captures="some"),
    "unknown_choice, gathers": lambda: jax_dist.pmap(_identity, gathers="some"),
    "mapped_sizes_differ": lambda: jax_dist.pmap(lambda x, y: x)(_EIGHT, np.ones(2)),
    "nothing_mapped": lambda: jax_dist.pmap(_identity, in_axes=None)(_EIGHT),
    "nothing_mapped, no argument": lambda: jax_dist.pmap(lambda: 1)(),
    "axis_out_of_range, in_axes": lambda: jax_dist.pmap(_identity, in_axes=1)(_EIGHT),
    "axis_out_of_range, out_axes": lambda: jax_dist.pmap(_identity, out_axes=1)(_EIGHT),
    "output_is_no_array": lambda: jax_dist.pmap(lambda x: (x, "text"))(_EIGHT),
    "axes_of_wrong_type": lambda: jax_dist.pmap(_identity, in_axes="i"),
    "axes_not_a_prefix": lambda: axes.spread_in_axes((0, 0), (1.0,), {}, "f"),
    "axes_not_a_prefix, keywords": lambda: axes.spread_in_axes((0, 0), (1.0,), {"y": 1}, "f"),
    "too_few_devices": lambda: jax_dist.pmap(_identity, "i")(np.ones(9)),
    "devices_of_another_length": lambda: jax_dist.pmap(_identity, devices=_TWO)(np.ones(1)),
    "size_not_as_promised": lambda: jax_dist.pmap(_identity, axis_size=8)(np.ones(4)),
    "size_not_as_promised, inside": _inside(axis_size=8),
    "uneven_processes": lambda: _on_processes(4, 2),
    "inner_devices_given": _inside(devices=_TWO),
    "inside_foreign_shard_map": lambda: jax.jit(_in_foreign_shard_map)(np.ones((16, 2))),
    "static_argument_missing": lambda: jax_dist.pmap(lambda x, n: x, static_broadcasted_argnums=1)(
        _EIGHT, n=1
    ),
    "static_argument_unhashable": lambda: jax_dist.pmap(
        lambda x, n: x, static_broadcasted_argnums=1
    )(_EIGHT, [1]),
    "static_argument_missing, out of range": lambda: jax_dist.pmap(
        _identity, static_broadcasted_argnums=3
    )(_EIGHT),
    "name_not_hashable": lambda: jax_dist.pmap(_identity, ["i"]),
    "unknown_option": lambda: jax_dist.pmap(_identity, axis="i"),
    "bad_argument_numbers": lambda: jax_dist.pmap(_identity, donate_argnums=-1),
    "no_virtual_size": lambda: jax_dist.pmap(_identity, virtual=True, devices=_TWO)(np.ones(7)),
    "under_another_mesh": _under_a_mesh_of_eight,
    "no_permutation": _over(
        lambda x: lax.ppermute(x, "i", ((0, 1), (0, 2))), virtual=True, devices=_TWO
    ),
    "groups_not_whole": _over(
        lambda x: lax.psum(x, "i", axis_index_groups=[[0, 1], [2, 3]]), virtual=True, devices=_TWO
    ),
    "groups_of_unlike_sizes": _over(
        lambda x: lax.all_gather(x, "i", axis_index_groups=[[0], [*range(1, 8)]]),
        virtual=True,
        devices=_TWO,
    ),
    "collective_on_slices": _over(
        lambda x: lax.ragged_all_to_all(
            x[None], x[None], *[jax.numpy.zeros(8, int)] * 4, axis_name="i"
        ),
        virtual=True,
        devices=_TWO,
    ),
    "shards_do_not_match": lambda: jax_dist.device_put_sharded([1.0], _TWO),
    "shards_do_not_match, no devices": lambda: jax_dist.device_put_replicated(1.0, []),
    "shards_differ": lambda: jax_dist.device_put_sharded(
        [{"w": np.ones(2)}, {"w": np.ones(3)}], _TWO
    ),
    "shards_differ, structures": lambda: jax_dist.device_put_sharded([{"w": 1}, {"v": 1}], _TWO),
    "not_replicated": lambda: jax_dist.unreplicate({"w": 3}),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_a_message_has_four_parts_and_the_error_can_travel(name):
    with pytest.raises((ValueError, TypeError, NameError, NotImplementedError)) as caught:
        _REFUSED[name]()
    again = pickle.loads(pickle.dumps(caught.value))

    assert type(again) in {TypeError, ValueError, *map(errors.__dict__.get, errors.__all__)}
    assert type(again) is type(caught.value)
    assert str(again) == str(caught.value)
    what, *which, why, do = str(caught.value).splitlines()
    assert what.endswith(":")
    assert which
    assert all(line.startswith("  * ") for line in which)
    assert why.startswith("Because ")
    assert why.endswith(".")
    assert do.endswith(".")
