"""Arguments that lie on some devices of the mesh only, put on all of it."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def put_on(mesh: Mesh, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """The arguments with every array on all devices of the mesh, cut as it was where that fits.

    jit refuses a program whose arrays have unlike devices. What a pmap outside of the rewriting
    made lies on the devices of that pmap; those inside are moved to the mesh.

    Returns:
      None if nothing lies elsewhere, so that the refusal is about something else.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if _lies_elsewhere(leaf, mesh)]
    for place in places:
        leaf = leaves[place]
        leaves[place] = jax.device_put(leaf, NamedSharding(mesh, _spec_on(mesh, leaf)))
    return jax.tree.unflatten(tree, leaves) if places else None


def _lies_elsewhere(leaf: Any, mesh: Mesh) -> bool:
    if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
        return False
    return leaf.committed and leaf.sharding.device_set != set(mesh.devices.flat)


def _spec_on(mesh: Mesh, leaf: jax.Array) -> P:
    """Each cut dimension over an axis of as many devices; whole where there is none."""
    sharding = leaf.sharding
    if not isinstance(sharding, NamedSharding):
        return P()
    free = dict(mesh.shape)
    return P(*[_axis_like(free, sharding.mesh, part) for part in sharding.spec])


def _axis_like(free: dict[str, int], own: Any, part: Any) -> str | None:
    names: Sequence[str] = part if isinstance(part, tuple) else (part,)
    if part is None or len(names) != 1:
        return None
    fitting = [name for name, size in free.items() if size == own.shape[names[0]]]
    if not fitting:
        return None
    chosen = names[0] if names[0] in fitting else fitting[0]
    del free[chosen]
    return chosen
