"""How each leaf of the state lies on the mesh."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist.global_views import refusals

Named: TypeAlias = Literal["replicated", "fsdp"]
Rule: TypeAlias = Callable[[str, jax.ShapeDtypeStruct], P]
Shardings: TypeAlias = Named | Rule

SMALL = 1024  # elements; below, a leaf stays whole under "fsdp"


def check_shardings(shardings: Any) -> None:
    """Raises ArgumentTypeError for what is neither a name nor a rule."""
    if not callable(shardings) and shardings not in get_args(Named):
        choices = "'replicated', 'fsdp', or a function of a path and a shape that gives a spec"
        raise refusals.unknown_choice("shardings", shardings, choices)


def specs_of(
    shardings: Shardings,
    mesh: Mesh,
    name: Any,
    paths: Sequence[str],
    leaves: Sequence[jax.ShapeDtypeStruct],
) -> list[P]:
    """How each leaf is to lie if it is shared.

    Args:
      shardings: as it was given.
      mesh: the mesh.
      name: of the mapped axis.
      paths: of each leaf, as in "params/dense/kernel".
      leaves: their types, without a dimension for devices.

    Raises:
      GlobalViewError: a rule gives a spec that does not fit.
    """
    if shardings == "replicated":
        return [P()] * len(leaves)
    if shardings == "fsdp":
        return [fully_sharded(leaf.shape, mesh.shape[name], name) for leaf in leaves]
    specs = []
    for path, leaf in zip(paths, leaves, strict=True):
        spec = shardings(path, leaf)
        _check_spec(path, leaf.shape, spec, mesh)
        specs.append(spec)
    return specs


def fully_sharded(shape: Sequence[int], size: int, name: Any) -> P:
    """Along the longest dimension that the devices divide; small arrays whole.

    >>> fully_sharded((3, 256, 1024), 8, "i") == P(None, None, "i")
    True
    """
    fitting = [dim for dim, length in enumerate(shape) if length and length % size == 0]
    if not fitting or math.prod(shape) < SMALL:
        return P()
    longest = max(fitting, key=lambda dim: shape[dim])
    return P(*[None] * longest, name)


def is_cut(spec: P) -> bool:
    """Whether it cuts anything."""
    return any(part is not None and part != () for part in spec)


def bytes_per_device(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> int:
    """What one device holds of a leaf."""
    shape = sharding.shard_shape(leaf.shape)
    return math.prod(shape) * item_size(leaf.dtype)


def item_size(dtype: Any) -> int:
    """The bytes of one element; of a random key, those of its data."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
        return math.prod(data.shape) * data.dtype.itemsize
    return dtype.itemsize


def _check_spec(path: str, shape: Sequence[int], spec: Any, mesh: Mesh) -> None:
    if not isinstance(spec, P):
        raise refusals.bad_sharding(path, shape, spec, "it is no PartitionSpec")
    if len(spec) > len(shape):
        raise refusals.bad_sharding(path, shape, spec, "it has more parts than dimensions")
    for length, part in zip(shape, spec, strict=False):
        names = part if isinstance(part, tuple) else (part,) if part is not None else ()
        unknown = [name for name in names if name not in mesh.shape]
        if unknown:
            why = f"the mesh has the axes {mesh.axis_names}, and not {unknown}"
            raise refusals.bad_sharding(path, shape, spec, why)
        size = math.prod(mesh.shape[name] for name in names)
        if length % size:
            why = f"{size} devices do not divide {length}"
            raise refusals.bad_sharding(path, shape, spec, why)
