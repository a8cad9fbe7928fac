"""JXD002: a pmap inside `jit`, `scan`, `cond` or `grad`."""

from jax_dist.lint.model import pmaps, traced
from jax_dist.lint.rules import Edit, Findings, Fix, Found, Module, Rule, Safety


@Rule(
    "JXD002",
    "jit-of-pmap",
    what="`jax.jit`, `lax.scan`, `lax.while_loop`, `lax.cond` or `jax.grad` around a "
    "`jax.pmap`: directly, as decorators, or around a function that calls it.",
    why="With several processes, a traced `jax.pmap` sees only the devices of its own process: "
    "its collectives reduce over these, without an error. 2 processes of 4 devices that hold 0 "
    "to 7 get the sums 6 and 22 instead of 28 (jax 0.10.2).",
    instead="step = jax_dist.pmap(train_step, axis_name='batch')  # may be traced\n"
    "# jax_dist.rewrite moves each pmap in a function onto one mesh over all processes.",
    fix="unsafe",
    triggers=(b"pmap",),
)
def jit_of_pmap(module: Module) -> Findings:
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
