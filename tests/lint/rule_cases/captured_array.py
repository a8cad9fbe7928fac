"""Cases of JXD401."""

from rule_cases import Case, Negative, Positive

CASES: tuple[Case, ...] = (
    Negative(
        "jax_dist.pmap makes an argument of it",
        "import jax_dist\nimport jax.numpy as jnp\nw = jnp.zeros(1000)\n"
        "f = jax_dist.pmap(lambda x: x * w)\n",
    ),
    Negative(
        "a few numbers, written out",
        "import jax\nimport jax.numpy as jnp\nw = jnp.array([0.1, -0.2])\nz = jnp.zeros((8, 3))\n"
        "f = jax.pmap(lambda x: x * w + z)\n",
    ),
    Negative(
        "a few numbers in a shape, put on devices",
        "import jax\nimport numpy as np\nw = jax.device_put(np.arange(4).reshape(4, 1), s)\n"
        "f = jax.pmap(lambda x: x * w)\n",
    ),
    Negative(
        "passed as an argument",
        "import jax\nimport jax.numpy as jnp\nw = jnp.load('w')\n"
        "f = jax.pmap(lambda x, w: x @ w)\n",
    ),
    Negative(
        "made inside",
        "import jax\nimport jax.numpy as jnp\n@jax.pmap\ndef f(x):\n"
        "    w = jnp.ones(x.shape)\n    return jax.vmap(lambda y: y * w)(x)\n",
    ),
    Negative(
        "a function that is not traced",
        "import jax\nimport jax.numpy as jnp\nw = jnp.load('w')\ndef show(): print(w)\n"
        "f = jax.pmap(g)\n",
    ),
    Negative(
        "a name with several values",
        "import jax\nimport jax.numpy as jnp\nw = jnp.load('w')\nw = 1\n"
        "f = jax.pmap(lambda x: w)\n",
    ),
    Negative(
        "a file that only uses jit",
        "import jax\nimport jax.numpy as jnp\nw = jnp.load('w')\nf = jax.jit(lambda x: x @ w)\n",
    ),
    Negative(
        "a helper that makes its own, and one that is called elsewhere",
        "import jax\nimport jax.numpy as jnp\nw = jnp.load('w')\ndef make(n):\n"
        "    v = jnp.ones((n, n))\n    return v\ndef show(): print(w)\n"
        "f = jax.pmap(lambda x: x @ make(4))\nshow()\n",
    ),
    Positive(
        "through two helpers of the module, which call each other",
        "import jax\nimport jax.numpy as jnp\nw = jnp.load('w')\n"
        "def one(x): return other(x) @ w\ndef other(x): return one(x)\n"
        "f = jax.pmap(lambda x: other(x))\n",
        (4,),
    ),
    Positive(
        "through a method",
        "import jax\nclass A:\n    def __init__(self, key):\n"
        "        self.w = jax.random.normal(key, (512, 512))\n"
        "        self.step = jax.pmap(self._step)\n"
        "    def _step(self, x):\n        return self._apply(x)\n"
        "    def _apply(self, x):\n        return x @ self.w\n",
        (9,),
    ),
    Positive(
        "a name of the module",
        "import jax\nimport jax.numpy as jnp\nw = jnp.load('w')\nf = jax.pmap(lambda x: x @ w)\n",
        (4,),
    ),
    Positive(
        "an attribute of self",
        "import jax\nclass A:\n    def __init__(self, key):\n"
        "        self.w = jax.random.normal(key, (512, 512))\n"
        "        self.step = jax.pmap(self._step)\n"
        "    def _step(self, x):\n        return x @ self.w\n",
        (7,),
    ),
    Positive(
        "jit, beside shard_map",
        "import jax\nfrom jax import shard_map\nimport jax.numpy as jnp\nw = jnp.arange(5000)\n"
        "@jax.jit\ndef f(x):\n    return x * w\n",
        (7,),
    ),
)
