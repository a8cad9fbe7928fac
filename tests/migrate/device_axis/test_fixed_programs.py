"""Which functions trace the same collectives in each run, by their text."""

import ast
import textwrap

import pytest

from jax_dist.lint.model import semantic_model, sources
from jax_dist.migrate.device_axis import fixed_programs

_ABOVE = """\
import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import total
from jax import lax

AXIS = "i"
SYNC = True
LR = 0.1
NAME = "i" if SYNC else None
OPTIMIZER = optax.sgd(LR)
USED = {"mse": lambda x: x, "none": None}


class Pair(NamedTuple):
    x: jax.Array
    y: jax.Array


class Shape(NamedTuple):
    x: jax.Array

    def size(self):
        return self.x.size


if SYNC:
    Either = Pair
else:

    class Either(NamedTuple):
        x: jax.Array


class Model(nn.Module):
    axis: str

    def __call__(self, x):
        return x


def squared(w, x):
    return jnp.mean((x @ w) ** 2)


def chosen(x):
    return lax.pmean(x, "i") if SYNC else x


GRADIENT = jax.grad(chosen)


def recursive(x):
    return recursive(x - 1)


"""
_FIXED = {
    "arithmetic": "return LR * lax.pmean(x, 'i')",
    "a gradient": "return lax.pmean(jax.grad(squared)(w, x), 'i')",
    "a gradient with a name": "g = jax.value_and_grad(squared)\nreturn lax.pmean(g(w, x), 'i')",
    "a lambda": "return jax.vmap(lambda e: jnp.sum(e))(x)",
    "a function inside": "def f(e):\n    return e * 2\nreturn lax.pmean(f(x), axis_name='i')",
    "a scan": "return lax.scan(lambda c, e: (c + e, None), w, x)[0]",
    "a record": "return Pair(w, x)",
    "methods of arrays": "return x.reshape(-1).sum(0).astype(jnp.float32)",
    "the name of an axis": "return lax.psum(x, AXIS)",
    "a condition that is traced": "return lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)",
    "builtins": "return dict(a=x, n=len(x))",
    "a partial": "return jax.grad(functools.partial(squared, x=x))(w)",
    "itself": "return recursive(x)",
    "branches in a list": "return lax.switch(0, [jnp.sin, squared], x)",
    "several axes": "return lax.psum(x, ('i', AXIS))",
    "a decorator of jax": "@jax.jit\ndef f(e):\n    return e\nreturn f(x)",
    "a partial decorator": "@functools.partial(jax.jit)\ndef f(e):\n    return e\nreturn f(x)",
    "updates of a tree": "return optax.apply_updates(w, jax.tree.map(lambda e: -LR * e, w))",
}
_OTHERS = {
    "a match": "match SYNC:\n    case True:\n        w = lax.pmean(w, 'i')\nreturn w",
    "a loop of unknown turns": "while SYNC:\n    w = lax.pmean(w, 'i')\nreturn w",
    "a condition": "if SYNC:\n    x = lax.pmean(x, 'i')\nreturn x",
    "an expression with a condition": "return lax.pmean(x, 'i') if SYNC else x",
    "an operator": "return SYNC and lax.pmean(x, 'i')",
    "a loop": "for _ in range(LR):\n    x = lax.pmean(x, 'i')\nreturn x",
    "a comprehension": "return [lax.pmean(e, 'i') for e in x if SYNC]",
    "a function with one": "return chosen(x)",
    "a gradient of one": "return jax.grad(chosen)(x)",
    "a branch with one": "return lax.cond(x.sum() > 0, jnp.sin, chosen, x)",
    "branches with one": "return lax.switch(0, [jnp.sin, chosen], x)",
    "branches that are not seen": "return lax.switch(0, BRANCHES, x)",
    "the name of an axis by a setting": "return lax.pmean(x, NAME)",
    "the name of an axis as an argument": "return lax.pmean(x, axis_name=w)",
    "groups by a setting": "return lax.psum(x, 'i', axis_index_groups=GROUPS)",
    "a function of another file": "return total(x)",
    "a module": "return Model(AXIS)(x)",
    "a method of a module": "return w.apply_fn(x)",
    "an optimizer": "return OPTIMIZER.update(w, x)",
    "a function of a table": "return USED['mse'](x)",
    "a function that is given": "return w(x)",
    "a gradient of what is given": "return jax.grad(w)(x)",
    "a gradient by keyword": "return jax.grad(fun=chosen)(x)",
    "a decorator": "@total\ndef inner(e):\n    return e\nreturn inner(x)",
    "several axes, one by a setting": "return lax.psum(x, ('i', NAME))",
    "a gradient with a name, of one": "g = jax.grad(chosen)\nreturn g(w, x)",
    "a gradient that is made above, of one": "return GRADIENT(x)",
    "a record with a method": "return Shape(x)",
    "a record or something else": "return Either(x)",
    "a function by another name": "other = USED['mse']\nreturn jax.grad(other)(x)",
    "a hidden builtin": "len = w\nreturn len(x)",
    "an unknown builtin": "return eval('x')",
    "a try": "try:\n    return lax.pmean(x, 'i')\nexcept NameError:\n    return x",
}


