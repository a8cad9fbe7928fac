"""Cases of JXD107."""

from rule_cases import Case, Fixed, Negative, Positive

CASES: tuple[Case, ...] = (
    Negative("another library's", "import jax\nfrom mine import lax\nlax.pvary(x, 'i')\n"),
    Negative(
        "ready for it to be missing",
        "import jax\ntry:\n    cast = jax.lax.pvary\nexcept AttributeError:\n    cast = None\n",
    ),
    Positive("imported and passed on", "from jax.lax import pvary\nmap(pvary, x)\n", (1,)),
    Fixed(
        "a call, its alias and comment",
        "from jax import lax as L\ny = L.pvary(x, ('i', 'j'))  # now varying\n",
        "from jax import lax as L\ny = L.pcast(x, ('i', 'j'), to='varying')  # now varying\n",
    ),
    Fixed(
        "the axis by keyword, on its own line",
        "import jax\ny = jax.lax.pvary(\n    x,\n    axis_name='i',\n)\n",
        "import jax\ny = jax.lax.pcast(\n    x,\n    axis_name='i', to='varying',\n)\n",
    ),
    Fixed(
        "an import and its calls",
        "from jax.lax import pvary, psum\ny = psum(pvary(x, 'i'), 'i')\n",
        "from jax.lax import pcast as pvary, psum\ny = psum(pvary(x, 'i', to='varying'), 'i')\n",
    ),
)
