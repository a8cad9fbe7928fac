"""Which functions trace the same collectives in each run, by their text."""

import ast
import textwrap

import pytest

from jax_dist.checker.model import semantic_model, sources
from jax_dist.codemod import fixed_programs

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


class Model(nn.Module):
    axis: str

    def __call__(self, x):
        return x


def squared(w, x):
    return jnp.mean((x @ w) ** 2)


def chosen(x):
    return lax.pmean(x, "i") if SYNC else x


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
    "updates of a tree": "return optax.apply_updates(w, jax.tree.map(lambda e: -LR * e, w))",
}
_OTHERS = {
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
    "a hidden builtin": "len = w\nreturn len(x)",
    "an unknown builtin": "return eval('x')",
    "a try": "try:\n    return lax.pmean(x, 'i')\nexcept NameError:\n    return x",
}


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
