"""Which bindings of a name may hold where it is read."""

import ast
import textwrap

import pytest

from jax_dist.lint.model import sources
from jax_dist.lint.model.reaching import LIMIT
from jax_dist.lint.model.semantic_model import Module


def _reaching(text: str) -> list[int] | None:
    """Return the lines that bind `x` as `use(x)` reads it."""
    module = Module(sources.read("case.py", textwrap.dedent(text).encode()))
    (read,) = [
        node.args[0]
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "use"
    ]
    bindings = module.reaching(read)
    return None if bindings is None else sorted(each.node.lineno for each in bindings)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("use(x)", None),
        ("x = 1\nuse(x)", [1]),
        ("x = 1\nx = 2\nuse(x)\nx = 3", [2]),
        ("x = 1\nx = use(x)", [1]),
        ("x = 1\nif a:\n  x = 2\nuse(x)", [1, 3]),
        ("x = 1\nif a:\n  x = 2\nelse:\n  x = 3\nuse(x)", [1, 3, 5]),
        ("x = 1\nif a:\n  x = 2\n  raise E\nuse(x)", [1, 3]),
        ("if a:\n  x = 1\nelif b:\n  x = 2\n  use(x)", [4]),
        ("x = 1\nfor y in z:\n  use(x)\n  x = 2", [1, 4]),
        ("x = 1\nfor y in z:\n  x = 2\n  use(x)", [3]),
        ("x = 1\nfor x in z:\n  use(x)", [2]),
        ("x = 1\nfor x in use(x):\n  x = 2", [1]),
        ("x = 1\nwhile use(x):\n  x = 2", [1, 3]),
        ("x = 1\ntry:\n  x = 2\nexcept E:\n  use(x)", [1, 3]),
        ("x = 1\ntry:\n  x = 2\nexcept E:\n  x = 3\nuse(x)", [1, 3, 5]),
        ("x = 1\nwith a as x:\n  use(x)", [2]),
        ("with a as x:\n  x = 2\nuse(x)", [2]),
        ("x = 1\nwith a:\n  if b:\n    x = 2\nuse(x)", [1, 4]),
        ("x = 1\nmatch y:\n  case 1:\n    x = 2\nuse(x)", [1, 4]),
        ("x = 1\nif (x := f()):\n  use(x)", [2]),
        ("x = 1\nx = 2\ndef f():\n  use(x)\nx = 3", [2, 5]),
        ("def f(x):\n  if a:\n    x = 2\n  use(x)", [1, 3]),
        ("def f(x):\n  x = 2\n  return [use(x) for y in z]", [2]),
        ("x = 1\nx = 2\ndef f():\n  global x\n  x = 3\nuse(x)", [2, 5]),
        ("x = 1\ndel x\nx = 2\nuse(x)", [3]),
        ("import x\ndef x(): pass\nuse(x)", [2]),
        ("x = 0\n" + "if a: x = 1\n" * LIMIT + "use(x)", None),
        ("if a: x = 1\n" * LIMIT + "use(x)", [*range(1, LIMIT + 1)]),
    ],
)
def test_reaching(text, lines):
    assert _reaching(text) == lines
