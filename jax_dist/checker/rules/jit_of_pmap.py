"""JXD002: a `jax.pmap` inside of what JAX traces."""

import ast
from collections.abc import Iterator

from jax_dist.checker.model import pmaps, traced
from jax_dist.checker.model.findings import Edit, Fix, Safety
from jax_dist.checker.model.pmaps import Site
from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.rules import Found, Page, rule

PAGE = Page(
    code="JXD002",
    name="jit-of-pmap",
    what="Finds `jax.jit`, `lax.scan`, `lax.while_loop`, `lax.cond` or `jax.grad` around a "
    "`jax.pmap`: directly, as decorators, or around a function that calls it.",
    why="With several processes, a traced `jax.pmap` sees only the devices of its own process: "
    "its collectives reduce over these, without an error. 2 processes of 4 devices that hold "
    "0 to 7 get the sums 6 and 22 instead of 28 (jax 0.10.2). In one process the values are "
    "right.",
    example="import jax\n\nstep = jax.jit(jax.pmap(train_step, axis_name='batch'))\n",
    instead="import jax_dist\n\nstep = jax_dist.pmap(train_step, axis_name='batch')\n",
    fix="Unsafe: the fix removes a jit without arguments of its own directly around a pmap, "
    "because pmap compiles by itself; what the pmap donates is then really donated. None "
    "elsewhere: `jax_dist.pmap` may be traced, and `jax_dist.rewrite` around the whole "
    "function moves each pmap onto one mesh over all processes.",
    since="Any jax with pmap.",
    source="https://docs.jax.dev/en/latest/migrate_pmap.html",
)


@rule(PAGE, triggers=(b"*pmap*",))
def check(module: Module) -> Iterator[Found]:
    for site in pmaps.sites(module):
        if not site.is_application:
            continue
        yield from _stacked(module, site)
        for held in pmaps.held_by(module, site):
            given = traced.given_to(module, held)
            if given is not None:
                name, call = given
                yield Found(call, _message(name), _unwrapped(module, site, held, call))
                continue
            call = module.parent(held)
            if isinstance(call, ast.Call) and call.func is held:
                name = traced.around(module, call)
                if name is not None:
                    yield Found(call, _message(name))


def _message(name: str) -> str:
    return f"jax.pmap inside {name} reduces over the devices of one process only"


def _stacked(module: Module, site: Site) -> Iterator[Found]:
    """`@jax.jit` above `@jax.pmap`."""
    for name, decorator in traced.decorators(module, site.fun):
        if module.span(decorator) < module.span(site.node):
            yield Found(decorator, _message(name), _fix(pmaps.undecorated(module, decorator)))


def _unwrapped(module: Module, site: Site, held: ast.expr, call: ast.Call) -> Fix | None:
    return _fix(pmaps.unwrapped(module, call, held)) if held is site.node else None


def _fix(edits: tuple[Edit, ...]) -> Fix | None:
    return Fix("leave out jax.jit", Safety.UNSAFE, edits) if edits else None
