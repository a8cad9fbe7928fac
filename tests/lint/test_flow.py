"""Where values come from: names, tuples, loops, attributes, functions of the file."""

import ast

import pytest

from jax_dist.lint.model import sources, stacking
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.model.stacking import Origin

_TOP = """\
import jax
import jax.numpy as jnp
import numpy as np
from flax import jax_utils
from flax.training import common_utils

n = jax.local_device_count()
f = jax.pmap(g)
"""


def found(code: str, name: str = "it") -> tuple[Module, tuple[Origin, ...]]:
    """Return the origins of the last read of `name` in `use(name)`."""
    module = Module(sources.read("case.py", (_TOP + code).encode()))
    reads = [
        node
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "use"
    ]
    argument = reads[-1].args[0]
    assert module.text(argument) == name
    return module, stacking.flow(module).origins(argument)


def kinds(code: str, name: str = "it") -> list[str]:
    return sorted(origin.kind.name for origin in found(code, name)[1])


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("it = f(x)\nuse(it)", ["MAPPED"]),
        ("it = jax.block_until_ready(f(x))\nuse(it)", ["MAPPED"]),
        ("it = f(x).block_until_ready()\nuse(it)", ["MAPPED"]),
        ("a, it = f(x)\nuse(it)", ["MAPPED"]),
        ("a, *it = f(x)\nuse(it)", ["UNKNOWN"]),
        ("m = f(x)\nit = m['loss']\nuse(it)", ["MAPPED"]),
        ("it = f(x).params\nuse(it)", ["MAPPED"]),
        ("it = f(x).shape\nuse(it)", ["UNKNOWN"]),
        ("it = jax_utils.replicate(s)\nuse(it)", ["REPLICATED"]),
        ("it = jax.device_put_replicated(s, jax.devices())\nuse(it)", ["REPLICATED"]),
        ("it = jnp.stack([s] * n)\nuse(it)", ["REPLICATED"]),
        ("it = jnp.stack([s for _ in range(n)])\nuse(it)", ["REPLICATED"]),
        ("it = jnp.stack([h(i) for i in range(n)])\nuse(it)", ["UNKNOWN"]),
        ("it = jnp.stack([s] * 8)\nuse(it)", ["UNKNOWN"]),
        ("it = jnp.broadcast_to(s, (n, *s.shape))\nuse(it)", ["REPLICATED"]),
        ("it = jnp.repeat(s[None], n, axis=0)\nuse(it)", ["REPLICATED"]),
        ("it = jax.tree.map(lambda a: jnp.stack([a] * n), s)\nuse(it)", ["REPLICATED"]),
        ("it = jax.tree.map(lambda a: jnp.stack([b] * n), s)\nuse(it)", ["UNKNOWN"]),
        ("it = jax.random.split(key, n)\nuse(it)", ["KEYS"]),
        ("it, k = jax.random.split(key, n)\nuse(it)", ["UNKNOWN"]),
        ("it = jax.random.split(key)\nuse(it)", ["UNKNOWN"]),
        ("it = common_utils.shard_prng_key(key)\nuse(it)", ["KEYS"]),
        ("it = common_utils.shard(b)\nuse(it)", ["SPLIT"]),
        ("it = b.reshape((n, -1) + b.shape[1:])\nuse(it)", ["SPLIT"]),
        ("it = jnp.reshape(b, (n, -1))\nuse(it)", ["SPLIT"]),
        ("it = b.reshape(-1, n)\nuse(it)", ["UNKNOWN"]),
        ("it = np.array(jax.devices()).reshape(n, 1)\nuse(it)", ["UNKNOWN"]),
        ("it = jax_utils.unreplicate(s)\nuse(it)", ["ONE"]),
        ("it = jax.tree.map(lambda a: a[0], f(x))\nuse(it)", ["ONE"]),
        ("it = jax.tree.map(lambda a: a[0], x)\nuse(it)", ["UNKNOWN"]),
        ("it = jax.tree.map(lambda a: a[1], f(x))\nuse(it)", ["UNKNOWN"]),
        ("y = f(x) if a else x\nit = jax.tree.map(lambda a: a[0], y)\nuse(it)", ["UNKNOWN"]),
        ("it = f(x) + 1\nuse(it)", ["UNKNOWN"]),
        ("it = f(x) if a else jax_utils.replicate(s)\nuse(it)", ["MAPPED", "REPLICATED"]),
        ("it = None\nif a:\n    it = f(x)\nuse(it)", ["MAPPED"]),
    ],
)
def test_kind_of(code: str, expected: list[str]):
    assert kinds(code) == expected


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("for it in data:\n    use(it)", ["UNKNOWN"]),
        ("it = f(x)\nfor it in data:\n    use(it)", ["UNKNOWN"]),
        ("for it in data:\n    use(it)\n    it = f(it)", ["UNKNOWN"]),
        ("it = 3\nfor b in data:\n    use(it)\n    it = f(b)", ["MAPPED", "UNKNOWN"]),
        ("for b in data:\n    it = f(b)\n    for it in b:\n        use(it)", ["UNKNOWN"]),
        ("it = f(x)\nwhile a:\n    use(it)\n    if b:\n        del it", ["MAPPED"]),
        ("it = f(x)\nwhile a:\n    it = jax.block_until_ready(it)\nuse(it)", ["MAPPED"]),
        ("it = jax_utils.replicate(s)\nfor b in data:\n    it, m = f(it, b)\nuse(it)", None),
    ],
)
def test_kind_in_loops(code: str, expected: list[str] | None):
    assert kinds(code) == (expected or ["MAPPED", "REPLICATED"])


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def make():\n    return 1, f(x)\na, it = make()\nuse(it)", ["MAPPED"]),
        ("def _do(it):\n    use(it)\n_do(f(x))\nh(_do)", ["UNKNOWN"]),
        ("def make():\n    yield 1\n    return f(x)\nit = make()\nuse(it)", ["UNKNOWN"]),
    ],
)
def test_kind_through_functions(code: str, expected: list[str] | None):
    assert kinds(code) == (expected or ["MAPPED", "REPLICATED"])


