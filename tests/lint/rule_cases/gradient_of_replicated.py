"""Cases of JXD303."""

from rule_cases import Case, Negative, Positive

_TOP = """\
import functools
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
params = jnp.ones(3)
def loss(w, x):
    return jnp.mean((x @ w) ** 2)
"""
_LINE = _TOP.count("\n") + 1
_SPECS = "mesh=m, in_specs=(P(), P('i')), out_specs=P()"
_ONE = "mesh=m, in_specs=P('i'), out_specs=P('i')"
_STEP = "def step(w, x):\n    return jax.lax.pmean(jax.grad(loss)(w, x), 'i')\n"


def _silent(why: str, code: str) -> Negative:
    return Negative(why, _TOP + code)


def _found(why: str, code: str, line: int) -> Positive:
    """Return a case whose gradient is found in that line of the code, from 1."""
    return Positive(why, _TOP + code, (_LINE + line - 1,))


CASES: tuple[Case, ...] = (
    _silent("check_vma is off", f"{_STEP}f = jax.shard_map(step, {_SPECS}, check_vma=False)\n"),
    _silent("check_vma is not seen", f"{_STEP}f = jax.shard_map(step, {_SPECS}, check_vma=v)\n"),
    _silent("each device has its own", f"{_STEP}f = jax.shard_map(step, {_ONE})\n"),
    _silent("nothing is sharded", f"{_STEP}f = jax.shard_map(step, {_SPECS.replace('i', '')})\n"),
    _silent(
        "marked as different on each device first",
        "def step(w, x):\n    w = jax.lax.pcast(w, 'i', to='varying')\n"
        f"    return jax.grad(loss)(w, x)\nf = jax.shard_map(step, {_SPECS})\n",
    ),
    _silent(
        "the loss is a mean over devices itself",
        "def total(w, x):\n    return jax.lax.pmean(loss(w, x), 'i')\n"
        "def step(w, x):\n    return jax.grad(total)(w, x)\n"
        f"f = jax.shard_map(step, {_SPECS})\n",
    ),
    _silent(
        "outside of the shard_map",
        f"f = jax.shard_map(loss, {_SPECS})\ng = jax.grad(f)(params, x)\n",
    ),
    _silent(
        "by the sharded argument",
        "def step(w, x):\n    return jax.grad(loss, argnums=1)(w, x)\n"
        f"f = jax.shard_map(step, {_SPECS})\n",
    ),
    _silent(
        "of replicated values only",
        "def step(w, x):\n    return x * jax.grad(loss)(w, params)\n"
        f"f = jax.shard_map(step, {_SPECS})\n",
    ),
    _silent(
        "a loss of another file",
        "from mine import cost\ndef step(w, x):\n    return jax.grad(cost)(w, x)\n"
        f"f = jax.shard_map(step, {_SPECS})\n",
    ),
    _found(
        "a captured array, in a vmap",
        "def grad_fn(x):\n    return jax.grad(lambda p, y: jnp.dot(p, y))(params, x)\n"
        f"out = jax.jit(jax.shard_map(jax.vmap(grad_fn), {_ONE}))(jnp.ones((8, 3)))\n",
        2,
    ),
    _found(
        "a replicated argument",
        f"def step(w, x):\n    return jax.grad(loss)(w, x)\nf = jax.shard_map(step, {_SPECS})\n",
        2,
    ),
    _found("summed once more", f"{_STEP}f = jax.shard_map(step, {_SPECS})\n", 2),
    _found(
        "a decorator, with the value, each leaf",
        f"@functools.partial(jax.shard_map, {_SPECS})\n"
        "def step(w, x):\n    value, grads = jax.value_and_grad(loss)(w, x)\n"
        "    return jax.tree.map(lambda g: jax.lax.psum(g, 'i'), grads)\n",
        3,
    ),
    _found(
        "a jacobian",
        "def rows(w, x):\n    return x @ w\n"
        f"def step(w, x):\n    return jax.jacrev(rows)(w, x)\nf = jax.shard_map(step, {_SPECS})\n",
        4,
    ),
    _found(
        "in a nested function",
        "def make(w):\n    w = jnp.asarray(w)\n    def step(x):\n        def inner(y):\n"
        "            return jax.grad(loss)(w, y)\n        return inner(x)\n"
        f"    return jax.shard_map(step, {_ONE})\n",
        5,
    ),
    _found(
        "the gradient has a name",
        "def step(w, x):\n    g = jax.grad(loss)\n    return g(w, x)\n"
        f"f = jax.shard_map(step, {_SPECS})\n",
        2,
    ),
    _found(
        "the loss captures the batch",
        "def step(w, x):\n    def local(v):\n        return jnp.mean(x @ v)\n"
        f"    return jax.grad(local)(w)\nf = jax.shard_map(step, {_SPECS})\n",
        4,
    ),
)
