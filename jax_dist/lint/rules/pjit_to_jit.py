"""JXD106: `pjit` in place of `jax.jit`."""

import ast

from jax_dist.lint.model import pmaps
from jax_dist.lint.rules import Edit, Findings, Module, Rule, _renames
from jax_dist.lint.rules._renames import Rename

_CONSTRAINT = "with_sharding_constraint"
_OLD = (
    Rename("jax.experimental.pjit.pjit", "jax.jit", deprecated="0.8.0", needs=(0, 4, 14)),
    Rename(f"jax.experimental.pjit.{_CONSTRAINT}", f"jax.lax.{_CONSTRAINT}", needs=(0, 4, 7)),
)
_SAME = {"static_argnums", "static_argnames", "donate_argnums", "donate_argnames", "inline"}
_SAME |= {"keep_unused", "device", "backend", "compiler_options"}
_SHARDINGS = {"in_shardings", "out_shardings"}


@Rule(
    "JXD106",
    "pjit-to-jit",
    what="`pjit` and `with_sharding_constraint` from `jax.experimental.pjit`.",
    why="`pjit` is deprecated since jax 0.8.0. It reads a `PartitionSpec` in its shardings with "
    "the mesh of `with mesh:`, where `jax.jit` needs `with jax.set_mesh(mesh):` and raises a "
    "RuntimeError otherwise (jax 0.10.2): so there is no fix with shardings but None.",
    instead="f = jax.jit(g, donate_argnums=0)",
    fix="safe",
    triggers=_renames.mentions(_OLD),
)
def pjit_to_jit(module: Module) -> Findings:
    yield from _renames.renamed(module, _OLD, _with_same_arguments)


def _with_same_arguments(module: Module, entry: Rename, use: ast.expr) -> list[Edit] | None:
    """Return no edits where the arguments of a use keep their names and their meaning."""
    if entry.new != "jax.jit":
        # `with_sharding_constraint(x, axis_resources=s)`: the argument is called shardings now.
        call = module.call_of(use)
        has_old = call is not None and any(each.arg != "shardings" for each in call.keywords)
        return None if has_old else []
    used = pmaps.site(module, use)
    if not used.is_application or used.args or used.unknown or used.fun is None:
        return None
    if not used.arguments.keys() <= _SAME | _SHARDINGS:
        return None
    shardings = (used.arguments.get(name) for name in _SHARDINGS)
    return [] if all(each is None or isinstance(each, ast.Constant) for each in shardings) else None
