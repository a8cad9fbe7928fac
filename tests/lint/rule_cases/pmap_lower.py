"""Cases of JXD004."""

from rule_cases import Case, Negative, Positive

CASES: tuple[Case, ...] = (
    Negative("of a jit", "import jax\nf = jax.pmap(g)\nt = jax.jit(g).lower(x)\n"),
    Negative("of a string", "import jax\nf = jax.pmap(g)\nname = 'A'.lower()\n"),
    Negative("of the function itself", "import jax\nf = jax.pmap(g)\nt = g.trace(x)\n"),
    Negative("of its name", "import jax\nf = jax.pmap(g)\nn = f.__name__.lower()\n"),
    Negative("of a result", "import jax\nf = jax.pmap(g)\nt = f(x).lower()\n"),
    Positive("at once", "import jax\nt = jax.pmap(g).lower(x)\n", (2,)),
    Positive("by name", "import jax\nf = jax.pmap(g)\nt = f.lower(x).compile()\n", (3,)),
    Positive("of a decorated one", "import jax\n@jax.pmap\ndef f(x): ...\nt = f.trace(x)\n", (4,)),
    Positive(
        "of an attribute",
        "import jax\nclass A:\n    def __init__(self):\n        self.f = jax.pmap(g)\n"
        "    def text(self, x):\n        return self.f.lower(x).as_text()\n",
        (6,),
    ),
)
