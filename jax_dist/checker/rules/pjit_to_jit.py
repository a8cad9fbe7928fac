"""JXD106: `jax.experimental.pjit`."""

import ast
from collections.abc import Iterator, Sequence
from typing import Literal

from jax_dist.checker.model import pmaps
from jax_dist.checker.model.findings import Safety
from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.rules import Found, Page, _renames, rule
from jax_dist.checker.rules._renames import Rename

PAGE = Page(
    code="JXD106",
    name="pjit-to-jit",
    what="Finds `pjit` and `with_sharding_constraint` from `jax.experimental.pjit`.",
    why="`pjit` is deprecated since jax 0.8.0, and is `jax.jit` with one difference: it reads a "
    "`PartitionSpec` in its shardings with the mesh of `with mesh:`. `jax.jit` needs `with "
    "jax.set_mesh(mesh):` for that, and raises a RuntimeError otherwise (jax 0.10.2). "
    "`with_sharding_constraint` was removed from this module.",
    example="from jax.experimental.pjit import pjit\n\nf = pjit(g, donate_argnums=0)\n",
    instead="from jax import jit as pjit\n\nf = pjit(g, donate_argnums=0)\n",
    fix="Safe without shardings, with shardings that are clearly a `NamedSharding`, and for "
    "`with_sharding_constraint`. Display-only with shardings that are made elsewhere, because "
    "they may be specs. None with a `PartitionSpec`: the mesh has to be set in another way. "
    "None for old arguments and for uses as a value.",
    since="jax 0.8.0: deprecated.",
    source="https://docs.jax.dev/en/latest/changelog.html#jax-0-8-0-october-15-2025",
)

NAMES: tuple[Rename, ...] = (
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


@rule(PAGE, triggers=(b"experimental.pjit", b"experimental import pjit"))
def check(module: Module) -> Iterator[Found]:
    yield from _renames.renamed(module, NAMES, _judge)


def _judge(module: Module, entry: Rename, nodes: Sequence[ast.expr]) -> Safety | None:
    """The least that holds of all uses."""
    if entry.new != "jax.jit":
        return None if any(_has_old_keyword(module, node) for node in nodes) else Safety.SAFE
    verdicts = [_verdict(module, node) for node in nodes]
    if None in verdicts:
        return None
    return Safety.DISPLAY if Safety.DISPLAY in verdicts else Safety.SAFE


def _has_old_keyword(module: Module, constraint: ast.expr) -> bool:
    """`with_sharding_constraint(x, axis_resources=s)`: the argument is called shardings now."""
    call = module.parent(constraint)
    if not isinstance(call, ast.Call) or call.func is not constraint:
        return False
    return any(keyword.arg != "shardings" for keyword in call.keywords)


def _verdict(module: Module, node: ast.expr) -> Safety | None:
    used = pmaps.application(module, node)
    if used is None or used.args or used.fun is None or isinstance(used.fun, ast.Starred):
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
    """What a tree of shardings holds."""
    match value:
        case ast.Tuple() | ast.List():
            for element in value.elts:
                yield from _kinds(module, element)
        case ast.Constant(value=None):
            return
        case ast.Call():
            name = module.qualified_name(value.func) or ""
            is_spec = name.endswith(".PartitionSpec") or name == "jax.P"
            is_sharding = name == "jax.sharding.NamedSharding"
            yield "spec" if is_spec else "sharding" if is_sharding else "unknown"
        case ast.Name():
            known = [each for each in module.values(value) or () if not isinstance(each, ast.Name)]
            if not known:
                yield "unknown"
            for each in known:
                yield from _kinds(module, each)
        case _:
            yield "unknown"
