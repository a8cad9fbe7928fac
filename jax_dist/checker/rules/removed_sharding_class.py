"""JXD103: classes of shardings that left jax."""

from collections.abc import Iterator

from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.rules import (
    Found,
    Page,
    _rename_edits,
    _renames,
    rule,
)

PAGE = Page(
    code="JXD103",
    name="removed-sharding-class",
    what="Finds `PmapSharding`, `PositionalSharding`, `GSPMDSharding` and other removed classes of "
    "`jax.sharding`.",
    why="Using the name raises an AttributeError or ImportError, even in an `isinstance`. The "
    "answer of such a test had changed earlier: on jax 0.9.2, results of pmap have a "
    "`NamedSharding`, so a test for `PmapSharding` was False.",
    example="import jax\n\nmapped = isinstance(x.sharding, jax.sharding.PmapSharding)\n",
    instead="import jax\n\nmapped = isinstance(x.sharding, jax.sharding.NamedSharding)\n",
    fix="Safe for `MeshPspecSharding` and `XLACompatibleSharding`, which were renamed. None for "
    "the others: a `NamedSharding` needs a mesh and a spec, and a test has to check something "
    "else.",
    since="jax 0.7.1: PositionalSharding removed; 0.10.0: PmapSharding and GSPMDSharding removed.",
    source="https://docs.jax.dev/en/latest/changelog.html",
)


@rule(
    PAGE,
    triggers=(
        b"PmapSharding",
        b"PositionalSharding",
        b"GSPMDSharding",
        b"XLACompatibleSharding",
        b"MeshPspecSharding",
        b"OpShardingSharding",
    ),
)
def check(module: Module) -> Iterator[Found]:
    yield from _rename_edits.renamed(module, _renames.SHARDINGS)
