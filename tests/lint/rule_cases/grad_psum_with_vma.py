"""Cases of JXD303."""

from rule_cases import Case, Negative, Positive

_TOP = (
    "import jax\nimport jax.numpy as jnp\nfrom jax.sharding import PartitionSpec as P\n"
    "def loss(w, x):\n    return jnp.mean((x @ w) ** 2)\n"
)
_STEP = "def step(w, x):\n    return jax.lax.pmean(jax.grad(loss)(w, x), 'i')\n"

CASES: tuple[Case, ...] = (
    Negative(
        "check_vma is off",
        _TOP + _STEP + "f = jax.shard_map(step, mesh=m, in_specs=(P(), P('i')), out_specs=P(), "
        "check_vma=False)\n",
    ),
    Negative(
        "the gradient is by something that each device has its own of",
        _TOP + _STEP + "f = jax.shard_map(step, mesh=m, in_specs=P('i'), out_specs=P())\n",
    ),
    Negative("the same under pmap", _TOP + _STEP + "f = jax.pmap(step, 'i')  # no shard_map\n"),
    Negative(
        "marked as different on each device first",
        _TOP + "def step(w, x):\n    w = jax.lax.pcast(w, 'i', to='varying')\n"
        "    return jax.lax.pmean(jax.grad(loss)(w, x), 'i')\n"
        "f = jax.shard_map(step, mesh=m, in_specs=(P(), P('i')), out_specs=P())\n",
    ),
    Negative(
        "the loss is a mean over devices itself",
        "import jax\nfrom jax import P\ndef loss(w, x):\n    return jax.lax.pmean(x @ w, 'i')\n"
        + _STEP
        + "f = jax.shard_map(step, mesh=m, in_specs=(P(), P('i')), out_specs=P())\n",
    ),
    Positive(
        "summed around the gradient",
        _TOP + _STEP + "f = jax.shard_map(step, mesh=m, in_specs=(P(), P('i')), out_specs=P())\n",
        (7,),
    ),
    Positive(
        "by name, with the value, each leaf",
        _TOP + "import functools\n"
        "@functools.partial(jax.shard_map, mesh=m, in_specs=(P(), P('i')), out_specs=P())\n"
        "def step(w, x):\n    value, grads = jax.value_and_grad(loss)(w, x)\n"
        "    grads = jax.tree.map(lambda g: jax.lax.psum(g, 'i'), grads)\n"
        "    return grads\n",
        (10,),
    ),
)
