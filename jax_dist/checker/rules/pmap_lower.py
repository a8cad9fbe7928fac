"""JXD004: `.lower` and other attributes of a mapped function."""

import ast
from collections.abc import Iterator

from jax_dist.checker import guards, pmaps
from jax_dist.checker.modules import Module
from jax_dist.checker.page import Page
from jax_dist.checker.registry import Case, Flag, Found, Keep, rule

PAGE = Page(
    code="JXD004",
    name="pmap-lower",
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


@rule(PAGE, triggers=(b"*pmap*",))
def check(module: Module) -> Iterator[Found]:
    # The words are asked for once more: they are rarer than pmap.
    if not any(f".{name}".encode() in module.source.code for name in _REASONS):
        return
    for site in pmaps.sites(module):
        if not site.is_application:
            continue
        for held in pmaps.held_by(module, site):
            use = module.parent(held)
            if not isinstance(use, ast.Attribute) or use.attr not in _REASONS:
                continue
            if not guards.is_guarded(module, use):
                yield Found(use, f".{use.attr} of a jax.pmap {_REASONS[use.attr]}")


CASES: tuple[Case, ...] = (
    Keep("of a jit", "import jax\nf = jax.pmap(g)\nt = jax.jit(g).lower(x)\n"),
    Keep("of a string", "import jax\nf = jax.pmap(g)\nname = 'A'.lower()\n"),
    Keep("of the function itself", "import jax\nf = jax.pmap(g)\nh = g.__wrapped__\n"),
    Keep("of its name", "import jax\nf = jax.pmap(g)\nn = f.__name__.lower()\n"),
    Keep("of a result", "import jax\nf = jax.pmap(g)\nt = f(x).lower()\n"),
    Flag("at once", "import jax\nt = jax.pmap(g).lower(x)\n", (2,)),
    Flag("by name", "import jax\nf = jax.pmap(g)\nt = f.lower(x).compile()\n", (3,)),
    Flag("of a decorated one", "import jax\n@jax.pmap\ndef f(x): ...\nh = f.__wrapped__\n", (4,)),
    Flag(
        "of an attribute",
        "import jax\nclass A:\n    def __init__(self):\n        self.f = jax.pmap(g)\n"
        "    def text(self, x):\n        return self.f.lower(x).as_text()\n",
        (6,),
    ),
)
