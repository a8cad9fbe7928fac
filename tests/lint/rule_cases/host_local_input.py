"""Cases of JXD206."""

from rule_cases import Case, Negative, Positive

CASES: tuple[Case, ...] = (
    Negative(
        "only for logging",
        "import jax\nf = jax.pmap(g)\nif jax.process_index() == 0:\n    print(f(x))\n",
    ),
    Negative(
        "another function's argument",
        "import jax\nf = jax.pmap(g)\nk = seed(jax.process_index())\nh(k)\n",
    ),
    Positive(
        "a slice of the data, by name",
        "import jax\nf = jax.pmap(g)\nn = jax.process_count()\n"
        "mine = data[jax.process_index() :: n]\ny = f(mine)\n",
        (3, 4),
    ),
    Positive(
        "a key of this process",
        "import jax\nk = jax.random.fold_in(key, jax.process_index())\n"
        "y = jax.pmap(g)(jax.random.split(k, 8))\n",
        (2,),
    ),
)
