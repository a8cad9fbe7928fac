"""Cases of JXD405."""

from rule_cases import Case, Negative, Positive

CASES: tuple[Case, ...] = (
    Negative(
        "another library's callback", "import jax\nfrom keras import debug\ndebug.callback(f)\n"
    ),
    Negative("a print of Python's own", "import jax\nprint('debug.print')\n"),
    Positive(
        "each of them",
        "import jax\nfrom jax.experimental import io_callback\njax.debug.print('x')\n"
        "y = jax.pure_callback(f, s, x)\nio_callback(g, None, y)\n",
        (3, 4, 5),
    ),
)
