"""JXD103: classes that left `jax.sharding`."""

from collections.abc import Iterator

from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.rules import Found, _renames, rule
from jax_dist.lint.rules._old_names import SHARDINGS


@rule(
    "JXD103",
    "removed-sharding-class",
    what="`PmapSharding`, `PositionalSharding`, `GSPMDSharding` and other classes that left "
    "`jax.sharding`.",
    why="Using the name raises an AttributeError or ImportError, even in an `isinstance`. "
    "The answer of such a test had changed earlier: on jax 0.9.2 results of pmap have a"
    " `NamedSharding`.",
    instead="mapped = isinstance(x.sharding, jax.sharding.NamedSharding)",
    fix="safe",
    triggers=(
        b"PmapSharding",
        b"PositionalSharding",
        b"GSPMDSharding",
        b"XLACompatibleSharding",
        b"MeshPspecSharding",
        b"OpShardingSharding",
    ),
)
def removed_sharding_class(module: Module) -> Iterator[Found]:
    yield from _renames.renamed(module, SHARDINGS)
