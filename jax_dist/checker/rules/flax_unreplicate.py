"""JXD202: `flax.jax_utils.unreplicate`, and the same spelled out with `tree_map`."""

import ast
from collections.abc import Iterator

from jax_dist.checker import flow, origins, stacking
from jax_dist.checker.findings import Edit, Fix, Safety
from jax_dist.checker.modules import Module
from jax_dist.checker.page import Page
from jax_dist.checker.registry import Case, Flag, Found, Keep, Mend, rule
from jax_dist.checker.stacking import Kind

PAGE = Page(
    code="JXD202",
    name="flax-unreplicate",
    what="Finds `flax.jax_utils.unreplicate`, and `tree_map(lambda x: x[0], tree)` if the file "
    "shows that the arrays come from a mapped call or were replicated.",
    why="Indexing a sharded array is a computation over the whole mesh: 1.9 ms, against 26 us to "
    "read the first shard (f32[8,256,256], jax 0.10.2, 8 simulated devices). The result is on "
    "all devices, and with several processes it can fail.",
    example="saved = flax.jax_utils.unreplicate(state)\n",
    instead="saved = jax.tree.map(lambda x: x.addressable_shards[0].data.squeeze(0), state)\n",
    fix="Unsafe: the values are the same, but they are on the first device only, while `x[0]` "
    "puts them on all. Offered only if the file shows that every leaf is a jax.Array with one "
    "slice for each device.",
    since="jax 0.8.0: before, `x[0]` of a result of pmap was as cheap as reading the shard "
    "(66 us and 15 us on jax 0.7.2).",
    source="https://docs.jax.dev/en/latest/migrate_pmap.html; measured.",
)

_FIRST = "addressable_shards[0].data.squeeze(0)"


@rule(PAGE, triggers=(b"jax_utils", b"*pmap*"), since=(0, 8, 0))
def check(module: Module) -> Iterator[Found]:
    for node in module.uses(*stacking.UNREPLICATE):
        yield Found(
            node,
            "unreplicate takes `x[0]` of sharded arrays, which computes over the whole mesh",
            _fix_of_flax(module, node),
        )
    for node in module.uses(*stacking.TREE_MAPS):
        call = module.parent(node)
        if isinstance(call, ast.Call) and call.func is node:
            yield from _tree_map(module, call)


def _fix_of_flax(module: Module, function: ast.expr) -> Fix | None:
    call = module.parent(function)
    if not (isinstance(call, ast.Call) and call.func is function and len(call.args) == 1):
        return None
    if call.keywords or not _is_sliced(module, call.args[0]):
        return None
    name, imports = module.name_for("jax.tree.map", call)
    start = module.span(call.args[0])[0]
    edits = (
        Edit(*module.span(function), name),
        Edit(start, start, f"lambda x: x.{_FIRST}, "),
    )
    return Fix("read the first shard", Safety.UNSAFE, edits, imports)


def _tree_map(module: Module, call: ast.Call) -> Iterator[Found]:
    tree = stacking.first_of_leaves(module, call)
    if tree is None or not flow.of(module).is_stacked(tree):
        return
    if any(origin.on_host for origin in flow.of(module).origins(tree)):
        return
    message = "`x[0]` of sharded arrays computes over the whole mesh"
    yield Found(call, message, _fix_of_lambda(module, call.args[0], tree))


def _fix_of_lambda(module: Module, function: ast.expr, tree: ast.expr) -> Fix | None:
    body = function.body if isinstance(function, ast.Lambda) else None
    if not isinstance(body, ast.Subscript) or not _is_sliced(module, tree):
        return None
    edit = Edit(*module.span(body), f"{module.text(body.value)}.{_FIRST}")
    return Fix("read the first shard", Safety.UNSAFE, (edit,))


def _is_sliced(module: Module, tree: ast.expr) -> bool:
    """Whether every leaf is surely a jax.Array with one slice for each device."""
    for origin in flow.of(module).origins(tree):
        if origin.on_host or not origins.is_whole(module, origin):
            return False
        if origin.kind is Kind.MAPPED and origin.site is not None:
            if "out_axes" in origin.site.arguments or origin.site.unknown:
                return False
        elif origin.kind is not Kind.REPLICATED or not _by_flax(module, origin.node):
            return False
    return True


def _by_flax(module: Module, node: ast.expr) -> bool:
    if not (isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords):
        return False
    return module.qualified_name(node.func) in stacking.REPLICATE


