"""JXD004: the inner program of a pmapped function."""

import ast
from collections.abc import Iterator

from jax_dist.lint.model import pmaps
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.rules import Found, _renames, rule

_REASONS = {
    "lower": "gives a program on global arrays, without pmap's conversion",
    "__wrapped__": "is missing on some versions of jax",
    "trace": "is not there",
}


@rule(
    "JXD004",
    "pmap-lower",
    what="`.lower`, `.__wrapped__` and `.trace` of a function made by `jax.pmap`.",
    why="`.lower` gives the inner `jit(shard_map)`, which takes and returns global arrays: "
    "it does not build them from the slices of one process as pmap does. `.trace` "
    "raises an AttributeError (jax 0.10.2). https://github.com/jax-ml/jax/issues/32701",
    instead="text = jax_dist.pmap(step).lower(state).as_text()  # also trace, jitted, __wrapped__",
    triggers=(b"*pmap*",),
)
def pmap_lower(module: Module) -> Iterator[Found]:
    # The words are asked for once more: they are rarer than pmap.
    if not any(f".{name}".encode() in module.source.code for name in _REASONS):
        return
    for site in pmaps.applications(module):
        for use in map(module.parent, pmaps.held_by(module, site)):
            if not isinstance(use, ast.Attribute) or use.attr not in _REASONS:
                continue
            if not _renames.is_guarded(module, use):
                yield Found(use, f".{use.attr} of a jax.pmap {_REASONS[use.attr]}")
