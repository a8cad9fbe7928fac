"""Mapped functions under every kind of mesh that a user may have set by `jax.set_mesh`."""

import itertools

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dist
from jax_dist import errors

_MESHES = {
    "another name": ((8,), ("q",)),
    "its own name": ((8,), ("i",)),
    "4 x 2": ((4, 2), ("a", "b")),
    "two of the devices": ((2,), ("q",)),
}
_USES = {  # and what each gives for x, with the index of its slices
    "call": (lambda mapped: mapped, lambda x, n: x * x.sum() + n),
    "jit": (jax.jit, lambda x, n: x * x.sum() + n),
    "grad": (
        lambda mapped: jax.grad(lambda x: mapped(x).sum()),
        lambda x, n: np.full_like(x, 2 * x.sum()),
    ),
    "jit of more": (
        lambda mapped: jax.jit(lambda x: mapped(x * 2) + x.sum()),
        lambda x, n: 4 * x * x.sum() + n + x.sum(),
    ),
}


def _ranked(v):
    return v * lax.psum(v, "i") + lax.axis_index("i")


def _nested(row):
    def inner(v):
        return v * lax.psum(v, ("o", "i")) + lax.axis_index("i")

    return jax_dist.pmap(inner, "i")(row)


_MAPS = {
    "map": (lambda: jax_dist.pmap(_ranked, "i"), np.arange(8, dtype=np.float32)),
    "nested": (lambda: jax_dist.pmap(_nested, "o"), np.arange(8, dtype=np.float32).reshape(2, 4)),
}


def _mesh(name: str, kind: AxisType) -> Mesh:
    shape, names = _MESHES[name]
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, names, axis_types=(kind,) * len(names))


def _on(mesh: Mesh, x: np.ndarray) -> jax.Array:
    """Cut over the first axis of the mesh, if that fits."""
    first = mesh.axis_names[0] if x.shape[0] % mesh.devices.shape[0] == 0 else None
    return jax.device_put(x, NamedSharding(mesh, P(first)))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", _MESHES)
@pytest.mark.parametrize("shape", ["map", pytest.param("nested", marks=pytest.mark.thorough)])
def test_right_or_refused(shape: str, name: str, kind: AxisType):
    make, x = _MAPS[shape]
    mesh = _mesh(name, kind)
    # A program runs on one set of devices, and the outer of two pmaps needs two of them.
    refuses = mesh.size != x.size or shape == "nested"

    for (use, (wrap, oracle)), cut in itertools.product(_USES.items(), (False, True)):
        if cut and use == "jit":
            continue  # as in a jit of more
        with jax.set_mesh(mesh):
            argument = _on(mesh, x) if cut else x
            if refuses and use != "call":
                with pytest.raises(errors.MappedAxisError, match="under a mesh"):
                    wrap(make())(argument)
                continue
            result = wrap(make())(argument)
        expected = oracle(x, np.arange(x.shape[-1]))
        np.testing.assert_allclose(result, expected, rtol=1e-6, err_msg=f"{use}, cut: {cut}")


def test_a_result_can_be_computed_with_where_shardings_are_types():
    mesh = _mesh("4 x 2", AxisType.Explicit)

    with jax.set_mesh(mesh):
        x = jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(mesh, P(("a", "b"))))
        sum_of_both = jax_dist.pmap(_ranked, "i")(x) + x

        first = jax_dist.unreplicate({"both": sum_of_both})
    assert first["both"] == 0
    assert sum_of_both.sharding == NamedSharding(mesh, P(("a", "b")))
    np.testing.assert_allclose(sum_of_both, np.arange(8) * 30.0)
