"""JXD103: classes that left `jax.sharding`."""

from jax_dist.lint.rules import Findings, Module, Rule, _renames
from jax_dist.lint.rules._old_names import SHARDINGS


@Rule(
    "JXD103",
    "removed-sharding-class",
    what="`PmapSharding`, `PositionalSharding` and other classes that left `jax.sharding`.",
    why="An AttributeError or ImportError, even in an `isinstance`. Results of pmap have a "
    "`NamedSharding` (jax 0.10.2).",
    instead="mapped = isinstance(x.sharding, jax.sharding.NamedSharding)",
    fix="safe",
    triggers=_renames.mentions(SHARDINGS),
)
def removed_sharding_class(module: Module) -> Findings:
    yield from _renames.renamed(module, SHARDINGS)
