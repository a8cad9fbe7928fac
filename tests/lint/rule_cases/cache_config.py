"""Cases of JXD406."""

from rule_cases import Case, Fixed, Negative, Positive

CASES: tuple[Case, ...] = (
    Negative(
        "both are set",
        "import jax\njax.config.update('jax_compilation_cache_dir', d)\n"
        "jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)\n",
    ),
    Negative("switched off", "import jax\njax.config.update('jax_compilation_cache_dir', None)\n"),
    Negative("only read", "import jax\nd = jax.config.jax_compilation_cache_dir\n"),
    Positive(
        "not a statement of its own: no fix",
        "import jax\nset = lambda d: jax.config.update('jax_compilation_cache_dir', d)\n",
        (2,),
    ),
    Positive(
        "a folder that anyone can write",
        "import jax\njax.config.update('jax_persistent_cache_min_compile_time_secs', 0)\n"
        "jax.config.update('jax_compilation_cache_dir', '/tmp/cache')\n",
        (3,),
    ),
    Fixed(
        "the other setting is put above, indented alike",
        "from jax import config as c\ndef main(d):\n"
        '    c.update("jax_compilation_cache_dir", d)  # ours\n    run()\n',
        'from jax import config as c\ndef main(d):\n    c.update("'
        'jax_persistent_cache_min_compile_time_secs", 0)\n'
        '    c.update("jax_compilation_cache_dir", d)  # ours\n    run()\n',
    ),
)
