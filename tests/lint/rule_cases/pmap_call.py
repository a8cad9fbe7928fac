"""Cases of JXD001."""

from rule_cases import Case, Negative, Positive

CASES: tuple[Case, ...] = (
    Negative("another library's pmap", "import jax\nfrom pool import pmap\npmap(f, xs)\n"),
    Negative(
        "a module that is called pmap", "import jax\nfrom brax.training import pmap\npmap.sync()\n"
    ),
    Negative("only a word in a string", "import jax\nhelp = 'jax.pmap is old'\n"),
    Positive("a call", "import jax\nf = jax.pmap(g)\n", (2,)),
    Positive("another name of the function", "from jax import pmap as p\nf = p(g)\n", (2,)),
    Positive(
        "a decorator by partial",
        "import functools, jax\n@functools.partial(jax.pmap, axis_name='i')\ndef f(x): return x\n",
        (2,),
    ),
    Positive("an alias and its use", "import jax\np = jax.pmap\nf = p(g)\n", (2, 3)),
    Positive(
        "an alias by partial, and its use",
        "import functools, jax\np = functools.partial(jax.pmap, axis_name='i')\nf = p(g)\n",
        (2, 3),
    ),
    Positive("a value", "import jax\nmap_fn = {'p': jax.pmap}\n", (2,)),
    Positive(
        "those of other libraries",
        "import jax, equinox as eqx\nfrom flax import nnx\nf = eqx.filter_pmap(g)\n"
        "h = nnx.pmap(g)\n",
        (3, 4),
    ),
)
