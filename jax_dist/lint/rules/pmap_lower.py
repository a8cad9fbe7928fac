"""JXD004: the inner program of a pmapped function."""

import ast

from jax_dist.lint.model import pmaps
from jax_dist.lint.rules import Findings, Found, Module, Rule, _renames

_REASONS = {
    "lower": "gives a program on global arrays, without pmap's conversion",
    "trace": "is not there",
}


@Rule(
    "JXD004",
    "pmap-lower",
    what="`.lower` and `.trace` of a function made by `jax.pmap`.",
    why="`.lower` gives the inner `jit(shard_map)`, which does not build global arrays from the "
    "slices of one process as pmap does; `.trace` raises an AttributeError (jax 0.10.2).",
    instead="text = jax_dist.pmap(step).lower(state).as_text()",
    triggers=lambda words: words.hold(b"*pmap") and not words.all.isdisjoint((b"lower", b"trace")),
)
def pmap_lower(module: Module) -> Findings:
    for site in pmaps.applications(module):
        for use in map(module.parent, pmaps.held_by(module, site)):
            if not isinstance(use, ast.Attribute) or use.attr not in _REASONS:
                continue
            if not _renames.is_guarded(module, use):
                yield Found(use, f".{use.attr} of a jax.pmap {_REASONS[use.attr]}")
