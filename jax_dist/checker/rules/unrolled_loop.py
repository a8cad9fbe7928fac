"""JXD407: a Python loop over rows, traced once for each of them."""

import ast
import re
from collections.abc import Iterator

from jax_dist.checker import collecting, looping, nodes, order, traced
from jax_dist.checker.modules import Module
from jax_dist.checker.page import Page
from jax_dist.checker.registry import Case, Flag, Found, Keep, Mend, rule
from jax_dist.checker.rounds import is_only_an_index

PAGE = Page(
    code="JXD407",
    name="unrolled-loop",
    what="Finds `for` loops over the rows of an array, in functions given to pmap, shard_map or "
    "jit, that put what they compute from each row into lists, which are only stacked behind the "
    "loop. Rows are what `jax.random.split` and jax.numpy give, and `range(n)` where the number "
    "is only used as an index of arrays. Loops of two or three rows, and loops whose rounds need "
    "each other, are left alone. jit is looked at in files that also say pmap or shard_map.",
    why="JAX does not see the loop: it traces the body once for each row, and XLA compiles all "
    "copies of it. A loop over 8 rows, each of them two episodes of CartPole, is 2492 lines of "
    "StableHLO and takes 5.0 s of CPU time to compile; with `lax.map` 1031 lines and 1.8 s (8 "
    "simulated devices, jax 0.10.2).",
    example="import jax\nimport jax.numpy as jnp\n\n\ndef step(params, key):\n    scores = []\n"
    "    for row_key in jax.random.split(key, 64):\n"
    "        scores.append(play(params, row_key))\n    return jnp.stack(scores)\n\n\n"
    "p_step = jax.pmap(step)\n",
    instead="import jax\nimport jax.numpy as jnp\n\n\ndef step(params, key):\n"
    "    def per_row_key(row_key):\n        return play(params, row_key)\n\n"
    "    return jax.lax.map(per_row_key, jax.random.split(key, 64))\n\n\n"
    "p_step = jax.pmap(step)\n",
    fix="Unsafe: the order of fused operations may change the last digits, and what the body calls "
    "is traced once only. `lax.map` takes one row after the other; where memory allows it, "
    "`jax.vmap` of the same function is faster, and `batch_size=` lies between.",
    since="Any jax.",
    source="https://docs.jax.dev/en/latest/_autosummary/jax.lax.map.html",
)

_FOR = re.compile(rb"\.append\(")
_FEW = 3  # rows; spelled out by hand they would be no worse


@rule(PAGE, triggers=traced.TRIGGERS, also=(b".append(",))
def check(module: Module) -> Iterator[Found]:
    functions = {each.function for each in traced.traced(module)}
    names = looping.Names(module)
    for loop in sorted(nodes.of_kind(module, ast.For, _FOR), key=order.place) if functions else ():
        if functions.isdisjoint(module.ancestors(loop)):
            continue
        rows = collecting.rows(module, loop.iter)
        if rows is None or (rows.number is not None and rows.number <= _FEW):
            continue
        if collecting.is_range(module, loop.iter) and not is_only_an_index(module, loop):
            continue
        found = collecting.collecting(module, loop)
        if found is not None:
            yield Found(loop.iter, _message(rows.text), looping.fix(module, found, names))


def _message(rows: str) -> str:
    copies = f"{rows} copies of the body" if rows else "one copy of the body for each"
    return f"the loop is traced once for each row: the program holds {copies}, lax.map holds one"


_HEAD = "import jax\nimport jax.numpy as jnp\n\n"
_MAPPED = "\np_step = jax.pmap(step)\n"
_KEYS = "jax.random.split(jax.random.PRNGKey(0), 8)"
_RESULT = f"\n\ndef result():\n    return jax.pmap(step)({_KEYS})\n"


