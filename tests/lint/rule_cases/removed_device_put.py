"""Cases of JXD101."""

from rule_cases import Case, Negative, Positive

CASES: tuple[Case, ...] = (
    Negative("ours", "import jax_dist\nx = jax_dist.device_put_sharded(x, devices)\n"),
    Negative(
        "ready for it to be missing",
        "import jax\nif hasattr(jax, 'device_put_replicated'):\n"
        "    put = jax.device_put_replicated\nelse:\n    put = mine\n",
    ),
    Positive("passed on", "import jax\nput = jax.device_put_replicated\nput(x, d)\n", (2,)),
    Positive("an attribute", "import jax\nx = jax.device_put_replicated(x, d)  # to all\n", (2,)),
    Positive(
        "the import, under another name",
        "from jax import device_put_sharded as put\nx = put(x, d)\n",
        (1,),
    ),
)
