"""Cases of JXD306."""

from rule_cases import Case, Fixed, Negative

CASES: tuple[Case, ...] = (
    Negative("another library's psum", "from mpi import jax, lax\nn = lax.psum(1, 'i')\n"),
    Negative("a float has a float sum", "from jax import lax\nn = lax.psum(1.0, 'i')\n"),
    Negative("a truth value has another type", "from jax import lax\nn = lax.psum(True, 'i')\n"),
    Fixed(
        "another name of it",
        "from jax import lax\np = lax.psum\nn = p(1, 'i')\n",
        "from jax import lax\np = lax.psum\nn = lax.axis_size('i')\n",
    ),
    Fixed(
        "a comment before the number",
        "import jax\nn = jax.lax.psum(  # devices\n    1, 'i')\n",
        "import jax\nn = jax.lax.axis_size(  # devices\n    'i')\n",
    ),
    Fixed(
        "the axis by keyword",
        "import jax\nn = jax.lax.psum(1, axis_name='i')\n",
        "import jax\nn = jax.lax.axis_size('i')\n",
    ),
    Fixed(
        "the function itself was imported",
        "from jax.lax import psum\nn = psum(1, 'i') + psum(x, 'i')\n",
        "from jax.lax import psum\nimport jax\nn = jax.lax.axis_size('i') + psum(x, 'i')\n",
    ),
)
