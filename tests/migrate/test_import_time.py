"""Names that a module reads above their first binding, while it is imported."""

import ast
import textwrap

import pytest

from jax_dist.migrate.imports import read_too_early


def _early(text: str) -> dict[str, int]:
    return read_too_early(ast.parse(textwrap.dedent(text)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f = mapped(g)\nfrom m import mapped\n", {"mapped": 1}),
        ("@mapped\ndef f(x): ...\nfrom m import mapped\n", {"mapped": 1}),
        ("def f(x=jax.numpy): ...\nimport jax\n", {"jax": 1}),
        ("class A:\n    step = mapped(g)\nfrom m import mapped\n", {"mapped": 2}),
        ("class A(mapped.B): ...\nimport mapped\n", {"mapped": 1}),
        ("if jax: ...\nimport jax\n", {"jax": 1}),
        ("for f in fs: mapped(f)\nfrom m import mapped\nfs = []\n", {"fs": 1, "mapped": 1}),
        ("fs = [mapped(f) for f in [1]]\nfrom m import mapped\n", {"mapped": 1}),
        ("a.b = jax\nimport jax\na = 1\n", {"a": 1, "jax": 1}),
        ("f = lambda x=jax: 0\nimport jax\n", {"jax": 1}),
    ],
)
def test_what_is_read_too_early(text: str, expected: dict[str, int]):
    assert _early(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "from m import mapped\nf = mapped(g)\n",
        "def f(x):\n    return mapped(x)\nfrom m import mapped\n",  # runs later
        "f = lambda x: mapped(x)\nfrom m import mapped\n",
        "print(len(xs))\nxs_ = 1\n",  # a builtin, and what comes from elsewhere
        "try:\n    import jax\nexcept ImportError:\n    jax = None\nif jax: ...\n",
        "with open(p) as file: file.read()\nfile = 1\n",
        "fs = [f for f in range(3)]\nf = 1\n",
        "fs = {k: v for k, v in {}.items()}\nk = v = 1\n",
        "if (n := 3) and n: ...\n",
        "match 3:\n    case int() as n: print(n)\n    case [*rest]: print(rest)\nrest = 1\n",
        "class A:\n    b = 1\n    c = b\n",
        "import a.b as c\nc.d\nfrom e import *\n",
        "for i in range(3):\n    print(i)\nelse:\n    print(i)\n",
    ],
)
def test_what_is_bound_in_time(text: str):
    assert _early(text) == {}


def test_a_name_of_a_class_is_not_bound_for_the_module():
    assert _early("class A:\n    b = 1\nprint(b)\nb = 2\n") == {"b": 3}
