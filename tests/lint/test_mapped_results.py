"""Expressions that stack over devices, and values that come from mapped functions."""

import ast

import pytest

from jax_dist.lint.model import sources
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.model.stacking import read_stacking
from jax_dist.lint.rules import _mapped_results
from jax_dist.lint.rules._mapped_results import Origin

_TOP = """\
import jax
import jax.numpy as jnp
import numpy as np
from flax import jax_utils
from flax.training import common_utils

n = jax.local_device_count()
f = jax.pmap(g)
"""


def _argument(code: str) -> tuple[Module, ast.expr]:
    """Return what the last `use(...)` of some code is given."""
    module = Module(sources.read("case.py", (_TOP + code).encode()))
    uses = [
        node
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "use"
    ]
    return module, uses[-1].args[0]


def _origins(code: str) -> tuple[Module, list[Origin]]:
    module, argument = _argument(code)
    return module, _mapped_results.origins(module, argument)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("jax.device_put_replicated(s, jax.devices())", "REPLICATED"),
        ("jax_utils.replicate(s)", "REPLICATED"),
        ("jnp.stack([s] * n)", "REPLICATED"),
        ("jnp.stack([s for _ in range(n)])", "REPLICATED"),
        ("jnp.stack([h(i) for i in range(n)])", None),
        ("jnp.stack([s] * 8)", None),
        ("jnp.broadcast_to(s, (n, *s.shape))", "REPLICATED"),
        ("jnp.repeat(s[None], n, axis=0)", "REPLICATED"),
        ("jax.tree.map(lambda a: jnp.stack([a] * n), s)", "REPLICATED"),
        ("jax.tree.map(lambda a: jnp.stack([b] * n), s)", None),
        ("jax.random.split(key, n)", "KEYS"),
        ("jax.random.split(key)", None),
        ("common_utils.shard_prng_key(key)", "KEYS"),
        ("common_utils.shard(b)", "SPLIT"),
        ("b.reshape((n, -1) + b.shape[1:])", "SPLIT"),
        ("jnp.reshape(b, (n, -1))", "SPLIT"),
        ("b.reshape(-1, n)", None),
        ("np.array(jax.devices()).reshape(n, 1)", None),
        ("jax_utils.unreplicate(s)", "ONE"),
    ],
)
def test_stacking(code: str, kind: str | None):
    done = read_stacking(*_argument(f"use({code})"))

    assert (done and done.kind.name) == kind


@pytest.mark.parametrize(
    ("code", "calls"),
    [
        ("it = f(x)\nuse(it)", ["f(x)"]),
        ("a, it = f(x)\nuse(it)", ["f(x)"]),
        ("a, *it = f(x)\nuse(it)", []),
        ("m = f(x)\nit = m['loss']\nuse(it)", ["f(x)"]),
        ("it = f(x).params\nuse(it)", ["f(x)"]),
        ("it = f(x).shape\nuse(it)", []),
        ("it = jax_utils.replicate(s)\nuse(it)", ["jax_utils.replicate(s)"]),
        ("it = f(x) + 1\nuse(it)", []),
        ("it = jax.device_get(f(x))\nuse(it)", []),
        ("it = f(x) if a else x\nuse(it)", []),
        ("for it in data:\n    use(it)", []),
        ("it = f(x)\nif a:\n    it = f(y)\nuse(it)", ["f(x)", "f(y)"]),
        ("it = f(x)\nfor it in data:\n    use(it)", []),
        ("it = 3\nfor b in data:\n    use(it)\n    it = f(b)", []),
        ("it = f(x)\nwhile a:\n    use(it)\n    if b:\n        del it", ["f(x)"]),
        ("it = f(x)\nfor b in data:\n    it, m = f(it, b)\nuse(it)", ["f(it, b)", "f(x)"]),
        ("def _do(it):\n    use(it)\n_do(f(x))\nh(_do)", []),
        ("def a(it):\n    use(it)\n    b(it)\ndef b(it):\n    a(it)\n", []),
    ],
)
def test_calls_that_may_have_made_a_value(code: str, calls: list[str]):
    module, origins = _origins(code)

    assert sorted(module.text(origin.call) for origin in origins) == calls


def test_the_path_leads_down_into_a_result():
    module, (origin,) = _origins("(a, it), m = f(x)\nit = it['loss'].total\nuse(it)")

    assert origin.path == (0, 1, "loss", ".total")
    assert origin.site is not None
    assert module.text(origin.site.node) == "jax.pmap(g)"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return jnp.sum(x)", True),
        ("return x, x", False),
        ("return {'a': x}", False),
        ("y = jax.lax.pmean(jnp.sin(x), 'i')\n    return y", True),
        ("y = jax.lax.pmean((x, x), 'i')\n    return y", False),
        ("return args + (x,)", False),
        ("return x + y", False),
        ("return x - y", True),
        ("return h(x)", False),
        ("if x is None:\n        return x, x\n    return jnp.sum(x)", False),
    ],
)
def test_whether_a_result_is_surely_an_array(*, body: str, expected: bool):
    module, (origin,) = _origins(f"def k(x):\n    {body}\nit = jax.pmap(k)(x)\nuse(it)")

    assert _mapped_results.is_array(module, origin) is expected
