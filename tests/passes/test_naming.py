"""The user's name for each captured array, in programs written as files of their own."""

import textwrap

import jax
import jax.numpy as jnp
import pytest

from jax_dist._passes.captures import find_captures

_HEADER = """\
import functools
import types
from typing import NamedTuple
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
w = jnp.arange(12.0).reshape(3, 4) + 1
n = np.arange(12, dtype=np.float32).reshape(3, 4)
key = jax.random.key(0)
mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
specs = {"in_specs": P(), "out_specs": P()}
x = jnp.ones(3)
"""


def _names(source):
    """Name and the two lines of what `fun` captures, where its file begins with line 1."""
    names = dict[str, object]()
    exec(_HEADER, names)
    exec(compile(textwrap.dedent(source), "train.py", "exec"), names)
    fun = names["fun"]
    captures = find_captures(jax.make_jaxpr(fun)(names["x"]), fun)
    return [(found.name, found.captured_at, found.used_at) for found in captures]


_ONE_LINE = {  # all are used and captured in line 1
    "global": ("fun = lambda x: x @ w", "w"),
    "global NumPy": ("fun = lambda x: x @ n", "n"),
    "key": ("fun = lambda x: x + jax.random.normal(key, (3,))", "key"),
    "list": ("ws = [n, w]; fun = lambda x: x @ ws[1]", "ws[1]"),
    "namedtuple": ("t = NamedTuple('T', [('b', object)])(w); fun = lambda x: x @ t.b", "t.b"),
    "partial": ("fun = functools.partial(lambda v, x: x @ v, w)", "args[0]"),
    "partial by name": ("fun = functools.partial(lambda x, v: x @ v, v=w)", "v"),
    "jit": ("fun = jax.jit(lambda x: x @ w)", "w"),
    "jit of partial": ("fun = jax.jit(functools.partial(lambda v, x: x @ v, w))", "args[0]"),
    "grad": ("fun = jax.grad(lambda x: jnp.sin(x @ w).sum())", "w"),
    "vmap": ("fun = jax.vmap(lambda x: x * w)", "w"),
    "shard_map": ("fun = jax.shard_map(lambda x: x @ w, mesh=mesh, **specs)", "w"),
    "scan": ("fun = lambda x: lax.scan(lambda c, _: (c, c @ w), x, length=2)", "w"),
    "beside the class of functions": (
        "c = types.FunctionType; f = lambda x: x @ w; fun = lambda x: (c, f(x))[1]",
        "w",
    ),
    "a view": ("fun = lambda x: x @ n[:, 1:]", "<derived>"),
}


@pytest.mark.parametrize("case", _ONE_LINE)
def test_of_one_array(case):
    source, name = _ONE_LINE[case]
    [(found, captured_at, used_at)] = _names(source)

    assert found == name
    assert captured_at == ("" if case == "a view" else "train.py:1")
    assert used_at == "train.py:1" or case in ("jit", "vmap", "shard_map", "jit of partial")


def test_closures_through_helpers_and_their_lines():
    assert _names("""\
        def make(table, scale):
            def look_up(x):
                return x @ table

            def step(x):
                x = x + 1
                return look_up(x) * scale

            return step

        fun = make(w, np.array([1., 2, 3, 4], np.float32))
        """) == [
        ("table", "train.py:2", "train.py:3"),
        ("scale", "train.py:5", "train.py:7"),
    ]


_MODEL = """\
class Model:
    def __init__(self):
        self.table, self._hidden, self.layers = w, w, [{"kernel": n}]

    def __call__(self, x):
        return self.helper(x) @ self.table

    def helper(self, x):
        return x + (x @ self.layers[0]["kernel"])[0] + (x @ unit)[0]

    @property
    def explosive(self):
        raise AssertionError

unit = np.eye(3, dtype=np.float32)
"""


@pytest.mark.parametrize("fun", ["Model()", "Model().__call__", "jax.jit(Model().__call__)"])
def test_methods_and_callable_objects(fun):
    assert _names(f"{_MODEL}fun = {fun}") == [
        ("self.layers[0]['kernel']", "train.py:5", "train.py:9"),
        ("unit", "train.py:8", "train.py:9"),
        ("self.table", "train.py:5", "train.py:6"),
    ]


def test_custom_rules():
    source = textwrap.dedent("""\
        def make():
            v = w * 2
            f = jax.custom_vjp(lambda x: x @ w)
            forward = lambda x: (x @ w, x)
            backward = lambda x, g: (v @ g,)
            f.defvjp(forward, backward)
            return f

        f = make()
        """)

    assert _names(f"{source}fun = lambda x: f(x)") == [("w", "train.py:3", "train.py:10")]
    assert [names[:2] for names in _names(f"{source}fun = jax.grad(lambda x: jnp.sum(f(x)))")] == [
        ("w", "train.py:3"),
        ("v", "train.py:5"),
    ]


# ---- libraries


def _names_of(fun, x=None):
    x = jnp.ones(3) if x is None else x
    return {capture.name for capture in find_captures(jax.make_jaxpr(fun)(x), fun)}


def test_equinox():
    equinox = pytest.importorskip("equinox")
    model = equinox.nn.MLP(3, 4, 5, depth=1, key=jax.random.key(0))
    parts = [f"layers[{layer}].{part}" for layer in (0, 1) for part in ("weight", "bias")]

    assert _names_of(lambda x: model(x)) == {f"model.{part}" for part in parts}
    assert _names_of(model) == {f"self.{part}" for part in parts}


def test_flax():
    linen, nnx = pytest.importorskip("flax.linen"), pytest.importorskip("flax.nnx")
    module, model = linen.Dense(4), nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    params = module.init(jax.random.key(0), jnp.ones(3))

    names = _names_of(lambda x: module.apply(params, x))
    assert names == {"params['params']['kernel']", "params['params']['bias']"}
    assert _names_of(lambda x: model(x)) == {"model.kernel.value", "model.bias.value"}
    assert _names_of(model) == {"self.kernel.value", "self.bias.value"}


def test_optax():
    optax = pytest.importorskip("optax")
    optimizer, params = optax.adam(0.1), {"w": jnp.arange(5.0)}
    state = optimizer.init(params)

    names = _names_of(lambda grads: optimizer.update({"w": grads}, state, params), jnp.ones(5))
    assert names == {"state[0].count", "state[0].mu['w']", "state[0].nu['w']"}