CASES: tuple[Case, ...] = (
    Keep(
        "a trajectory whose first dimension is time",
        "import jax\nf = jax.pmap(g)\n"
        "def start(traj):\n    return jax.tree.map(lambda x: x[0], traj.hidden)\n",
    ),
    Keep(
        "a batch that has only lost its first example",
        "import jax\nf = jax.pmap(g)\nb = load()\none = jax.tree.map(lambda x: x[0], b)\n",
    ),
    Keep(
        "already on the host",
        "import jax\nf = jax.pmap(g)\n"
        "m = jax.device_get(f(x))\nm = jax.tree.map(lambda x: x[0], m)\n",
    ),
    Flag(
        "a state whose origin is in another file",
        "from flax import jax_utils\ndef save(state):\n    write(jax_utils.unreplicate(state))\n",
        (3,),
    ),
    Flag(
        "a function that other files may call with anything: no fix",
        "import jax\nf = jax.pmap(g)\n"
        "def first(tree):\n    return jax.tree.map(lambda x: x[0], tree)\ny = first(f(x))\n",
        (4,),
    ),
    Mend(
        "what was replicated, and went through a loop",
        "import jax\nfrom flax import jax_utils\nf = jax.pmap(g)\ns = jax_utils.replicate(s)\n"
        "for b in data:\n    s, m = f(s, b)\nlast = jax.tree.map(lambda x: x[0], s)\n",
        "import jax\nfrom flax import jax_utils\nf = jax.pmap(g)\ns = jax_utils.replicate(s)\n"
        "for b in data:\n    s, m = f(s, b)\n"
        "last = jax.tree.map(lambda x: x.addressable_shards[0].data.squeeze(0), s)\n",
    ),
    Mend(
        "a metric that is unpacked by the caller of a function",
        "import jax\nf = jax.pmap(g)\ndef step(s, b):\n    s, m = f(s, b)\n    return s, m\n"
        "s, m = step(s, b)\nm = jax.tree_util.tree_map(lambda x: x[0], m)\n",
        "import jax\nf = jax.pmap(g)\ndef step(s, b):\n    s, m = f(s, b)\n    return s, m\n"
        "s, m = step(s, b)\n"
        "m = jax.tree_util.tree_map(lambda x: x.addressable_shards[0].data.squeeze(0), m)\n",
    ),
    Mend(
        "the result of a mapped call",
        "import jax\nimport jax.numpy as jnp\nfrom flax import jax_utils\n"
        "f = jax.pmap(lambda x: {'a': x * 2})\n\ndef result():\n"
        "    y = f(jnp.arange(16.0).reshape(8, 2))\n    return jax_utils.unreplicate(y)\n",
        "import jax\nimport jax.numpy as jnp\nfrom flax import jax_utils\n"
        "f = jax.pmap(lambda x: {'a': x * 2})\n\ndef result():\n"
        "    y = f(jnp.arange(16.0).reshape(8, 2))\n"
        "    return jax.tree.map(lambda x: x.addressable_shards[0].data.squeeze(0), y)\n",
        runs=True,
    ),
    Mend(
        "what flax replicated",
        "import jax\nimport jax.numpy as jnp\nfrom flax.jax_utils import replicate, unreplicate\n"
        "\ndef result():\n    y = replicate({'a': jnp.arange(3)})\n    return unreplicate(y)\n",
        "import jax\nimport jax.numpy as jnp\nfrom flax.jax_utils import replicate, unreplicate\n"
        "\ndef result():\n    y = replicate({'a': jnp.arange(3)})\n"
        "    return jax.tree.map(lambda x: x.addressable_shards[0].data.squeeze(0), y)\n",
        runs=True,
    ),
    Mend(
        "spelled out",
        "import jax\nimport jax.numpy as jnp\nf = jax.pmap(lambda x: (x, x + 1), 'i')\n"
        "\ndef result():\n    y = f(jnp.arange(8))\n"
        "    return jax.tree.map(lambda leaf: leaf[0], y)  # one copy\n",
        "import jax\nimport jax.numpy as jnp\nf = jax.pmap(lambda x: (x, x + 1), 'i')\n"
        "\ndef result():\n    y = f(jnp.arange(8))\n"
        "    return jax.tree.map("
        "lambda leaf: leaf.addressable_shards[0].data.squeeze(0), y)  # one copy\n",
        runs=True,
    ),
)
