"""The functions that a file gives to pmap, shard_map and jit."""

import pytest

from jax_dist.lint.model import sources, traced
from jax_dist.lint.model.semantic_model import Module


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("f = jax.jit(lambda x: x)", [("jit", "lambda x: x")]),
        ("@jax.jit\ndef g(x): return x", [("jit", "def g(x): return x")]),
        ("@functools.partial(jax.jit, static_argnums=0)\ndef g(x): pass", [("jit", "def")]),
        ("@jax.jit(donate_argnums=0)\ndef g(x): pass", [("jit", "def")]),
        ("def g(x): pass\nf = jax.jit(jax.vmap(functools.partial(g, 1)))", [("jit", "def")]),
        ("def g(x): pass\nh = jax.vmap(g)\nf = jax.pmap(h)", [("pmap", "def")]),
        ("f = jax.shard_map(lambda x: x, mesh=m)", [("shard_map", "lambda x: x")]),
        ("f = functools.partial(jax.shard_map, mesh=m)(lambda x: x)", [("shard_map", "lambda")]),
        ("f = functools.partial(jax.shard_map, lambda x: x, mesh=m)()", [("shard_map", "lambda")]),
        ("f = functools.partial(jax.jit, make(), lambda x: x)", []),
        ("f = jax.jit(jax.shard_map(lambda x: x))", [("shard_map", "lambda x: x")]),
        ("f = jax.jit(make())", []),
        ("f = make(jax.jit, lambda x: x)", []),
        ("f = jax.vmap(lambda x: x)", []),
        ("from numba import jit\nf = jit(lambda x: x)", []),
    ],
)
def test_traced(code: str, expected: list[tuple[str, str]]):
    module = Module(sources.read("case.py", f"import functools, jax\n{code}\n".encode()))
    found = traced.find_traced(module)

    assert [by for by, _ in found] == [by for by, _ in expected]
    for (_, function), (_, text) in zip(found, expected, strict=True):
        assert module.text(function).startswith(text)
