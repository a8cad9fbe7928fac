"""Cases of JXD201."""

from rule_cases import Case, Negative, Positive

CASES: tuple[Case, ...] = (
    Negative(
        "another library's replicate",
        "import jax\nfrom mesh import jax_utils\ns = jax_utils.replicate(s)\n",
    ),
    Negative(
        "the file's own replicate",
        "from flax import jax_utils\ndef replicate(x): return x\ns = replicate(s)\n",
    ),
    Positive("a call", "from flax import jax_utils\ns = jax_utils.replicate(s)\n", (2,)),
    Positive("the whole path", "import flax\ns = flax.jax_utils.replicate(s)\n", (2,)),
    Positive("the function itself", "from flax.jax_utils import replicate as r\ns = r(s)\n", (2,)),
    Positive("a value", "from flax import jax_utils\nss = map(jax_utils.replicate, ss)\n", (2,)),
)
