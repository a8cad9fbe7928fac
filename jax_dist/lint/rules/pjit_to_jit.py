"""JXD106: `pjit` in place of `jax.jit`."""

import ast
from collections.abc import Iterator, Sequence

from jax_dist.lint.model import traced
from jax_dist.lint.rules import Findings, Module, Rule, Safety, _renames
from jax_dist.lint.rules._old_names import OF_PJIT
from jax_dist.lint.rules._renames import Rename

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
    triggers=(b"experimental.pjit", b"experimental import"),
)
def pjit_to_jit(module: Module) -> Findings:
    yield from _renames.renamed(module, OF_PJIT, _judge)


def _judge(module: Module, entry: Rename, nodes: Sequence[ast.expr]) -> Safety | None:
    """Return the least that holds of all uses."""
    if entry.new != "jax.jit":
        # `with_sharding_constraint(x, axis_resources=s)`: the argument is called shardings now.
        calls = filter(None, map(module.call_of, nodes))
        has_old = any(each.arg != "shardings" for call in calls for each in call.keywords)
        return None if has_old else Safety.SAFE
    safeties = {_safety(module, node) for node in nodes}
    if None in safeties:
        return None
    return Safety.DISPLAY if Safety.DISPLAY in safeties else Safety.SAFE


def _safety(module: Module, node: ast.expr) -> Safety | None:
    used = traced.application(module, node)
    if used is None or used.args or not (used.is_known and used.by_position):
        return None
    if not used.words.keys() <= _SAME | _SHARDINGS:
        return None
    leaves = [leaf for name in _SHARDINGS for leaf in _leaves(module, used.words.get(name))]
    names = {module.qualified_name(leaf.func) for leaf in leaves if isinstance(leaf, ast.Call)}
    if not names.isdisjoint(traced.SPECS):
        return None
    is_seen = names <= {"jax.sharding.NamedSharding"} and all(
        isinstance(leaf, ast.Call) for leaf in leaves
    )
    return Safety.SAFE if is_seen else Safety.DISPLAY


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