# The arguments that are functions, of what takes them.
_TAKEN = {
    **dict.fromkeys(
        ("grad", "value_and_grad", "vmap", "jit", "checkpoint", "remat", "jvp", "vjp", "linearize")
        + ("jacfwd", "jacrev", "hessian", "eval_shape", "custom_jvp", "custom_vjp")
        + ("closure_convert", "lax.scan", "lax.map", "lax.associative_scan", "tree.map")
        + ("tree.reduce", "lax.reduce"),
        (0,),
    ),
    **{"lax.cond": (1, 2), "lax.switch": (1,), "lax.while_loop": (0, 1), "lax.fori_loop": (2,)},
}


@pytest.mark.parametrize("name", _TAKEN)
def test_what_takes_functions(name):
    most = max(_TAKEN[name])
    good = ["squared" if n in _TAKEN[name] else "x" for n in range(most + 1)]
    assert not _may_differ(f"return jax.{name}({', '.join(good)})")
    for n in _TAKEN[name]:
        bad = [*good[:n], "chosen", *good[n + 1 :]]
        assert _may_differ(f"return jax.{name}({', '.join(bad)})")
        assert _may_differ(f"return jax.{name}({', '.join(good[:n])})")


@pytest.mark.parametrize("name", sorted(fixed_programs._METHODS))
def test_methods_of_arrays_and_trees(name):
    assert not _may_differ(f"return x.{name}()")
    assert _may_differ(f"{name} = w\nreturn {name}(x)")


@pytest.mark.parametrize("name", sorted(fixed_programs._BUILTINS))
def test_builtins(name):
    assert not _may_differ(f"return {name}(x)")


@pytest.mark.parametrize(
    ("given", "differs"),
    [
        ("functools.partial(squared, x=1)", False),
        ("functools.partial(chosen)", True),
        ("jax.jit(squared)", False),
        ("jax.jit(chosen)", True),
        ("total(squared)", True),
        ("jax.tree.leaves(squared)", True),
        ("lambda x: x", False),
        ("lambda x: x if SYNC else 1", True),
        ("jnp.sin", False),
        ("total", True),
        ("unknown", True),
    ],
)
def test_what_is_mapped(given, differs):
    text = f"{_ABOVE}mapped = jax.pmap({given}, 'i')\n"
    module = semantic_model.Module(sources.read("train.py", text.encode()))
    assigned = module.tree.body[-1]
    assert isinstance(assigned, ast.Assign)
    assert isinstance(assigned.value, ast.Call)
    assert fixed_programs.may_differ(module, assigned.value.args[0]) == differs


def _may_differ(body: str) -> bool:
    step = f"def step(w, x):\n{textwrap.indent(body, '    ')}\n"
    text = f"{_ABOVE}{step}\n\nmapped = jax.pmap(step, 'i')\n"
    module = semantic_model.Module(sources.read("train.py", text.encode()))
    (step,) = (n for n in ast.walk(module.tree) if isinstance(n, ast.Name) and n.id == "step")
    return fixed_programs.may_differ(module, step)


@pytest.mark.parametrize("name", _FIXED)
def test_a_program_of_each_run(name):
    assert not _may_differ(_FIXED[name])


@pytest.mark.parametrize("name", _OTHERS)
def test_what_may_be_another_program(name):
    assert _may_differ(_OTHERS[name])


def test_what_is_not_a_function_of_the_file():
    module = semantic_model.Module(sources.read("train.py", b"import jax\n"))
    assert fixed_programs.may_differ(module, None)
