"""JXD005: arguments of `jax.pmap` that a shard_map has no counterpart for."""

import ast
from collections.abc import Iterator

from jax_dist.checker import pmaps
from jax_dist.checker.modules import Module
from jax_dist.checker.page import Page
from jax_dist.checker.pmaps import Site
from jax_dist.checker.registry import Case, Flag, Found, Keep, rule

PAGE = Page(
    code="JXD005",
    name="pmap-untranslatable-argument",
    what="Finds arguments of `jax.pmap` that decide by more than their text what the program is: "
    "`devices`, `backend`, `axis_size`, `static_broadcasted_argnums`, computed `in_axes` and "
    "`out_axes`, `*args` and `**kwargs`, and keyword arguments in calls of the mapped function.",
    why="A `jax.shard_map` wants a mesh and specs in their place, and takes no keyword arguments: "
    "a call with one raises a TypeError (jax 0.10.2). They have to be worked out by hand.",
    example="import jax\n\nf = jax.pmap(g, devices=devices, static_broadcasted_argnums=1)\n",
    instead="import jax_dist\n\n"
    "f = jax_dist.pmap(g, devices=devices, static_broadcasted_argnums=1)\n",
    fix="None here: `jax-dist migrate --to jax_dist` keeps them all, and `--to jax` carries those "
    "that it can show to be right.",
    since="Any jax with pmap.",
    source="https://docs.jax.dev/en/latest/migrate_pmap.html",
)

_ADVICE = {
    "devices": "a mesh of these devices takes its place",
    "backend": "a mesh of that backend's devices takes its place",
    "axis_size": "the mesh has the size",
    "static_broadcasted_argnums": "bind them by partial, or give jit static_argnums",
    "global_arg_shapes": "it was removed",
    "in_axes": "in_specs have to follow what it is computed from",
    "out_axes": "out_specs have to follow what it is computed from",
}
_LITERAL_IS_FINE = ("in_axes", "out_axes")


@rule(PAGE, triggers=(b"*pmap*",))
def check(module: Module) -> Iterator[Found]:
    for site in pmaps.sites(module):
        if not (site.is_application or site.form == "partial alias"):
            continue
        yield from _arguments(module, site)
        for call in pmaps.mapped_calls(module, site):
            if call.keywords:
                names = ", ".join(f"{each.arg}=" if each.arg else "**" for each in call.keywords)
                message = f"a shard_map takes no keyword arguments, such as {names} here"
                yield Found(call.keywords[0], message)


def _arguments(module: Module, site: Site) -> Iterator[Found]:
    for name, value in site.arguments.items():
        if name not in _ADVICE or (name in _LITERAL_IS_FINE and _is_literal(value)):
            continue
        if isinstance(value, ast.Constant) and value.value is None:
            continue
        # What a partial of another file binds has its finding there.
        if module.holds(value):
            yield Found(value, f"{name} of jax.pmap: {_ADVICE[name]}")
    if site.unknown:
        yield Found(site.reference, f"{site.unknown} may hold any argument of jax.pmap")


def _is_literal(value: ast.expr) -> bool:
    try:
        ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError):
        return False
    return True


CASES: tuple[Case, ...] = (
    Keep("an axis and donation", "import jax\nf = jax.pmap(g, 'i', donate_argnums=(0, 1))\n"),
    Keep(
        "literal axes",
        "import jax\nf = jax.pmap(g, in_axes=(0, None, {'a': 1}), out_axes=None)\n",
    ),
    Keep("nothing given", "import jax\nf = jax.pmap(g, devices=None)\ny = f(x)\n"),
    Keep("another function's devices", "import jax\nf = jax.pmap(g)\nh = run(f, devices=d)\n"),
    Flag("several", "import jax\nf = jax.pmap(g, backend='cpu',\n    axis_size=8)\n", (2, 3)),
    Flag("computed axes", "import jax\nf = jax.pmap(g, in_axes=(0,) + rest)\n", (2,)),
    Flag(
        "of a partial", "import jax, functools\np = functools.partial(jax.pmap, devices=d)\n", (2,)
    ),
    Flag("hidden ones", "import jax\nf = jax.pmap(g, **options)\n", (2,)),
    Flag("a call by keyword", "import jax\nf = jax.pmap(g)\ny = f(x, mask=m, key=k)\n", (3,)),
    Flag(
        "a decorator",
        "import jax, functools\n"
        "@functools.partial(jax.pmap, static_broadcasted_argnums=(1,))\ndef f(x, n): ...\n",
        (2,),
    ),
)
