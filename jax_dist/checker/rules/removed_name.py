"""JXD108: names that left jax, or moved."""

import re
from collections.abc import Iterator

from jax_dist.checker import renames, renaming, sketches
from jax_dist.checker.modules import Module
from jax_dist.checker.page import Page
from jax_dist.checker.registry import Case, Flag, Found, Keep, Mend, rule

PAGE = Page(
    code="JXD108",
    name="removed-name",
    what="Finds imports and uses of names and modules that jax has removed or renamed: "
    "`jax.tree_map` and its family, `jax.host_id`, `jax.lib.xla_bridge`, "
    "`jax.experimental.host_callback`, `jax.core.Primitive`, `jax.random.KeyArray` and "
    "others.",
    why="The program fails with an AttributeError or an ImportError. Of the names in the table, "
    "jax 0.12.0.1 still has only `host_id`, `host_count`, `host_ids` and `thread_resources`, "
    "with a warning.",
    example="import jax\n\ny = jax.tree_map(lambda x: 2 * x, {'w': 1.0})\n",
    instead="import jax\n\ny = jax.tree.map(lambda x: 2 * x, {'w': 1.0})\n",
    fix="Safe if the name has a successor with the same meaning. Unsafe for array types outside "
    "annotations, since `isinstance(x, jax.Array)` is true of more than before, and for "
    "`use_mesh` outside a `with`, since `jax.set_mesh` then sets the mesh permanently. "
    "Display-only for `jax.ops.index_update` and similar functions, and for the buffers of "
    "arrays. None for the others: the message names the replacement.",
    since="Any jax; the message names the version that removed it.",
    source="https://docs.jax.dev/en/latest/changelog.html",
)

# One a line. Not "jax.core" itself, nor other words that many files hold: what a rule wants is
# parsed.
_WORDS = b"""
jax.tree_map
jax.tree_leaves
jax.tree_flatten
jax.tree_unflatten
jax.tree_structure
jax.tree_transpose
jax.tree_reduce
jax.tree_all
jax.treedef_is_leaf
jax import tree_map
jax import tree_leaves
jax import tree_flatten
jax import tree_unflatten
jax import tree_structure
, tree_map
tree_multimap
host_id(
host_ids
host_count
import host_id
jax.host_id
jax.partial
jax import partial
lax.partial
lax import partial
*DeviceArray
*KeyArray
.device_buffer*
experimental.PartitionSpec
experimental import PartitionSpec
experimental.pjit
experimental.maps
experimental import maps
experimental.optimizers
experimental import optimizers
experimental.stax
experimental import stax
experimental.export
experimental import export
experimental.enable_x64
experimental import enable_x64
experimental.disable_x64
experimental import disable_x64
experimental.host_callback
experimental import host_callback
interpreters.xla
interpreters.pxla
interpreters import
sharded_jit
use_mesh
jax.config import
import jax.config
jax.linear_util
jax import linear_util
jax.core import
jax import core
abstract_arrays
jax.lib.xla*
jax.lib import
jax import lib
jnp.product
jnp.cumproduct
jnp.sometrue
jnp.alltrue
jnp.row_stack
jnp.in1d
jnp.round_
jnp.trapz
ops.index*
jax.ops import
xla_computation
clear_backends
soft_pmap
tie_in
global_device_array
jax.api
jax.util
import jax as
, jax as
"""
_CORE = tuple(entry.old.encode() for entry in renames.NAMES if entry.old.startswith("jax.core."))
_NARROW = {
    b"*DeviceArray": re.compile(rb"(?:\.|Sharded)DeviceArray|(?<!\w)DeviceArray(?!\()"),  # no repr
    b"*KeyArray": re.compile(rb"(?<!\w)KeyArray|(?:[.,(]\s*|import[\s\\]+|\n[ \t]+)PRNGKeyArray"),
    b"interpreters import": re.compile(
        rb"interpreters import(?<!_src.interpreters import)"
        rb"\s*(?:\([^)]*?|(?:[^\n\\(]|\\\n)*?)\bp?xla\b"
    ),
}
_TRIGGERS = (*_WORDS.strip().split(b"\n"), b"\n    tree_map", *_CORE)


@rule(PAGE, triggers=_TRIGGERS, narrow=_NARROW)
def check(module: Module) -> Iterator[Found]:
    for found in renaming.renamed(module, renames.NAMES):
        yield sketches.sketched(module, found)
    yield from sketches.buffers(module)


