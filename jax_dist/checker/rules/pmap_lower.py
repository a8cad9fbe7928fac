"""JXD004: `.lower` and other attributes of a mapped function."""

import ast
from collections.abc import Iterator

from jax_dist.checker.model import pmaps
from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.rules import Found, Page, _renames, rule

PAGE = Page(
    code="JXD004",
    name="pmap-lower",
    what="Finds `.lower`, `.__wrapped__` and `.trace` of a function made by `jax.pmap`.",
    why="`.lower` gives the inner `jit(shard_map)`: when called, it takes and returns global "
    "arrays, and does not build them from the slices of one process as pmap does. "
    "`.__wrapped__` is missing on jax 0.8.0, and back on 0.10.2. `.trace` raises an "
    "AttributeError (0.10.2).",
    example="import jax\n\ntext = jax.pmap(step).lower(state).as_text()\n",
    instead="import jax_dist\n\ntext = jax_dist.pmap(step).lower(state).as_text()\n",
    fix="None: `jax_dist.pmap` has `lower`, `trace`, `jitted` and `__wrapped__`; only you know "
    "which one you need.",
    since="jax 0.8.0: pmap is jit(shard_map).",
    source="https://github.com/jax-ml/jax/issues/32701",
)

_REASONS = {
    "lower": "gives a program on global arrays, without pmap's conversion",
    "__wrapped__": "is missing on some versions of jax",
    "trace": "is not there",
}


@rule(PAGE, triggers=(b"*pmap*",))
def check(module: Module) -> Iterator[Found]:
    # The words are asked for once more: they are rarer than pmap.
    if not any(f".{name}".encode() in module.source.code for name in _REASONS):
        return
    for site in pmaps.sites(module):
        if not site.is_application:
            continue
        for held in pmaps.held_by(module, site):
            use = module.parent(held)
            if not isinstance(use, ast.Attribute) or use.attr not in _REASONS:
                continue
            if not _renames.is_guarded(module, use):
                yield Found(use, f".{use.attr} of a jax.pmap {_REASONS[use.attr]}")
