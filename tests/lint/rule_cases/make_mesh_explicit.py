"""Cases of JXD302."""

from rule_cases import Case, Fixed, Negative, Positive

CASES: tuple[Case, ...] = (
    Negative("said", "import jax\nm = jax.make_mesh((8,), ('i',), axis_types=types)\n"),
    Negative("perhaps said", "import jax\nm = jax.make_mesh((8,), ('i',), **options)\n"),
    Positive("not all seen", "import jax\nm = jax.make_mesh(axis_names=names, devices=d)\n", (2,)),
    Positive(
        "set as Explicit ones are", "import jax\njax.set_mesh(jax.make_mesh((8,), ('i',)))\n", (2,)
    ),
    Fixed(
        "one axis",
        "import jax\n\n\ndef result():\n    mesh = jax.make_mesh((8,), ('i',))  # all\n"
        "    spec = jax.sharding.PartitionSpec('i')\n"
        "    return jax.device_put(jax.numpy.arange(8), jax.sharding.NamedSharding(mesh, spec))\n",
        "import jax\n\n\ndef result():\n"
        "    mesh = jax.make_mesh((8,), ('i',), axis_types=(jax.sharding.AxisType.Auto,))"
        "  # all\n"
        "    spec = jax.sharding.PartitionSpec('i')\n"
        "    return jax.device_put(jax.numpy.arange(8), jax.sharding.NamedSharding(mesh, spec))\n",
        runs=True,
    ),
    Fixed(
        "names from elsewhere, and devices",
        "from jax import make_mesh\nfrom jax.sharding import AxisType\n"
        "m = make_mesh(shape, names, devices=d)\n",
        "from jax import make_mesh\nfrom jax.sharding import AxisType\n"
        "m = make_mesh(shape, names, devices=d, axis_types=(AxisType.Auto,) * len(names))\n",
    ),
    Fixed(
        "all by keyword",
        "import jax\nm = jax.make_mesh(axis_shapes=(2, 4), axis_names=('i', 'j'))\n",
        "import jax\nm = jax.make_mesh(axis_shapes=(2, 4), axis_names=('i', 'j'), "
        "axis_types=(jax.sharding.AxisType.Auto,) * 2)\n",
    ),
)
