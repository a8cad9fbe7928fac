"""Cases of JXD204."""

from rule_cases import Case, Negative, Positive

CASES: tuple[Case, ...] = (
    Negative(
        "devices that are put into a mesh",
        "import jax\nimport numpy as np\nn = jax.local_device_count()\n"
        "grid = np.asarray(jax.devices()).reshape(n, 1)\n",
    ),
    Negative(
        "a batch cut by something else",
        "import jax\nf = jax.pmap(g)\ny = x.reshape((num_envs, -1))\n",
    ),
    Negative(
        "a size that only carries the name, in a file without pmap",
        "import jax\nn = jax.local_device_count()\ndef cut(x, num_devices):\n"
        "    return x.reshape((num_devices, -1))\n",
    ),
    Negative(
        "another library's replicate",
        "import jax\nfrom mesh import jax_utils\ns = jax_utils.replicate(s)\n",
    ),
    Negative(
        "the file's own replicate",
        "from flax import jax_utils\ndef replicate(x): return x\ns = replicate(s)\n",
    ),
    Positive(
        "a batch, cut by name",
        "import jax\nn = jax.local_device_count()\nb = b.reshape((n, -1) + b.shape[1:])\n",
        (3,),
    ),
    Positive(
        "each array of a batch",
        "import jax\nn = len(jax.local_devices())\nf = jax.pmap(g)\n"
        "b = jax.tree.map(lambda x: x.reshape(n, -1, *x.shape[1:]), b)\n",
        (4,),
    ),
    Positive(
        "copies",
        "import jax\nimport jax.numpy as jnp\nf = jax.pmap(g)\nn = jax.local_device_count()\n"
        "a = jnp.stack([x] * n)\nb = jnp.broadcast_to(x, (n,) + x.shape)\n"
        "c = jnp.stack([x for _ in range(n)])\n",
        (5, 6, 7),
    ),
    Positive(
        "a number that a parameter's name tells, beside pmap",
        "import jax\ndef cut(x, num_devices):\n    return x.reshape((num_devices, -1))\n"
        "f = jax.pmap(g)\n",
        (3,),
    ),
    Positive(
        "flax's helpers",
        "import flax.jax_utils\nfrom flax.training import common_utils\n"
        "it = flax.jax_utils.prefetch_to_device(map(common_utils.shard, it), 2)\n",
        (3, 3),
    ),
    Positive(
        "a state that flax replicates",
        "from flax import jax_utils\ns = jax_utils.replicate(s)\n",
        (2,),
    ),
    Positive("the same by its whole path", "import flax\ns = flax.jax_utils.replicate(s)\n", (2,)),
    Positive("the function itself", "from flax.jax_utils import replicate as r\ns = r(s)\n", (2,)),
    Positive("a value", "from flax import jax_utils\nss = map(jax_utils.replicate, ss)\n", (2,)),
)
