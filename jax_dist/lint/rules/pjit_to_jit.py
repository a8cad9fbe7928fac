"""JXD106: `pjit` in place of `jax.jit`."""

import ast

from jax_dist.lint.model import pmaps
from jax_dist.lint.rules import Edit, Findings, Module, Rule, _renames
from jax_dist.lint.rules._renames import Rename

_SAME_IN_JIT = {"static_argnums", "static_argnames", "donate_argnums", "donate_argnames"}
_SAME_IN_JIT |= {"inline", "keep_unused", "device", "backend", "compiler_options"}
_SHARDINGS = {"in_shardings", "out_shardings"}


def _jit_edits(module: Module, use: ast.expr) -> list[Edit] | None:
    """Return [] (no edits) if `jax.jit` takes the same arguments as this `pjit`; else None."""
    site = pmaps.read_site(module, use)  # `pjit(f, ...)` or a decorator, without `**options`
    if not site.is_application or site.args or site.unknown or site.fun is None:
        return None
    if not site.arguments.keys() <= _SAME_IN_JIT | _SHARDINGS:
        return None
    # Only `in_shardings=None` has the same meaning without a mesh around it.
    shardings = [site.arguments[name] for name in _SHARDINGS if name in site.arguments]
    return [] if all(isinstance(value, ast.Constant) for value in shardings) else None


def _constraint_edits(module: Module, use: ast.expr) -> list[Edit] | None:
    """Return [] (no edits) but for the old `with_sharding_constraint(x, axis_resources=spec)`."""
    call = module.call_of(use)
    keywords = call.keywords if call is not None else []
    return [] if all(keyword.arg == "shardings" for keyword in keywords) else None


_PJIT = "jax.experimental.pjit.pjit"
_OLD_NAMES = (
    Rename(_PJIT, "jax.jit", deprecated="0.8.0", needs=(0, 4, 14), edit_arguments=_jit_edits),
    Rename(
        "jax.experimental.pjit.with_sharding_constraint",
        "jax.lax.with_sharding_constraint",
        needs=(0, 4, 7),
        edit_arguments=_constraint_edits,
    ),
)


@Rule(
    "JXD106",
    what="`pjit` and `with_sharding_constraint` from `jax.experimental.pjit`.",
    why="`pjit` is deprecated since jax 0.8.0. It reads a `PartitionSpec` in its shardings with "
    "the mesh of `with mesh:`, where `jax.jit` needs `with jax.set_mesh(mesh):` and raises a "
    "RuntimeError otherwise (jax 0.10.2): so there is no fix with shardings but None.",
    instead="f = jax.jit(g, donate_argnums=0)",
    triggers=_renames.mentions(_OLD_NAMES),
)
def pjit_to_jit(module: Module) -> Findings:
    yield from _renames.find_renamed(module, _OLD_NAMES)