def _loop(body: str, *, over: str = "jax.random.split(key, 8)", target: str = "k") -> str:
    """A mapped function with a loop whose body ends with an append to `xs`."""
    lines = "".join(f"        {line}\n" for line in body.split("\n"))
    return (
        f"{_HEAD}def step(key, w):\n    xs = []\n    for {target} in {over}:\n{lines}"
        f"    return jnp.stack(xs)\n{_MAPPED}"
    )


CASES: tuple[Case, ...] = (
    Keep("nothing is collected", _loop("w = w @ w").replace("jnp.stack(xs)", "w")),
    Keep("layers, each with parameters of its own", _loop("xs.append(k @ key)", over="w")),
    Keep("a round that needs the one before", _loop("w = w * 2\nxs.append(w)")),
    Keep("a sum over the rounds", _loop("w += k\nxs.append(w)")),
    Keep(
        "a value of the last round is used",
        _loop("y = f(k)\nxs.append(y)").replace("return jnp.stack(xs)", "return jnp.stack(xs), y"),
    ),
    Keep("a name that only some rounds set", _loop("if w.ndim:\n    y = k\nxs.append(y)")),
    Keep("a loop that is left early", _loop("if w.ndim:\n    break\nxs.append(k)")),
    Keep("collected now and then", _loop("if w.ndim:\n    xs.append(k)")),
    Keep("two for each row", _loop("xs.append(k)\nxs.append(k + 1)")),
    Keep("something else is changed", _loop("log.count += 1\nxs.append(k)")),
    Keep("something else is called", _loop("print(k)\nxs.append(k)")),
    Keep("something else is taken from", _loop("xs.append(k * scales.pop())")),
    Keep("an iterator goes on", _loop("xs.append(k * next(scales))")),
    Keep(
        "a name of another function is set",
        _loop("y = k\nxs.append(y)").replace(
            "def step(key, w):\n", "y = 0\ndef step(key, w):\n    global y\n"
        ),
    ),
    Keep(
        "Haiku keeps books",
        _loop("xs.append(hk.Linear(3)(k))").replace(
            "import jax\n", "import haiku as hk\nimport jax\n", 1
        ),
    ),
    Keep("the list is used as one", _loop("xs.append(k)").replace("jnp.stack(xs)", "len(xs)")),
    Keep("the list was not empty", _loop("xs.append(k)").replace("xs = []", "xs = [key]")),
    Keep("one list under two names", _loop("xs.append(k)").replace("xs = []", "xs = ys = []")),
    Keep("begun beside something else", _loop("xs.append(k)").replace("xs = []", "xs, n = [], 0")),
    Keep("two rows", _loop("xs.append(k)", over="jax.random.split(key)")),
    Keep(
        "two rows, by name",
        _loop("xs.append(k)", over="jax.random.split(key, N)").replace("def", "N = 2\ndef", 1),
    ),
    Keep("three rounds", _loop("xs.append(w[:, i])", over="range(3)", target="i")),
    Keep(
        "rounds that the arguments count",
        _loop("xs.append(w[:, i])", over="range(w.shape[1])", target="i"),
    ),
    Keep("the number is a shape", _loop("xs.append(jnp.ones(i))", over="range(8)", target="i")),
    Keep("the number is a name", _loop("xs.append(w[f'layer_{i}'])", over="range(8)", target="i")),
    Keep("a list of layers", _loop("xs.append(w[i](key))", over="range(8)", target="i")),
    Keep("a row is asked for its value", _loop("xs.append(int(k))", over="jnp.arange(8)")),
    Keep("a row decides", _loop("xs.append(key if k else w)", over="jnp.arange(8)")),
    Keep(
        "outside of what is traced",
        _loop("xs.append(k)").replace("jax.pmap(step)", "jax.pmap(lambda x: x)"),
    ),
    Keep(
        "a loop that ends with something else",
        _loop("xs.append(k)\nelse:\n    w = k").replace("        else", "    else"),
    ),
    Keep("the list is looked at in each round", _loop("xs.append(len(xs))")),
    Keep("the list is stacked in each round", _loop("y = jnp.stack(xs)\nxs.append(y)")),
    Keep(
        "the list comes from elsewhere",
        _loop("xs.append(k)").replace("w):\n    xs = []", "xs):\n    w = 1"),
    ),
    Keep(
        "the list is begun nowhere",
        _loop("xs.append(k)")
        .replace("    xs = []\n", "")
        .replace("return jnp.stack(xs)", "xs = jnp.stack(xs)"),
    ),
    Keep("a name is set on the way", _loop("xs.append(y := k)")),
    Keep(
        "a list of the module",
        "import jax\nimport jax.numpy as jnp\nxs = []\n"
        "for k in jax.random.split(key, 8):\n    xs.append(jax.pmap(f)(k))\ny = jnp.stack(xs)\n",
    ),
    Flag("a row of several parts", _loop("xs.append(k * v)", target="k, v"), (6,)),
    Flag(
        "rows that stand beside each other",
        _loop("xs.append(k)").replace("stack(xs)", "stack(xs, axis=1)"),
        (6,),
    ),
    Flag(
        "in another type",
        _loop("xs.append(k)").replace("stack(xs)", "asarray(xs, jnp.bfloat16)"),
        (6,),
    ),
    Flag("what may be a tuple", _loop("xs.append(f(k))").replace("stack(xs)", "array(xs)"), (6,)),
    Flag("devices speak in each round", _loop("xs.append(jax.lax.psum(k, 'i'))"), (6,)),
    Flag("a method, which may remember", _loop("xs.append(self.play(k))"), (6,)),
    Flag("what is appended changes then", _loop("y = f(k)\nxs.append(y)\ny = y + 1"), (6,)),
    Flag(
        "begun beside another list",
        _loop("xs.append(k)").replace("xs = []", "xs, others = [], []"),
        (6,),
    ),
    Flag("a comment that would go", _loop("xs.append(  # each\n    k)"), (6,)),
    Flag("all on one line", _loop("xs.append(k)").replace(":\n        xs", ": xs"), (6,)),
    Mend(
        "two lists, stacked under their names",
        _HEAD + "from jax import lax\n\n\ndef step(key):\n"
        "    scale = 3.0\n"
        "    noises, scores = [], []  # of the rows\n"
        "    for row_key in jax.random.split(key, 4):  # pairs\n"
        "        # half of them\n"
        "        noise = scale * jax.random.normal(row_key, (5,))\n"
        "        noises.append(noise)  # drawn\n"
        "        scores.append(jnp.stack([noise.sum(), noise.max()]))\n"
        "    noises, scores = jnp.stack(noises), jnp.stack(scores)\n"
        "    return lax.pmean(scores.T @ noises, 'i')\n" + _RESULT.replace("(step)", "(step, 'i')"),
        _HEAD + "from jax import lax\n\n\ndef step(key):\n"
        "    scale = 3.0\n"
        "    # of the rows\n"
        "\n"
        "    def per_row_key(row_key):  # pairs\n"
        "        # half of them\n"
        "        noise = scale * jax.random.normal(row_key, (5,))\n"
        "        # drawn\n"
        "        return noise, jnp.stack([noise.sum(), noise.max()])\n"
        "\n"
        "    noises, scores = lax.map(per_row_key, jax.random.split(key, 4))\n"
        "    return lax.pmean(scores.T @ noises, 'i')\n" + _RESULT.replace("(step)", "(step, 'i')"),
        runs=True,
    ),
    Mend(
        "one list, used as it is stacked, twice",
        _HEAD + "\ndef step(key):\n"
        "    start = 1.0\n"
        "\n"
        "    ys = []\n"
        "    for _ in range(4):\n"
        "        ys.append(jnp.sin(key.sum()))\n"
        "    total = start + jnp.stack(ys).sum()\n"
        "    return total + jnp.asarray(ys).mean()\n" + _RESULT,
        _HEAD + "\ndef step(key):\n"
        "    start = 1.0\n"
        "\n"
        "    def per_row(_):\n"
        "        return jnp.sin(key.sum())\n"
        "\n"
        "    ys = jax.lax.map(per_row, jnp.arange(4))\n"
        "    total = start + ys.sum()\n"
        "    return total + ys.mean()\n" + _RESULT,
        runs=True,
    ),
    Mend(
        "by number, under another name, under shard_map",
        _HEAD + "from jax.sharding import PartitionSpec as P\n\nN = 4\n\n\n"
        "def step(key, x):\n"
        "    ys: list = []\n"
        "    for i in range(N):\n"
        "        weight = x[0, i + 1] * jax.random.uniform(jax.random.fold_in(key, i))\n"
        "        for power in range(2):\n"
        "            other = weight**power\n"
        "            weight = other if power else weight\n"
        "        ys.append(\n"
        "            weight\n"
        "            * 2\n"
        "        )\n"
        "    rows = jnp.stack(ys, axis=0)\n"
        "    return rows\n"
        "\n\ndef result():\n"
        "    mesh = jax.sharding.Mesh(jax.devices(), ('i',))\n"
        "    f = jax.shard_map(step, mesh=mesh, in_specs=(P(), P('i')), out_specs=P('i'))\n"
        "    return jax.jit(f)(jax.random.key(1), jnp.arange(40.0).reshape(8, 5))\n",
        _HEAD + "from jax.sharding import PartitionSpec as P\n\nN = 4\n\n\n"
        "def step(key, x):\n"
        "    def per_row(i):\n"
        "        weight = x[0, i + 1] * jax.random.uniform(jax.random.fold_in(key, i))\n"
        "        for power in range(2):\n"
        "            other = weight**power\n"
        "            weight = other if power else weight\n"
        "        return (weight\n"
        "            * 2)\n"
        "\n"
        "    rows = jax.lax.map(per_row, jnp.arange(N))\n"
        "    return rows\n"
        "\n\ndef result():\n"
        "    mesh = jax.sharding.Mesh(jax.devices(), ('i',))\n"
        "    f = jax.shard_map(step, mesh=mesh, in_specs=(P(), P('i')), out_specs=P('i'))\n"
        "    return jax.jit(f)(jax.random.key(1), jnp.arange(40.0).reshape(8, 5))\n",
        runs=True,
    ),
    Mend(
        "two loops, a comment below the body, and a name that is used until it is set",
        _HEAD + "\ndef step(key):\n"
        "    noise = jax.random.normal(key, (3,))\n"
        "    xs = []\n"
        "    # all four\n"
        "    for k in jax.random.split(key, 4):\n"
        "        xs.append(noise * jax.random.normal(k, (3,)))\n"
        "        # to be stacked\n"
        "    scale = noise.max()\n"
        "    noise = jnp.stack(xs)\n"
        "    ys = []\n"
        "    for i in range(4):\n"
        "        ys.append(noise[3 - i] * scale)\n"
        "    return jnp.stack(ys)\n" + _RESULT,
        _HEAD + "\ndef step(key):\n"
        "    noise = jax.random.normal(key, (3,))\n"
        "\n"
        "    # all four\n"
        "    def per_row(k):\n"
        "        return noise * jax.random.normal(k, (3,))\n"
        "        # to be stacked\n"
        "\n"
        "    xs = jax.lax.map(per_row, jax.random.split(key, 4))\n"
        "    scale = noise.max()\n"
        "    noise = xs\n"
        "\n"
        "    def per_row_2(i):\n"
        "        return noise[3 - i] * scale\n"
        "\n"
        "    ys = jax.lax.map(per_row_2, jnp.arange(4))\n"
        "    return ys\n" + _RESULT,
        runs=True,
    ),
)
