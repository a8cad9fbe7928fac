"""JXD106: `pjit` in place of `jax.jit`."""

import ast
from collections.abc import Iterator, Sequence
from typing import Literal

from jax_dist.lint.model import traced
from jax_dist.lint.model.findings import Safety
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.rules import Found, _renames, rule
from jax_dist.lint.rules._renames import Rename

OF_PJIT: tuple[Rename, ...] = (
    Rename("jax.experimental.pjit.pjit", "jax.jit", deprecated="0.8.0", needs=(0, 4, 14)),
    Rename(
        "jax.experimental.pjit.with_sharding_constraint",
        "jax.lax.with_sharding_constraint",
        needs=(0, 4, 7),
    ),
    Rename("jax.experimental.pjit.AUTO", "", "0.10.1", "give the shardings"),
    Rename(
        "jax.experimental.pjit.FROM_GDA", "", "0.4.11", "give it a jax.Array, and no in_shardings"
    ),
)


_SAME = frozenset(
    {
        *("static_argnums", "static_argnames", "donate_argnums", "donate_argnames"),
        *("keep_unused", "device", "backend", "inline", "compiler_options"),
    }
)


_SHARDINGS = frozenset({"in_shardings", "out_shardings"})


@rule(
    "JXD106",
    "pjit-to-jit",
    what="`pjit` and `with_sharding_constraint` from `jax.experimental.pjit`.",
    why="`pjit` is deprecated since jax 0.8.0, and is `jax.jit` with one difference: it "
    "reads a `PartitionSpec` in its shardings with the mesh of `with mesh:`. `jax.jit` "
    "needs `with jax.set_mesh(mesh):` for that, and raises a RuntimeError otherwise "
    "(jax 0.10.2): so there is no fix with specs.",
    instead="f = jax.jit(g, donate_argnums=0)",
    fix="safe",
    triggers=(b"experimental.pjit", b"experimental import pjit"),
)
def pjit_to_jit(module: Module) -> Iterator[Found]:
    yield from _renames.renamed(module, OF_PJIT, _judge)


def _judge(module: Module, entry: Rename, nodes: Sequence[ast.expr]) -> Safety | None:
    """Return the least that holds of all uses."""
    if entry.new != "jax.jit":
        # `with_sharding_constraint(x, axis_resources=s)`: the argument is called shardings now.
        calls = filter(None, map(module.call_of, nodes))
        has_old = any(each.arg != "shardings" for call in calls for each in call.keywords)
        return None if has_old else Safety.SAFE
    verdicts = [_verdict(module, node) for node in nodes]
    if None in verdicts:
        return None
    return Safety.DISPLAY if Safety.DISPLAY in verdicts else Safety.SAFE


def _verdict(module: Module, node: ast.expr) -> Safety | None:
    used = traced.application(module, node)
    if used is None or used.args or not (used.is_known and used.by_position):
        return None
    names = {keyword.arg for keyword in used.keywords}
    if not names <= _SAME | _SHARDINGS:
        return None
    values = [keyword.value for keyword in used.keywords if keyword.arg in _SHARDINGS]
    kinds = {kind for value in values for kind in _kinds(module, value)}
    if "spec" in kinds:
        return None
    return Safety.DISPLAY if "unknown" in kinds else Safety.SAFE


def _kinds(module: Module, value: ast.expr) -> Iterator[Literal["spec", "sharding", "unknown"]]:
    """Yield what a tree of shardings holds."""
    match value:
        case ast.Tuple() | ast.List():
            for element in value.elts:
                yield from _kinds(module, element)
        case ast.Constant(value=None):
            return
        case ast.Call():
            name = module.qualified_name(value.func) or ""
            is_sharding = name == "jax.sharding.NamedSharding"
            yield "spec" if name in traced.SPECS else "sharding" if is_sharding else "unknown"
        case ast.Name():
            known = [each for each in module.values(value) or () if not isinstance(each, ast.Name)]
            if not known:
                yield "unknown"
            for each in known:
                yield from _kinds(module, each)
        case _:
            yield "unknown"
