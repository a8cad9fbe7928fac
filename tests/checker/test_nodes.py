"""Nodes that cover a line of interest."""

import ast
import re

from jax_dist.checker import nodes, sources
from jax_dist.checker.modules import Module

_CODE = b"""\
@h(a[0])
def f(x):
    y = x[1]
    return g(
        x,
        y[0],
    )
z = [f(x[0]) for x in y[2:3]]
"""


def texts(pattern: bytes) -> list[str]:
    module = Module(sources.read("case.py", _CODE))
    found = nodes.on_lines(module, ast.Subscript, re.compile(pattern))
    return [module.text(node) for node in found]


def test_those_on_the_lines_are_found_in_order():
    assert texts(rb"\[0\]") == ["a[0]", "y[0]", "x[0]", "y[2:3]"]


def test_a_decorator_counts_for_what_it_decorates():
    assert texts(rb"a\[0\]") == ["a[0]"]


def test_others_are_left_out():
    assert texts(rb"\[1\]") == ["x[1]"]


def test_a_text_that_is_not_there_finds_nothing():
    assert texts(rb"\[7\]") == []


def test_a_node_over_several_lines_counts_for_each():
    module = Module(sources.read("case.py", _CODE))
    found = nodes.on_lines(module, ast.Call, re.compile(rb"y\[0\]"))

    assert [module.text(node.func) for node in found] == ["g"]
