"""Mapped functions under every kind of mesh that a user may have set by `jax.set_mesh`."""

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from watching import put

import jax_dist
from jax_dist import errors

_MESHES = {
    "another name": ((8,), ("q",)),
    "its own name": ((8,), ("i",)),
    "4 x 2": ((4, 2), ("a", "b")),
    "two of the devices": ((2,), ("q",)),
}
_USES = {  # what is made of a mapped function; what it gives for x of that sum, with slices 0 to n
    "call": (lambda f: f, lambda x, total, n: x * total + n),
    "jit": (jax.jit, lambda x, total, n: x * total + n),
    "grad": (lambda f: jax.grad(lambda x: f(x).sum()), lambda x, total, n: 0 * x + 2 * total),
    "jit of more": (
        lambda f: jax.jit(lambda x: f(x * 2) + x.sum()),
        lambda x, total, n: 4 * x * total + n + total,
    ),
}


def _ranked(v, over="i"):
    return v * lax.psum(v, over) + lax.axis_index("i")


def _nested(row):
    return jax_dist.pmap(lambda v: _ranked(v, ("o", "i")), "i")(row)


_MAPS = {
    "map": (jax_dist.pmap(_ranked, "i"), np.arange(8, dtype=np.float32)),
    "nested": (jax_dist.pmap(_nested, "o"), np.arange(8, dtype=np.float32).reshape(2, 4)),
}


def _mesh(name: str, kind: AxisType) -> Mesh:
    shape, names = _MESHES[name]
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, names, axis_types=(kind,) * len(names))


@pytest.mark.parametrize("use", _USES)
@pytest.mark.parametrize("cut", [False, True], ids=["", "cut"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", _MESHES)
@pytest.mark.parametrize("maps", ["map", pytest.param("nested", marks=pytest.mark.thorough)])
def test_right_or_refused(maps, name, kind, cut, use):
    (mapped, x), (wrap, expected) = _MAPS[maps], _USES[use]
    mesh = _mesh(name, kind)
    first_axis = mesh.axis_names[:1] if len(x) % mesh.devices.shape[0] == 0 else ()

    with jax.set_mesh(mesh):
        argument = put(x, mesh, *first_axis) if cut else x
        # A program runs on one set of devices, and the outer of two pmaps needs two of them.
        if use != "call" and (mesh.size != x.size or maps == "nested"):
            with pytest.raises(errors.MappedAxisError, match="under a mesh"):
                wrap(mapped)(argument)
            return
        result = wrap(mapped)(argument)
    np.testing.assert_allclose(result, expected(x, x.sum(), np.arange(x.shape[-1])), rtol=1e-6)


def test_a_result_can_be_computed_with_where_shardings_are_types():
    mesh = _mesh("4 x 2", AxisType.Explicit)

    with jax.set_mesh(mesh):
        x = put(np.arange(8.0, dtype=np.float32), mesh, ("a", "b"))
        sum_of_both = jax_dist.pmap(_ranked, "i")(x) + x

        first = jax_dist.unreplicate({"both": sum_of_both})
    assert first["both"] == 0
    assert sum_of_both.sharding == NamedSharding(mesh, P(("a", "b")))
    np.testing.assert_allclose(sum_of_both, np.arange(8) * 30.0)
