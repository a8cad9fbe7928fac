"""JXD306: `psum(1, axis)` is `axis_size(axis)`."""

import ast
import re
from collections.abc import Iterator

from jax_dist.checker.findings import Edit, Fix, Safety
from jax_dist.checker.modules import Module
from jax_dist.checker.page import Page
from jax_dist.checker.registry import Case, Found, Keep, Mend, rule

PAGE = Page(
    code="JXD306",
    name="psum-of-one",
    what="Finds `jax.lax.psum(1, axis)`, under any alias.",
    why="It reads as communication, but JAX folds it to a constant while tracing.",
    example="n = jax.lax.psum(1, 'i')\n",
    instead="n = jax.lax.axis_size('i')\n",
    fix="Safe: the same value of the same type, in one process and in many.",
    since="jax 0.6.1: `jax.lax.axis_size`.",
    source="https://docs.jax.dev/en/latest/_autosummary/jax.lax.axis_size.html",
)

# Not `psum(x, ...)`, nor "psum of" in prose: most files that say psum hold nothing else.
_OPERATORS = rb"as|if|else|for|and|or|in|is|not"
_OF_ONE = re.compile(rb"psum(?!\w| +(?!(?:" + _OPERATORS + rb")\b)[a-zA-Z]|\s*\(\s*[^\s1(#\\])")


@rule(PAGE, triggers=(b"*psum*",), since=(0, 6, 1), narrow={b"*psum*": _OF_ONE})
def check(module: Module) -> Iterator[Found]:
    for call in module.calls("jax.lax.psum"):
        match call:
            # By text: the values True and 1.0 equal 1, yet psum gives them other types.
            case ast.Call(
                func=function,
                args=[one, ast.AST() as axis],
                keywords=[],
            ) if module.text(one) == "1":
                yield Found(
                    call, "psum(1, axis) is axis_size(axis)", _fix(module, function, one, axis)
                )
            case ast.Call(
                func=function,
                args=[one],
                keywords=[ast.keyword(arg="axis_name", value=axis)],
            ) if module.text(one) == "1":
                yield Found(
                    call, "psum(1, axis) is axis_size(axis)", _fix(module, function, one, axis)
                )


def _fix(module: Module, function: ast.expr, one: ast.expr, axis: ast.expr) -> Fix:
    name, imports = module.name_for("jax.lax.axis_size", function)
    edits = (
        Edit(*module.span(function), name),
        Edit(module.span(one)[0], module.span(axis)[0], ""),
    )
    return Fix("use jax.lax.axis_size", Safety.SAFE, edits, imports)


CASES: tuple[Case, ...] = (
    Keep("another library's psum", "from mpi import jax, lax\nn = lax.psum(1, 'i')\n"),
    Keep("a float has a float sum", "from jax import lax\nn = lax.psum(1.0, 'i')\n"),
    Keep("a truth value has another type", "from jax import lax\nn = lax.psum(True, 'i')\n"),
    Keep(
        "a parameter hides the import",
        "from jax import lax\ndef f(lax):\n    return lax.psum(1, 'i')\n",
    ),
    Mend(
        "another name of it",
        "from jax import lax\np = lax.psum\nn = p(1, 'i')\n",
        "from jax import lax\np = lax.psum\nn = lax.axis_size('i')\n",
    ),
    Mend(
        "a comment before the number",
        "import jax\nn = jax.lax.psum(  # devices\n    1, 'i')\n",
        "import jax\nn = jax.lax.axis_size(  # devices\n    'i')\n",
    ),
    Mend(
        "alias and comment are kept",
        "from jax import lax as L\nn = L.psum(1, ('i', 'j'))  # devices\n",
        "from jax import lax as L\nn = L.axis_size(('i', 'j'))  # devices\n",
    ),
    Mend(
        "the axis by keyword",
        "import jax\nn = jax.lax.psum(1, axis_name='i')\n",
        "import jax\nn = jax.lax.axis_size('i')\n",
    ),
    Mend(
        "the function itself was imported",
        "from jax.lax import psum\nn = psum(1, 'i') + psum(x, 'i')\n",
        "from jax.lax import psum\nimport jax\nn = jax.lax.axis_size('i') + psum(x, 'i')\n",
    ),
)
