"""Cases of JXD002."""

from rule_cases import Case, Fixed, Negative, Positive

CASES: tuple[Case, ...] = (
    Negative("a jit inside", "import jax\nf = jax.pmap(jax.jit(g))\n"),
    Negative(
        "an operand is not traced",
        "import jax\ny = jax.lax.cond(p, f, g, jax.pmap(h))\n",
    ),
    Negative("one beside the other", "import jax\nf = jax.pmap(g)\nh = jax.jit(g)\n"),
    Negative(
        "an argument that is not traced",
        "import jax\ny = jax.lax.scan(f, jax.pmap(g)(x), None, 3)\n",
    ),
    Positive(
        "called in a jitted function",
        "import jax\nf = jax.pmap(g)\n@jax.jit\ndef h(x):\n    return f(x)\n",
        (5,),
    ),
    Positive(
        "called in the body of a loop",
        "import jax\nf = jax.pmap(g)\ndef body(c, x):\n    return f(c), x\n"
        "y = jax.lax.scan(body, c, xs)\n",
        (4,),
    ),
    Positive("by name", "import jax\nf = jax.pmap(g)\nh = jax.jit(f, donate_argnums=0)\n", (3,)),
    Positive("a gradient", "import jax\nd = jax.grad(lambda w: jax.pmap(f)(w).sum())(w)\n", (2,)),
    Positive(
        "a method",
        "import jax\nclass A:\n    def __init__(self):\n        self.f = jax.pmap(g)\n"
        "        self.h = jax.jit(self.step)\n    def step(self, x):\n        return self.f(x)\n",
        (7,),
    ),
    Fixed(
        "right around",
        "import jax\n\n\ndef result():\n"
        "    f = jax.jit(\n        jax.pmap(lambda x: jax.lax.psum(x, 'i'), axis_name='i'),\n"
        "    )\n"
        "    return f(jax.numpy.arange(8.0))\n",
        "import jax\n\n\ndef result():\n"
        "    f = jax.pmap(lambda x: jax.lax.psum(x, 'i'), axis_name='i')\n"
        "    return f(jax.numpy.arange(8.0))\n",
        runs=True,
    ),
    Fixed(
        "as decorators",
        "import jax\n\n@jax.jit\n@jax.pmap\ndef f(x):\n    return x\n",
        "import jax\n\n@jax.pmap\ndef f(x):\n    return x\n",
    ),
)