def test_attributes_are_followed_and_every_store_counts():
    code = """
class A:
    def __init__(self):
        self.state = jax_utils.replicate(s)
    def step(self, b):
        self.state, m = f(self.state, b)
    def save(self):
        use(self.state)
"""
    assert kinds(code, "self.state") == ["MAPPED", "REPLICATED"]


def test_the_way_down_into_a_result_is_told():
    module, (origin,) = found("(a, it), m = f(x)\nit = it['loss'].total\nuse(it)")

    assert origin.path == (0, 1, "loss", ".total")
    assert origin.site is not None
    assert module.text(origin.site.node) == "jax.pmap(g)"


def test_what_went_to_the_host_is_told():
    assert [origin.on_host for origin in found("it = jax.device_get(f(x))\nuse(it)")[1]] == [True]
    assert [origin.on_host for origin in found("it = f(x)\nuse(it)")[1]] == [False]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return jnp.sum(x)", False),
        ("return x, x", True),
        ("return {'a': x}", True),
        ("y = jax.lax.pmean(jnp.sin(x), 'i')\n    return y", False),
        ("y = jax.lax.pmean((x, x), 'i')\n    return y", True),
        ("return args + (x,)", True),
        ("return x + y", None),
        ("return x - y", False),
        ("return h(x)", None),
        ("if x is None:\n        return x, x\n    return jnp.sum(x)", None),
    ],
)
def test_whether_a_result_is_a_tree(*, body: str, expected: bool | None):
    module, (origin,) = found(f"def k(x):\n    {body}\nit = jax.pmap(k)(x)\nuse(it)")

    assert stacking.is_tree(module, origin) is expected


def test_a_circle_of_names_ends():
    code = "def a(it):\n    use(it)\n    b(it)\ndef b(it):\n    a(it)\n"

    assert kinds(code) == ["UNKNOWN"]
