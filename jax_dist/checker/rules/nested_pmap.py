"""JXD003: a `jax.pmap` inside a `jax.pmap`."""

import ast
from collections.abc import Iterator

from jax_dist.checker import pmaps, structure
from jax_dist.checker.modules import Module
from jax_dist.checker.page import Page
from jax_dist.checker.pmaps import Site
from jax_dist.checker.registry import Case, Flag, Found, Keep, rule

PAGE = Page(
    code="JXD003",
    name="nested-pmap",
    what="Finds a `jax.pmap` of a `jax.pmap`: directly, as decorators, and where a mapped function "
    "calls another one.",
    why="It raises a ValueError since pmap is `jit(shard_map)`: the mesh of the inner one is not "
    "the mesh of the context (jax 0.10.2). The pmap of jax 0.7.2 could do it.",
    example="import jax\n\nf = jax.pmap(jax.pmap(g, axis_name='j'), axis_name='i')\n",
    instead="import jax_dist\n\n"
    "f = jax_dist.pmap(jax_dist.pmap(g, axis_name='j'), axis_name='i')\n",
    fix="None: `jax_dist.pmap` nests; in plain JAX it is one `jax.shard_map` over a mesh with two "
    "axes, `in_specs=P('i', 'j')`.",
    since="jax 0.8.0: not supported.",
    source="https://docs.jax.dev/en/latest/migrate_pmap.html",
)

_MESSAGE = "a jax.pmap inside a jax.pmap raises a ValueError since jax 0.8.0"


@rule(PAGE, triggers=(b"pmap",))
def check(module: Module) -> Iterator[Found]:
    sites = [site for site in pmaps.sites(module) if site.is_application]
    if len(sites) < 2:
        return
    seen: set[ast.expr] = set()
    for site in sites:
        for node in _inside(module, site, sites):
            if node not in seen:
                seen.add(node)
                yield Found(node, _MESSAGE)


def _inside(module: Module, outer: Site, sites: list[Site]) -> Iterator[ast.expr]:
    """The inner ones: what the outer one maps, and what the mapped function calls."""
    function = structure.mapped_function(module, outer)
    for inner in sites:
        if inner is outer:
            continue
        if any(held is outer.fun for held in pmaps.held_by(module, inner)):
            yield inner.node
        elif inner.fun is outer.fun and inner.form != "call" and outer.form != "call":
            yield inner.node if module.span(outer.node) < module.span(inner.node) else outer.node
        elif function is not None:
            calls = pmaps.mapped_calls(module, inner)
            yield from (call for call in calls if _is_in_body(module, call, function))


def _is_in_body(module: Module, node: ast.AST, function: ast.AST) -> bool:
    return any(around is function for around in module.ancestors(node))


CASES: tuple[Case, ...] = (
    Keep("one after the other", "import jax\ny = jax.pmap(f)(jax.pmap(g)(x))\n"),
    Keep("vmap inside", "import jax\nf = jax.pmap(jax.vmap(g))\n"),
    Keep(
        "made inside, but called outside",
        "import jax\ndef make():\n    return jax.pmap(g)\nf = jax.pmap(h)\n",
    ),
    Keep("ours nests", "import jax_dist, jax\nf = jax_dist.pmap(jax_dist.pmap(g))\njax.pmap(h)\n"),
    Flag("directly", "import jax\nf = jax.pmap(jax.pmap(g))\n", (2,)),
    Flag("by name", "import jax\nf = jax.pmap(g)\nh = jax.pmap(f)\n", (2,)),
    Flag("as decorators", "import jax\n@jax.pmap\n@jax.pmap\ndef f(x): return x\n", (3,)),
    Flag(
        "called in a mapped function",
        "import jax\ninner = jax.pmap(g)\ndef f(x):\n    return inner(x)\nh = jax.pmap(f)\n",
        (4,),
    ),
    Flag(
        "made and called in a mapped function",
        "import jax\n@jax.pmap\ndef f(x):\n    return jax.pmap(g)(x)\n",
        (4,),
    ),
)
