"""The pmaps of other libraries: `equinox.filter_pmap` and `flax.nnx.pmap` call `jax.pmap`."""

import ast
from collections.abc import Iterator

from jax_dist.checker.model.findings import Edit, Fix, Safety
from jax_dist.checker.model.semantic_model import Module
from jax_dist.migrating import places
from jax_dist.migrating.names import LibraryNames
from jax_dist.migrating.outcomes import Left
from jax_dist.migrating.places import Place

_EQUINOX = "equinox.filter_pmap"
_NNX = ("flax.nnx.pmap", "flax.experimental.nnx.pmap")


def of(module: Module, *, to_library: bool) -> Iterator[Place]:
    """What becomes of each use of them.

    Args:
      module: the file.
      to_library: whether the new text may use jax_dist, which has a `filter_pmap`.
    """
    for node in module.uses(_EQUINOX):
        try:
            yield places.done(
                module, node, "JXD001", _filter_pmap(module, node, to_library=to_library)
            )
        except Left as left:
            yield places.left(module, node, "JXD001", left)
    for name in _NNX:
        for node in module.uses(name):
            yield places.left(
                module,
                node,
                "JXD001",
                Left(
                    f"{name} maps modules, which pmap does not take",
                    "Give jax_dist.pmap a function of the state: nnx.split before the call, "
                    "nnx.merge in the function; or use flax.nnx.shard_map.",
                ),
            )


def _filter_pmap(module: Module, node: ast.expr, *, to_library: bool) -> Fix:
    if not to_library:
        raise Left(
            f"{_EQUINOX} maps functions of modules, and plain JAX has no such function",
            "Use equinox.filter_shard_map, or migrate with --to jax_dist.",
        )
    name = LibraryNames().named(module, "filter_pmap", node)
    edits = (Edit(*module.span(node), name.text), *name.edits)
    return Fix("use jax_dist.filter_pmap", Safety.SAFE, tuple(sorted(edits)), name.imports)
