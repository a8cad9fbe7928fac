"""Cases of JXD108."""

from rule_cases import Case, Fixed, Negative, Positive

CASES: tuple[Case, ...] = (
    Negative("the function where it has always been", "import jax\njax.tree_util.tree_map(f, x)\n"),
    Negative(
        "another library's tree_map", "from tree import tree_map\nimport jax\ntree_map(f, x)\n"
    ),
    Negative("a parameter hides jax", "import jax\ndef f(jax):\n    return jax.tree_map(g, x)\n"),
    Negative(
        "ready for the name to be missing",
        "import jax\ntry:\n    tree_map = jax.tree_map\nexcept AttributeError:\n"
        "    tree_map = jax.tree.map\n",
    ),
    Negative("put there by the file", "import jax\njax.tree_map = f\njax.tree_map(g, x)\n"),
    Negative("NumPy's own", "import jax\nimport numpy as np\nnp.clip(x, a_min=0)\n"),
    Negative(
        "a class of one's own", "import jax\nfrom mine import PmapSharding\nPmapSharding(x)\n"
    ),
    Negative("an option spoken of", "import jax\nhelp = 'jax_pmap_shmap_merge is gone'\n"),
    Negative(
        "ready for an option to be missing",
        "import jax\nif hasattr(jax.config, 'jax_pmap_shmap_merge'):\n"
        "    jax.config.update('jax_pmap_shmap_merge', True)\n",
    ),
    Positive(
        "an option", "from jax import config as c\nc.update('jax_pmap_shmap_merge', True)\n", (2,)
    ),
    Positive(
        "a class that is imported, and not again its uses",
        "from jax.sharding import Mesh, PositionalSharding\ns = PositionalSharding(devices)\n",
        (1,),
    ),
    Positive("without a successor", "import jax\ny = jax.lax.pvary(x, 'i')\n", (2,)),
    Positive(
        "an array type in an isinstance: jax.Array is wider",
        "import jax\nfrom jax.random import KeyArray\n"
        "a = isinstance(k, KeyArray), isinstance(x, (int, jax.numpy.DeviceArray))\n",
        (2, 3),
    ),
    Positive("a module of flax, without jax", "from flax import optim\noptim.Adam(1e-3)\n", (1,)),
    Positive("indexed updates", "import jax\ny = jax.ops.index_update(x, i, 1)\n", (2,)),
    Positive(
        "the buffers of an array", "import jax\nb = x.device_buffer, x.device_buffers\n", (2, 2)
    ),
    Positive(
        "a comment behind a name",
        "from jax import (\n    tree_map,  # the old one\n    jit,\n)\n",
        (2,),
    ),
    Fixed(
        "tree_map and tree_leaves",
        "import jax\nn = jax.tree_leaves(jax.tree_map(f, x))  # leaves\n",
        "import jax\nn = jax.tree.leaves(jax.tree.map(f, x))  # leaves\n",
    ),
    Fixed(
        "an imported function is imported from elsewhere",
        "from jax import tree_map\ny = tree_map(f, x)\n",
        "from jax.tree_util import tree_map\ny = tree_map(f, x)\n",
    ),
    Fixed(
        "the last of several, in parentheses",
        "from jax import (\n    jit,\n    tree_map as tm,\n)\n",
        "from jax.tree_util import tree_map as tm\nfrom jax import (\n    jit,\n)\n",
    ),
    Fixed(
        "two of one statement, to two modules, in a function",
        "def f():\n    from jax import tree_map, host_id, jit\n",
        "def f():\n    from jax.tree_util import tree_map\n    from jax import process_index as "
        "host_id, jit\n",
    ),
    Fixed(
        "a type in an annotation",
        "import jax.numpy as jnp\ndef f(x: jnp.DeviceArray | None): ...\n",
        "import jax.numpy as jnp\nimport jax\ndef f(x: jax.Array | None): ...\n",
    ),
    Fixed(
        "a module that the new name needs",
        "from jax import core\nadd_p = core.Primitive('add')\n",
        "from jax import core\nimport jax\nimport jax.extend.core\n"
        "add_p = jax.extend.core.Primitive('add')\n",
    ),
    Fixed(
        "the old home of config",
        "from jax.config import config\nconfig.update('jax_enable_x64', True)\n",
        "from jax import config\nconfig.update('jax_enable_x64', True)\n",
    ),
    Fixed(
        "a module that moved",
        "from jax.experimental import stax\nfrom jax.experimental.optimizers import adam\n",
        "from jax.example_libraries import stax\n"
        "from jax.example_libraries.optimizers import adam\n",
    ),
    Fixed(
        "jax.api was jax",
        "from jax.api import jit\nimport jax\nf = jax.api.vmap(g)\n",
        "from jax import jit\nimport jax\nf = jax.vmap(g)\n",
    ),
    Fixed(
        "the bounds of clip",
        "import jax.numpy as jnp\ny = jnp.clip(x, a_min=-1, a_max=top[0]), jnp.clip(x, a_max=0)\n",
        "import jax.numpy as jnp\ny = jnp.clip(x, min=-1, max=top[0]), jnp.clip(x, max=0)\n",
    ),
    Fixed(
        "normalize is standardize",
        "from jax.nn import normalize\nimport jax\ny = normalize(x, axis=0), jax.nn.normalize(x)\n",
        "from jax.nn import standardize as normalize\nimport jax\n"
        "y = normalize(x, axis=0), jax.nn.standardize(x)\n",
    ),
)
