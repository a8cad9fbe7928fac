"""Nodes of a kind."""

import ast

import pytest

from jax_dist.lint.model import sources
from jax_dist.lint.model.semantic_model import Module

_CODE = b"""\
@h(a[0])
def f(x, *, n=c[0]) -> d[0]:
    y = x[1]
    return g(
        x,
        y[0],
        lambda z=e[0]: z[0],
    )
z: b[0] = [f(x[0]) for x in y[2:3] if x[4]]
"""


def test_all_are_found():
    module = Module(sources.read("case.py", _CODE))
    texts = sorted(map(module.text, module.nodes(ast.Subscript)))
    assert texts == [
        "a[0]",
        "b[0]",
        "c[0]",
        "d[0]",
        "e[0]",
        "x[0]",
        "x[1]",
        "x[4]",
        "y[0]",
        "y[2:3]",
        "z[0]",
    ]


def test_the_same_as_by_a_walk():
    module = Module(sources.read("case.py", _CODE))
    for kind in (ast.Call, ast.Subscript, ast.Assign, ast.Lambda, ast.ListComp, ast.FunctionDef):
        walked = [node for node in ast.walk(module.tree) if isinstance(node, kind)]
        assert set(module.nodes(kind)) == set(walked)


def test_of_several_kinds():
    module = Module(sources.read("case.py", _CODE))
    kinds = [type(node) for node in module.nodes(ast.Lambda, ast.ListComp, ast.SetComp)]
    assert kinds == [ast.Lambda, ast.ListComp]


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (b"id(x)", "id"),
        (b"id = 1\nid(x)", None),
        (b"a.id(x)", None),
        (b"f = lambda y: id(y)", "id"),
    ],
)
def test_builtins_that_the_file_does_not_hide(code, name):
    module = Module(sources.read("case.py", code))
    assert [module.builtin(call.func) for call in module.nodes(ast.Call)] == [name]


def test_a_file_that_is_dropped_gives_its_nodes_back_at_once():
    import gc
    import weakref

    module = Module(sources.read("case.py", _CODE))
    gc.disable()
    try:
        kept = [weakref.ref(node) for node in ast.walk(module.tree) if hasattr(node, "lineno")]
        module.drop()
        left = [ref() for ref in kept if ref() is not None]
    finally:
        gc.enable()
    assert left == []
