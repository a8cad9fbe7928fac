"""JXD002: a pmap inside `jit`, `scan`, `cond` or `grad`."""

import ast

from jax_dist.lint.model import pmaps, traced
from jax_dist.lint.rules import Edit, Findings, Fix, Found, Module, Rule, Safety


@Rule(
    "JXD002",
    what="`jax.jit`, `lax.scan`, `lax.while_loop`, `lax.cond` or `jax.grad` around a "
    "`jax.pmap`: directly, as decorators, or around a function that calls it.",
    why="With several processes, a traced `jax.pmap` sees only the devices of its own process: "
    "its collectives reduce over these, without an error. 2 processes of 4 devices that hold 0 "
    "to 7 get the sums 6 and 22 instead of 28 (jax 0.10.2).",
    instead="step = jax_dist.pmap(train_step, axis_name='batch')  # may be traced\n"
    "# jax_dist.rewrite moves each pmap in a function onto one mesh over all processes.",
    triggers=(b"pmap",),
)
def jit_of_pmap(module: Module) -> Findings:
    for site in pmaps.applications(module):
        for name, decorator in traced.decorators(module, site.fun):
            if module.span(decorator) < module.span(site.node):  # `@jax.jit` above `@jax.pmap`
                yield _make_finding(decorator, name, pmaps.remove_jit(module, decorator, site.node))
        for mapped in pmaps.find_results(module, site):  # `pmap(f)`, and the names for it
            jit, call = traced.find_transformation(module, mapped), module.call_of(mapped)
            if jit is not None:  # `jit(pmap(f))`, or grad, scan and the like
                name, outer = jit
                edits = pmaps.remove_jit(module, outer, mapped) if mapped is site.node else ()
                yield _make_finding(outer, name, edits)
            elif call is not None:  # `pmap(f)(x)`, perhaps in a function that is jitted
                outer_name = traced.transformation_around(module, call)
                if outer_name is not None:
                    yield _make_finding(call, outer_name)


def _make_finding(node: ast.expr, name: str, edits: tuple[Edit, ...] = ()) -> Found:
    """Return the finding of a pmap inside the transformation `name`; `edits` leave out a jit."""
    fix = Fix("leave out jax.jit", Safety.UNSAFE, edits) if edits else None
    return Found(node, f"jax.pmap inside {name} reduces over the devices of one process only", fix)