CASES: tuple[Case, ...] = (
    Keep("the function where it has always been", "import jax\njax.tree_util.tree_map(f, x)\n"),
    Keep("another library's tree_map", "from tree import tree_map\nimport jax\ntree_map(f, x)\n"),
    Keep("a parameter hides jax", "import jax\ndef f(jax):\n    return jax.tree_map(g, x)\n"),
    Keep(
        "ready for the name to be missing",
        "import jax\ntry:\n    tree_map = jax.tree_map\nexcept AttributeError:\n"
        "    tree_map = jax.tree.map\n",
    ),
    Keep(
        "asked for before",
        "import jax\nf = jax.tree_map if hasattr(jax, 'tree_map') else jax.tree.map\n",
    ),
    Keep("jax.core has this still", "import jax\nisinstance(x, jax.core.Tracer)\n"),
    Flag(
        "a module without a successor", "from jax.experimental import host_callback as hcb\n", (1,)
    ),
    Flag("a name of such a module", "from jax.experimental.host_callback import call\n", (1,)),
    Flag(
        "spelled out to its end",
        "import jax.experimental.maps\njax.experimental.maps.xmap(f)\n",
        (1, 2),
    ),
    Flag(
        "a module of which more is used",
        "from jax.lib import xla_bridge\nxla_bridge.other()\n",
        (1,),
    ),
    Flag("indexed updates", "import jax\ny = jax.ops.index_update(x, i, 1)\n", (2,)),
    Flag("the buffers of an array", "import jax\nb = x.device_buffer, x.device_buffers\n", (2, 2)),
    Flag(
        "a comment in the list of imports",
        "from jax import (\n    # the old one\n    tree_map,\n)\n",
        (3,),
    ),
    Flag(
        "a comment behind a name",
        "from jax import (\n    tree_map,  # the old one\n    jit,\n)\n",
        (2,),
    ),
    Flag("no namesake", "import jax\nc = jax.xla_computation(f, (1,), axes)(x)\n", (2,)),
    Mend(
        "tree_map and tree_leaves",
        "import jax\nn = jax.tree_leaves(jax.tree_map(f, x))  # leaves\n",
        "import jax\nn = jax.tree.leaves(jax.tree.map(f, x))  # leaves\n",
    ),
    Mend(
        "an imported function is imported from elsewhere",
        "from jax import tree_map\ny = tree_map(f, x)\n",
        "from jax.tree_util import tree_map\ny = tree_map(f, x)\n",
    ),
    Mend(
        "one of several imports",
        "from jax import jit, tree_map, vmap\ny = tree_map(f, x)\n",
        "from jax.tree_util import tree_map\nfrom jax import jit, vmap\ny = tree_map(f, x)\n",
    ),
    Mend(
        "the last of several, in parentheses",
        "from jax import (\n    jit,\n    tree_map as tm,\n)\n",
        "from jax.tree_util import tree_map as tm\nfrom jax import (\n    jit,\n)\n",
    ),
    Mend(
        "two of one statement, to two modules, in a function",
        "def f():\n    from jax import tree_map, host_id, jit\n",
        "def f():\n    from jax.tree_util import tree_map\n    from jax import process_index as "
        "host_id\n    from jax import jit\n",
    ),
    Mend(
        "hosts are processes",
        "import jax\nme = jax.host_id() == jax.host_count() - 1\n",
        "import jax\nme = jax.process_index() == jax.process_count() - 1\n",
    ),
    Mend(
        "partial needs its own import",
        "import jax\n\n@jax.partial(jax.jit, static_argnums=0)\ndef f(n): return n\n",
        "import jax\nimport functools\n\n@functools.partial(jax.jit, static_argnums=0)\n"
        "def f(n): return n\n",
    ),
    Mend(
        "a type in an annotation",
        "import jax.numpy as jnp\ndef f(x: jnp.DeviceArray | None): ...\n",
        "import jax.numpy as jnp\nimport jax\ndef f(x: jax.Array | None): ...\n",
    ),
    Mend(
        "a module that the new name needs",
        "from jax import core\nadd_p = core.Primitive('add')\n",
        "from jax import core\nimport jax\nimport jax.extend.core\n"
        "add_p = jax.extend.core.Primitive('add')\n",
    ),
    Mend(
        "the last use of a module that is gone",
        "import jax\nfrom jax.lib import xla_bridge\n"
        "kind = xla_bridge.get_backend().platform, xla_bridge.device_count()\n",
        "import jax\nimport jax.extend.backend\n"
        "kind = jax.extend.backend.get_backend().platform, jax.device_count()\n",
    ),
    Mend(
        "the old home of config",
        "from jax.config import config\nconfig.update('jax_enable_x64', True)\n",
        "from jax import config\nconfig.update('jax_enable_x64', True)\n",
    ),
    Mend(
        "a mesh in its context",
        "import jax\nwith jax.sharding.use_mesh(mesh):\n    f(x)\n",
        "import jax\nwith jax.set_mesh(mesh):\n    f(x)\n",
    ),
    Mend(
        "a module that moved",
        "from jax.experimental import stax\nfrom jax.experimental.optimizers import adam\n",
        "from jax.example_libraries import stax\n"
        "from jax.example_libraries.optimizers import adam\n",
    ),
    Mend(
        "jax.api was jax",
        "from jax.api import jit\nimport jax\nf = jax.api.vmap(g)\n",
        "from jax import jit\nimport jax\nf = jax.vmap(g)\n",
    ),
)
