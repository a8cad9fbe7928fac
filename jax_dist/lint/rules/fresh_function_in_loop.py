"""JXD407: a function that is made and compiled anew in each iteration of a loop."""

import ast
import re
from typing import Any, get_args

from jax_dist.lint.model import functions, pmaps, scopes, traced
from jax_dist.lint.model.semantic_model import PARTIAL
from jax_dist.lint.rules import Findings, Found, Module, Rule

_LOOPS = ast.For | ast.AsyncFor | ast.While | ast.comprehension
# A jit in the block of a loop, or in a comprehension; half of all files say jit.
_IN_LOOP = re.compile(
    rb"^([ \t]*)(?:async )?(?:for|while)\b.*\n(?:(?:\1[ \t#)].*)?\n)*?\1[ \t].*\bjit\("
    rb"|\bjit\(.*\bfor\b",
    re.MULTILINE,
)


@Rule(
    "JXD407",
    what="`pmap`, `jit` or `shard_map` of a new lambda, partial or def in a loop, where the result "
    "is called in the same iteration.",
    why="JAX keeps compiled programs by function, and each iteration makes a new one: the program "
    "is traced and compiled again in every iteration. "
    "https://docs.jax.dev/en/latest/jit-compilation.html#jit-and-caching",
    instead="step = jax.pmap(update, in_axes=(0, None))  # once, above the loop\n"
    "for scale in scales:\n"
    "    x = step(x, scale)",
    triggers=lambda words: (
        words.hold(*traced.TRIGGERS) or (words.hold(b"jit") and bool(_IN_LOOP.search(words.data)))
    ),
)
def fresh_function_in_loop(module: Module) -> Findings:
    if not any(module.nodes(*get_args(_LOOPS))):
        return
    names = (*pmaps.PMAP, "jax.jit", "jax_dist.pmap", *traced.SHARD_MAP)
    for site in pmaps.applications(module, names):
        node, loop = site.node, _loop_around(module, site.node)  # the node: `jit(lambda x: x)`
        if loop is None or not _is_made_in_loop(module, site.fun, loop):
            continue
        if traced.transformation_around(module, node):
            continue  # the loops of traced code run once
        calls = filter(None, map(module.call_of, [node, *pmaps.reads_of(module, node)]))
        if any(_loop_around(module, call) is loop for call in calls):
            yield Found(node, "a new function in each iteration: it is compiled anew each time")


def _loop_around(module: Module, node: ast.AST) -> ast.AST | None:
    """Return the innermost loop that evaluates a node in each iteration, without calling a def."""
    child = node
    for around in module.ancestors(node):
        if isinstance(around, scopes.Function | ast.ClassDef):
            return None
        # Of `[f(x) for x in xs]`, the `f(x)`.
        if isinstance(around, scopes.Comprehension) and not isinstance(child, ast.comprehension):
            return around
        if isinstance(around, _LOOPS) and child is not getattr(around, "iter", None):
            return around
        child = around
    return None


def _is_made_in_loop(module: Module, fun: Any, loop: ast.AST) -> bool:
    """Return whether `fun` is a lambda, partial or def in the loop itself, or a name for one."""
    value: Any = traced.resolve_name(module, fun) or fun
    called = module.qualified_name(value.func) if isinstance(value, ast.Call) else None
    if called in PARTIAL:
        return _loop_around(module, value) is loop
    if called in traced.SHARD_MAP and value.args:  # of `shard_map(f, ...)`, the `f`
        value = value.args[0]
    function = functions.innermost(module, value)  # of `vmap(f)`, the def of f
    return function is not None and _loop_around(module, function) is loop
