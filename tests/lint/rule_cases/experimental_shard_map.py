"""Cases of JXD105."""

from rule_cases import Case, Fixed, Negative, Positive

CASES: tuple[Case, ...] = (
    Negative(
        "the new one", "import jax\nf = jax.shard_map(g, mesh=m, in_specs=s, check_vma=False)\n"
    ),
    Negative(
        "another library's", "from mine import shard_map\nimport jax\nshard_map(f, check_rep=1)\n"
    ),
    Negative(
        "the fallback of a file that is ready",
        "try:\n    from jax import shard_map\nexcept ImportError:\n"
        "    from jax.experimental.shard_map import shard_map\nf = shard_map(g, check_rep=False)\n",
    ),
    Positive(
        "passed on", "from jax.experimental.shard_map import shard_map\ndo(shard_map)\n", (1,)
    ),
    Positive(
        "arguments that are not all seen",
        "from jax.experimental.shard_map import shard_map\nf = shard_map(g, **options)\n",
        (1,),
    ),
    Positive(
        "auto has no fix",
        "from jax.experimental.shard_map import shard_map\n"
        "f = shard_map(g, mesh=m, in_specs=s, out_specs=s, auto=frozenset({'j'}))\n",
        (1,),
    ),
    Positive("auto of the new one", "import jax\nf = jax.shard_map(g, mesh=m, auto={'j'})\n", (2,)),
    Fixed(
        "the mesh and the specs by position",
        "from jax.experimental.shard_map import shard_map\n"
        "f = shard_map(g, mesh, (P('i'),), P(), check_rep=False)  # one\n",
        "from jax import shard_map\n"
        "f = shard_map(g, mesh=mesh, in_specs=(P('i'),), out_specs=P(), check_vma=False)  # one\n",
    ),
    Fixed(
        "a decorator",
        "from functools import partial\nfrom jax.experimental.shard_map import shard_map as sm\n\n"
        "@partial(sm, mesh=m, in_specs=s, out_specs=s, check_rep=False)\ndef f(x): ...\n",
        "from functools import partial\nfrom jax import shard_map as sm\n\n"
        "@partial(sm, mesh=m, in_specs=s, out_specs=s, check_vma=False)\ndef f(x): ...\n",
    ),
    Fixed(
        "the module",
        "import jax\nfrom jax.experimental import shard_map\n"
        "f = shard_map.shard_map(g, mesh=m, in_specs=s, out_specs=s)\n",
        "import jax\nfrom jax.experimental import shard_map\n"
        "f = jax.shard_map(g, mesh=m, in_specs=s, out_specs=s)\n",
    ),
    Fixed(
        "an old keyword of the new function",
        "import jax\nf = jax.shard_map(g, mesh=m, in_specs=s, out_specs=s, check_rep=False)\n",
        "import jax\nf = jax.shard_map(g, mesh=m, in_specs=s, out_specs=s, check_vma=False)\n",
    ),
    Fixed(
        "the same numbers",
        "import warnings\n\nimport jax\nimport numpy as np\nfrom jax.sharding import Mesh\n"
        "from jax.sharding import PartitionSpec as P\n\n\ndef result():\n"
        "    from jax.experimental.shard_map import shard_map\n"
        "    mesh = Mesh(np.array(jax.devices()), ('i',))\n"
        "    f = shard_map(lambda x: jax.lax.psum(x, 'i'), mesh, P('i'), P(), check_rep=True)\n"
        "    return jax.jit(f)(np.arange(16.0))\n",
        "import warnings\n\nimport jax\nimport numpy as np\nfrom jax.sharding import Mesh\n"
        "from jax.sharding import PartitionSpec as P\n\n\ndef result():\n"
        "    from jax import shard_map\n"
        "    mesh = Mesh(np.array(jax.devices()), ('i',))\n"
        "    f = shard_map(lambda x: jax.lax.psum(x, 'i'), mesh=mesh, in_specs=P('i'), "
        "out_specs=P(), check_vma=True)\n"
        "    return jax.jit(f)(np.arange(16.0))\n",
        runs=True,
    ),
)
