"""JXD001, JXD002, JXD003, JXD004: `jax.pmap`, and what goes wrong around it and inside it."""

import ast
from collections.abc import Iterator

from jax_dist.lint.model import functions, pmaps, traced
from jax_dist.lint.model.findings import Edit, Fix, Safety
from jax_dist.lint.model.pmaps import Site
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.rules import Found, Page, _renames, rule

_CALL = Page(
    code="JXD001",
    name="pmap-call",
    summary="`jax.pmap` is used",
    cost="maintenance mode; wrong sums under `jit` with several processes",
    what="Finds every use of `jax.pmap`: calls, decorators, partials, aliases, aliases of other "
    "files, and pmap passed on as a value; and `equinox.filter_pmap` and `flax.nnx.pmap`, which "
    "call it.",
    why="pmap is in maintenance mode since jax 0.8; underneath it is `jit(shard_map)`. With "
    "several processes, `jit`, `scan` and `grad` around it reduce over local devices only, "
    "without an error: 6 and 22 where the sum is 28 (2 processes of 4 devices, jax 0.10.2).",
    example="step = jax.pmap(train_step, axis_name='batch', donate_argnums=0)\n",
    instead="step = jax_dist.pmap(train_step, axis_name='batch', donate_argnums=0)\n",
    fix="None here: `jax-dist migrate` rewrites pmap together with all that belongs to it, to "
    "`jax_dist.pmap` or to plain JAX. `equinox.filter_pmap` becomes "
    "`jax_dist.filter_pmap`, and `flax.nnx.pmap` becomes `jax_dist.nnx_pmap`.",
    since="jax 0.8.0: maintenance mode; 0.10.0: the old engine is removed.",
    source="https://docs.jax.dev/en/latest/migrate_pmap.html",
)

_MESSAGES = {
    "alias": "jax.pmap gets another name here",
    "partial alias": "jax.pmap with bound arguments gets a name here",
    "value": "jax.pmap is passed on as a value",
    "called decorator": "jax.pmap as a decorator with arguments fails: it wants the function first",
}
_OF_OTHERS = {
    "equinox.filter_pmap": "jax_dist.filter_pmap",
    "flax.nnx.pmap": "jax_dist.nnx_pmap",
    "flax.experimental.nnx.pmap": "jax_dist.nnx_pmap",
}


@rule(_CALL, triggers=(b"*pmap*",))
def _pmap_call(module: Module) -> Iterator[Found]:
    for site in pmaps.sites(module):
        message = _MESSAGES.get(site.form, "jax.pmap is in maintenance mode")
        yield Found(site.reference, f"{message}; jax-dist migrate rewrites it")
    for name, instead in _OF_OTHERS.items():
        for reference in module.uses(name):
            yield Found(reference, f"{name} is jax.pmap underneath; {instead} takes its place")


_UNDER_JIT = Page(
    code="JXD002",
    name="jit-of-pmap",
    summary="`jit`, `scan`, `cond` or `grad` around a pmap",
    cost="wrong sums with several processes, without an error",
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


@rule(_UNDER_JIT, triggers=(b"*pmap*",))
def _jit_of_pmap(module: Module) -> Iterator[Found]:
    said = "jax.pmap inside {} reduces over the devices of one process only"
    for site in pmaps.applications(module):
        for name, decorator in traced.decorators(module, site.fun):
            if module.span(decorator) < module.span(site.node):  # `@jax.jit` above `@jax.pmap`
                fix = _without_jit(pmaps.unjitted(module, decorator, site.node))
                yield Found(decorator, said.format(name), fix)
        for held in pmaps.held_by(module, site):
            given, call = traced.given_to(module, held), module.call_of(held)
            if given is not None:
                name, around = given
                edits = pmaps.unjitted(module, around, held) if held is site.node else ()
                yield Found(around, said.format(name), _without_jit(edits))
            elif call is not None:
                name = traced.around(module, call)
                if name is not None:
                    yield Found(call, said.format(name))


def _without_jit(edits: tuple[Edit, ...]) -> Fix | None:
    return Fix("leave out jax.jit", Safety.UNSAFE, edits) if edits else None


_NESTED = Page(
    code="JXD003",
    name="nested-pmap",
    summary="a pmap inside a pmap",
    cost="ValueError since jax 0.8",
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


@rule(_NESTED, triggers=(b"*pmap*",))
def _nested_pmap(module: Module) -> Iterator[Found]:
    sites = pmaps.applications(module)
    if len(sites) < 2:
        return
    for node in dict.fromkeys((*_mapped_again(module, sites), *_called_inside(module, sites))):
        yield Found(node, "a jax.pmap inside a jax.pmap raises a ValueError since jax 0.8.0")


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
    bodies: dict[ast.AST | None, Site] = {
        functions.innermost(module, outer.fun): outer for outer in sites
    }
    for inner in sites:
        for call in pmaps.mapped_calls(module, inner):
            if any(bodies.get(each, inner) is not inner for each in module.ancestors(call)):
                yield call


_LOWER = Page(
    code="JXD004",
    name="pmap-lower",
    summary="`.lower`, `.trace` or `.__wrapped__` of a pmapped function",
    cost="it takes global arrays now, or is missing",
    what="Finds `.lower`, `.__wrapped__` and `.trace` of a function made by `jax.pmap`.",
    why="`.lower` gives the inner `jit(shard_map)`: when called, it takes and returns global "
    "arrays, and does not build them from the slices of one process as pmap does. "
    "`.__wrapped__` is missing on jax 0.8.0, and back on 0.10.2. `.trace` raises an "
    "AttributeError (0.10.2).",
    example="import jax\n\ntext = jax.pmap(step).lower(state).as_text()\n",
    instead="import jax_dist\n\ntext = jax_dist.pmap(step).lower(state).as_text()\n",
    fix="None: `jax_dist.pmap` has `lower`, `trace`, `jitted` and `__wrapped__`; only you know "
    "which one you need.",
    since="jax 0.8.0: pmap is jit(shard_map).",
    source="https://github.com/jax-ml/jax/issues/32701",
)

_REASONS = {
    "lower": "gives a program on global arrays, without pmap's conversion",
    "__wrapped__": "is missing on some versions of jax",
    "trace": "is not there",
}


@rule(_LOWER, triggers=(b"*pmap*",))
def _pmap_lower(module: Module) -> Iterator[Found]:
    # The words are asked for once more: they are rarer than pmap.
    if not any(f".{name}".encode() in module.source.code for name in _REASONS):
        return
    for site in pmaps.applications(module):
        for use in map(module.parent, pmaps.held_by(module, site)):
            if not isinstance(use, ast.Attribute) or use.attr not in _REASONS:
                continue
            if not _renames.is_guarded(module, use):
                yield Found(use, f".{use.attr} of a jax.pmap {_REASONS[use.attr]}")
