"""The user's name for each captured array, in programs written as files of their own."""

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
    """Return the name and the two lines of each array that `fun` captures; line 1 is the first."""
    names = dict[str, object]()
    exec(_HEADER, names)
    exec(compile(source, "train.py", "exec"), names)
    fun = names["fun"]
    captures = find_captures(jax.make_jaxpr(fun)(names["x"]), fun)
    return [(capture.name, capture.captured_at, capture.used_at) for capture in captures]


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
    source, wanted = _ONE_LINE[case]
    [(name, captured_at, used_at)] = _names(source)

    assert name == wanted
    assert captured_at == ("" if case == "a view" else "train.py:1")
    assert used_at == "train.py:1" or case in ("jit", "vmap", "shard_map", "jit of partial")


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
_OF_MODEL = [
    ("self.layers[0]['kernel']", "train.py:5", "train.py:9"),
    ("unit", "train.py:8", "train.py:9"),
    ("self.table", "train.py:5", "train.py:6"),
]
_CLOSURES = """\
def make(table, scale):
    def look_up(x):
        return x @ table

    def step(x):
        x = x + 1
        return look_up(x) * scale

    return step
"""
_RULES = """\
def make():
    v = w * 2
    f = jax.custom_vjp(lambda x: x @ w)
    forward = lambda x: (x @ w, x)
    backward = lambda x, g: (v @ g,)
    f.defvjp(forward, backward)
    return f

f = make()
"""
_PROGRAMS = {  # by the last line: the lines before it, and the captured arrays with their lines
    "fun = make(w, np.array([1., 2, 3, 4], np.float32))": (
        _CLOSURES,
        [("table", "train.py:2", "train.py:3"), ("scale", "train.py:5", "train.py:7")],
    ),
    "fun = Model()": (_MODEL, _OF_MODEL),
    "fun = Model().__call__": (_MODEL, _OF_MODEL),
    "fun = jax.jit(Model().__call__)": (_MODEL, _OF_MODEL),
    "fun = lambda x: f(x)": (_RULES, [("w", "train.py:3", "train.py:10")]),
    "fun = jax.grad(lambda x: jnp.sum(f(x)))": (
        _RULES,
        [("w", "train.py:3", "train.py:4"), ("v", "train.py:5", "train.py:10")],
    ),
}


@pytest.mark.parametrize("last_line", _PROGRAMS)
def test_of_several_arrays(last_line):
    source, captures = _PROGRAMS[last_line]
    assert _names(source + last_line) == captures


# ---- libraries


def _names_of(fun, x=None):
    x = jnp.ones(3) if x is None else x
    return {capture.name for capture in find_captures(jax.make_jaxpr(fun)(x), fun)}


def _of_equinox():
    equinox = pytest.importorskip("equinox")
    model = equinox.nn.MLP(3, 4, 5, depth=1, key=jax.random.key(0))
    parts = {f"layers[{layer}].{part}" for layer in (0, 1) for part in ("weight", "bias")}
    yield lambda x: model(x), {f"model.{part}" for part in parts}
    yield model, {f"self.{part}" for part in parts}


def _of_flax():
    linen, nnx = pytest.importorskip("flax.linen"), pytest.importorskip("flax.nnx")
    module, model = linen.Dense(4), nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    params = module.init(jax.random.key(0), jnp.ones(3))
    parts = {f"params['params']['{part}']" for part in ("kernel", "bias")}
    yield lambda x: module.apply(params, x), parts
    yield lambda x: model(x), {"model.kernel.value", "model.bias.value"}
    yield model, {"self.kernel.value", "self.bias.value"}


def _of_optax():
    optax = pytest.importorskip("optax")
    optimizer, params = optax.adam(0.1), {"w": jnp.arange(3.0)}
    state = optimizer.init(params)
    names = {"state[0].count", "state[0].mu['w']", "state[0].nu['w']"}
    yield lambda grads: optimizer.update({"w": grads}, state, params), names


@pytest.mark.parametrize("functions", [_of_equinox, _of_flax, _of_optax])
def test_of_libraries(functions):
    for fun, names in functions():
        captures = find_captures(jax.make_jaxpr(fun)(jnp.ones(3)), fun)
        assert {capture.name for capture in captures} == names
