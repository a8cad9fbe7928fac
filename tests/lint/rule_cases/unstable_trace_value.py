"""Cases of JXD403."""

from rule_cases import Case, Negative, Positive

CASES: tuple[Case, ...] = (
    Negative(
        "outside of what is traced",
        "import jax, time\nf = jax.pmap(lambda x: x)\nstart = time.time()\ny = f(x)\n",
    ),
    Negative(
        "JAX's own random numbers",
        "import jax\nf = jax.pmap(lambda k: jax.random.normal(k))\n",
    ),
    Negative(
        "a parameter that is called id",
        "import jax\nf = jax.pmap(lambda id, x: id(x))\n",
    ),
    Negative(
        "a file that only uses jit",
        "import jax, time\nf = jax.jit(lambda x: x + time.time())\n",
    ),
    Positive(
        "a random number in a lambda",
        "import jax\nimport numpy as np\nf = jax.pmap(lambda x: x + np.random.normal())\n",
        (3,),
    ),
    Positive(
        "a clock, a name, an address, in a function in a mapped one",
        "import jax\nfrom time import perf_counter\nimport os\ndef step(x):\n"
        "    def inner(y):\n        return y * perf_counter() + id(y) + hash(2)\n"
        "    with jax.named_scope(f'{os.getpid()}'):\n        return inner(x)\n"
        "f = jax.jit(jax.shard_map(step, mesh=m, in_specs=s, out_specs=s))\n",
        (6, 6, 6, 7),
    ),
)
