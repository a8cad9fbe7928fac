"""What may run a mapped function in a fork of the process.

A fork hangs where it computes and devices have been asked for before it was made. jax.pmap asks
when it is called, and a mesh when it is made.
"""

import ast
import os
import re

from jax_dist.lint.model import pmaps, scopes
from jax_dist.lint.model.pmaps import Site
from jax_dist.lint.model.semantic_model import Module
from jax_dist.migrate import callers
from jax_dist.migrate.results import ProjectContext

_FORKING = re.compile(rb"\bos\.fork\(|\bmultiprocessing\b|\bProcessPoolExecutor\b")
_BY_HAND = re.compile(rb"\bos\.fork\(")
_POOLED = frozenset(
    ("apply", "apply_async", "map", "map_async", "starmap", "starmap_async")
    + ("imap", "imap_unordered", "submit", "run_in_executor")
)


def around(module: Module, context: ProjectContext, site: Site) -> str:
    """Why a mesh may be made too early; "" where no fork is seen to call what a site maps."""
    if not _first(module, context, _FORKING):
        return ""
    for held in pmaps.held_by(module, site):
        if found := callers.first(module, context, held, _given):
            return f"{found[0]} may run it in a fork, before which devices must not be asked for"
    place = _first(module, context, _BY_HAND)
    return place and f"devices must not be asked for before a fork: see {place}"


def _first(module: Module, context: ProjectContext, pattern: re.Pattern[bytes]) -> str:
    known = module.memo(_first)  # all sites of the file ask
    if pattern not in known:
        known[pattern] = context.first(pattern, near=[os.path.abspath(module.source.path)])
    return known[pattern]


def _given(module: Module, _context: ProjectContext, run: ast.expr) -> tuple[int, str] | None:
    """The line that gives a function to another process."""
    for outer, inner, is_later in callers.around(module, run):
        if isinstance(outer, ast.Call) and outer.func is not inner and is_later:
            name, is_known = scopes.last_name(outer.func), module.qualified_name(outer.func)
            is_of_pool = isinstance(outer.func, ast.Attribute) and name in _POOLED and not is_known
            if name == "Process" or is_of_pool:
                return outer.lineno, "fork"
    return None
