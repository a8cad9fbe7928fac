"""Nodes of a kind."""

import ast
import re

from jax_dist.checker.model import semantic_model, sources
from jax_dist.checker.model.semantic_model import Module

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


def texts(kind: type[ast.expr], pattern: bytes) -> list[str]:
    module = Module(sources.read("case.py", _CODE))
    return sorted(map(module.text, semantic_model.of_kind(module, kind, re.compile(pattern))))


def test_all_are_found():
    everywhere = "a[0] b[0] c[0] d[0] e[0] x[0] x[1] x[4] y[0] y[2:3] z[0]"
    assert texts(ast.Subscript, rb"\[0\]") == everywhere.split()


def test_the_same_as_by_a_walk():
    module = Module(sources.read("case.py", _CODE))
    for kind in (ast.Call, ast.Subscript, ast.Assign, ast.Lambda, ast.ListComp, ast.FunctionDef):
        walked = [node for node in ast.walk(module.tree) if isinstance(node, kind)]
        assert set(semantic_model.of_kind(module, kind, re.compile(b""))) == set(walked)


def test_a_pattern_that_is_not_there_finds_nothing():
    assert texts(ast.Subscript, rb"\[7\]") == []


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
