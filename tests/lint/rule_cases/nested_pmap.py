"""Cases of JXD003."""

from rule_cases import Case, Negative, Positive

CASES: tuple[Case, ...] = (
    Negative("one after the other", "import jax\ny = jax.pmap(f)(jax.pmap(g)(x))\n"),
    Negative("vmap inside", "import jax\nf = jax.pmap(jax.vmap(g))\n"),
    Negative(
        "made inside, but called outside",
        "import jax\ndef make():\n    return jax.pmap(g)\nf = jax.pmap(h)\n",
    ),
    Negative(
        "ours nests", "import jax_dist, jax\nf = jax_dist.pmap(jax_dist.pmap(g))\njax.pmap(h)\n"
    ),
    Positive("directly", "import jax\nf = jax.pmap(jax.pmap(g))\n", (2,)),
    Positive("by name", "import jax\nf = jax.pmap(g)\nh = jax.pmap(f)\n", (2,)),
    Positive("as decorators", "import jax\n@jax.pmap\n@jax.pmap\ndef f(x): return x\n", (3,)),
    Positive(
        "called in a mapped function",
        "import jax\ninner = jax.pmap(g)\ndef f(x):\n    return inner(x)\nh = jax.pmap(f)\n",
        (4,),
    ),
    Positive(
        "made and called in a mapped function",
        "import jax\n@jax.pmap\ndef f(x):\n    return jax.pmap(g)(x)\n",
        (4,),
    ),
)
