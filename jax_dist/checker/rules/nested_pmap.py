"""JXD003: a `jax.pmap` inside a `jax.pmap`."""

import ast
from collections.abc import Iterator

from jax_dist.checker.model import functions, pmaps
from jax_dist.checker.model.pmaps import Site
from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.rules import Found, Page, rule

PAGE = Page(
    code="JXD003",
    name="nested-pmap",
    what="Finds a `jax.pmap` of a `jax.pmap`: directly, as decorators, or where a mapped function "
    "calls another one.",
    why="It raises a ValueError now that pmap is `jit(shard_map)`: the mesh of the inner one is "
    "not the mesh of the context (jax 0.10.2). The pmap of jax 0.7.2 supported it.",
    example="import jax\n\nf = jax.pmap(jax.pmap(g, axis_name='j'), axis_name='i')\n",
    instead="import jax_dist\n\n"
    "f = jax_dist.pmap(jax_dist.pmap(g, axis_name='j'), axis_name='i')\n",
    fix="None: `jax_dist.pmap` supports nesting; in plain JAX it is one `jax.shard_map` over a "
    "mesh with two axes, `in_specs=P('i', 'j')`.",
    since="jax 0.8.0: not supported.",
    source="https://docs.jax.dev/en/latest/migrate_pmap.html",
)

_MESSAGE = "a jax.pmap inside a jax.pmap raises a ValueError since jax 0.8.0"


@rule(PAGE, triggers=(b"*pmap*",))
def check(module: Module) -> Iterator[Found]:
    sites = [site for site in pmaps.sites(module) if site.is_application]
    if len(sites) < 2:
        return
    seen: set[ast.expr] = set()
    for node in (*_mapped_again(module, sites), *_called_inside(module, sites)):
        if node not in seen:
            seen.add(node)
            yield Found(node, _MESSAGE)


def _mapped_again(module: Module, sites: list[Site]) -> Iterator[ast.expr]:
    """The inner ones of `pmap(pmap(f))`, by name too, and of decorators on one def."""
    made = {held: site for site in sites for held in pmaps.held_by(module, site)}
    decorated: dict[ast.AST, Site] = {}
    for outer in sites:
        if outer.fun in made and made[outer.fun] is not outer:
            yield made[outer.fun].node
        if outer.form != "call":
            if outer.fun in decorated:
                yield outer.node
            decorated.setdefault(outer.fun, outer)


def _called_inside(module: Module, sites: list[Site]) -> Iterator[ast.expr]:
    """The calls of one mapped function in the body of another."""
    bodies: dict[ast.AST, Site] = {}
    for outer in sites:
        function = functions.mapped_function(module, outer)
        if function is not None:
            bodies[function] = outer
    for inner in sites:
        for call in pmaps.mapped_calls(module, inner):
            around = [bodies[each] for each in module.ancestors(call) if each in bodies]
            if any(outer is not inner for outer in around):
                yield call
