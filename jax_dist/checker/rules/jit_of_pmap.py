"""JXD002: a `jax.pmap` inside of what JAX traces."""

import ast
from collections.abc import Iterator

from jax_dist.checker import bare_jits, outer, pmaps
from jax_dist.checker.findings import Edit, Fix, Safety
from jax_dist.checker.modules import Module
from jax_dist.checker.page import Page
from jax_dist.checker.pmaps import Site
from jax_dist.checker.registry import Case, Flag, Found, Keep, Mend, rule

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
            given = outer.given_to(module, held)
            if given is not None:
                name, call = given
                yield Found(call, _message(name), _unwrapped(module, site, held, call))
                continue
            call = module.parent(held)
            if isinstance(call, ast.Call) and call.func is held:
                name = outer.around(module, call)
                if name is not None:
                    yield Found(call, _message(name))


def _message(name: str) -> str:
    return f"jax.pmap inside {name} reduces over the devices of one process only"


def _stacked(module: Module, site: Site) -> Iterator[Found]:
    """`@jax.jit` above `@jax.pmap`."""
    for name, decorator in outer.decorators(module, site.fun):
        if module.span(decorator) < module.span(site.node):
            yield Found(decorator, _message(name), _fix(bare_jits.undecorated(module, decorator)))


def _unwrapped(module: Module, site: Site, held: ast.expr, call: ast.Call) -> Fix | None:
    return _fix(bare_jits.unwrapped(module, call, held)) if held is site.node else None


def _fix(edits: tuple[Edit, ...]) -> Fix | None:
    return Fix("leave out jax.jit", Safety.UNSAFE, edits) if edits else None


CASES: tuple[Case, ...] = (
    Keep("a jit inside", "import jax\nf = jax.pmap(jax.jit(g))\n"),
    Keep("a jit inside, as decorators", "import jax\n@jax.pmap\n@jax.jit\ndef f(x): ...\n"),
    Keep(
        "an operand is not traced",
        "import jax\ny = jax.lax.cond(p, f, g, jax.pmap(h))\n",
    ),
    Keep("one beside the other", "import jax\nf = jax.pmap(g)\nh = jax.jit(g)\n"),
    Keep(
        "its result goes into what is traced",
        "import jax\nf = jax.pmap(g)\nh = jax.jit(k)\ny = h(f(x))\n",
    ),
    Keep("another library's jit", "import jax\nfrom numba import jit\nf = jit(jax.pmap(g))\n"),
    Keep(
        "an argument that is not traced",
        "import jax\ny = jax.lax.scan(f, jax.pmap(g)(x), None, 3)\n",
    ),
    Keep(
        "made by a decorator's argument",
        "import jax\n@jax.jit\ndef f(x, g=jax.pmap(h)(y)):\n    return x\n",
    ),
    Flag(
        "called in a jitted function",
        "import jax\nf = jax.pmap(g)\n@jax.jit\ndef h(x):\n    return f(x)\n",
        (5,),
    ),
    Flag(
        "called in the body of a loop",
        "import jax\nf = jax.pmap(g)\ndef body(c, x):\n    return f(c), x\n"
        "y = jax.lax.scan(body, c, xs)\n",
        (4,),
    ),
    Flag("by name", "import jax\nf = jax.pmap(g)\nh = jax.jit(f, donate_argnums=0)\n", (3,)),
    Flag("with arguments", "import jax\nh = jax.jit(jax.pmap(g), donate_argnums=0)\n", (2,)),
    Flag("a gradient", "import jax\nd = jax.grad(lambda w: jax.pmap(f)(w).sum())(w)\n", (2,)),
    Flag(
        "a method",
        "import jax\nclass A:\n    def __init__(self):\n        self.f = jax.pmap(g)\n"
        "        self.h = jax.jit(self.step)\n    def step(self, x):\n        return self.f(x)\n",
        (7,),
    ),
    Mend(
        "right around",
        "import jax\n\n\ndef result():\n"
        "    f = jax.jit(\n        jax.pmap(lambda x: jax.lax.psum(x, 'i'), axis_name='i'),\n"
        "    )\n"
        "    return f(jax.numpy.arange(8.0))\n",
        "import jax\n\n\ndef result():\n"
        "    f = jax.pmap(lambda x: jax.lax.psum(x, 'i'), axis_name='i')\n"
        "    return f(jax.numpy.arange(8.0))\n",
        runs=True,
    ),
    Mend(
        "as decorators",
        "import jax\n\n@jax.jit\n@jax.pmap\ndef f(x):\n    return x\n",
        "import jax\n\n@jax.pmap\ndef f(x):\n    return x\n",
    ),
)
