"""JXD106: `pjit` in place of `jax.jit`."""

import ast
from collections.abc import Iterator

from jax_dist.lint.model import pmaps, traced
from jax_dist.lint.rules import Findings, Module, Rule, Safety, _renames
from jax_dist.lint.rules._old_names import OF_PJIT
from jax_dist.lint.rules._renames import Adapted, Rename

_SAME = {"static_argnums", "static_argnames", "donate_argnums", "donate_argnames", "inline"}
_SAME |= {"keep_unused", "device", "backend", "compiler_options"}
_SHARDINGS = {"in_shardings", "out_shardings"}


@Rule(
    "JXD106",
    "pjit-to-jit",
    what="`pjit` and `with_sharding_constraint` from `jax.experimental.pjit`.",
    why="`pjit` is deprecated since jax 0.8.0. It reads a `PartitionSpec` in its shardings with "
    "the mesh of `with mesh:`, where `jax.jit` needs `with jax.set_mesh(mesh):` and raises a "
    "RuntimeError otherwise (jax 0.10.2): so there is no fix with specs.",
    instead="f = jax.jit(g, donate_argnums=0)",
    fix="safe",
    triggers=_renames.mentions(OF_PJIT),
)
def pjit_to_jit(module: Module) -> Findings:
    yield from _renames.renamed(module, OF_PJIT, _with_same_arguments)


def _with_same_arguments(module: Module, entry: Rename, use: ast.expr) -> Adapted:
    """Return how surely a use may have the new name: its arguments keep their names."""
    if entry.new != "jax.jit":
        # `with_sharding_constraint(x, axis_resources=s)`: the argument is called shardings now.
        call = module.call_of(use)
        has_old = call is not None and any(each.arg != "shardings" for each in call.keywords)
        return None if has_old else (Safety.SAFE, ())
    used = pmaps.site(module, use)
    if not used.is_application or used.args or used.unknown or not used.by_position:
        return None
    if not used.arguments.keys() <= _SAME | _SHARDINGS:
        return None
    leaves = [leaf for name in _SHARDINGS for leaf in _leaves(module, used.arguments.get(name))]
    calls = [leaf for leaf in leaves if isinstance(leaf, ast.Call)]
    names = {module.qualified_name(call.func) for call in calls}
    if not names.isdisjoint(traced.SPECS):
        return None
    is_seen = names <= {"jax.sharding.NamedSharding"} and len(calls) == len(leaves)
    return Safety.SAFE if is_seen else Safety.DISPLAY, ()


def _leaves(module: Module, value: ast.expr | None) -> Iterator[ast.expr]:
    """Yield what a tree of shardings holds, but for None."""
    match value:
        case ast.Tuple() | ast.List():
            for element in value.elts:
                yield from _leaves(module, element)
        case ast.Name():
            known = [each for each in module.values(value) or () if not isinstance(each, ast.Name)]
            for each in known or ():
                yield from _leaves(module, each)
            if not known:
                yield value
        case ast.expr() if not (isinstance(value, ast.Constant) and value.value is None):
            yield value
