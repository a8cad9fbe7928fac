"""Cases of JXD205."""

from rule_cases import Case, Negative, Positive

_TOP = "import jax\nimport jax.numpy as jnp\nf = jax.pmap(g)\n"

CASES: tuple[Case, ...] = (
    Negative("what never was mapped", _TOP + "n = jnp.mean(x)\n"),
    Negative("already on the host", _TOP + "n = jnp.mean(jax.device_get(f(x)))\n"),
    Negative(
        "inside the mapped function",
        "import jax\nimport jax.numpy as jnp\n@jax.pmap\ndef f(x):\n    return jnp.mean(x)\n",
    ),
    Negative("in a lambda that grad traces", _TOP + "d = jax.grad(lambda x: jnp.sum(f(x)))(x)\n"),
    Positive("the result itself", _TOP + "n = jnp.mean(f(x))\n", (4,)),
    Positive("a part of it, by name", _TOP + "s, m = f(x)\nn = jnp.sum(m['loss'], axis=0)\n", (5,)),
)
