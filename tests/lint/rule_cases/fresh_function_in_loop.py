"""Cases of JXD407."""

from rule_cases import Case, Negative, Positive

_TOP = "import functools\nimport jax\n"


CASES: tuple[Case, ...] = (
    Negative("one function for all", _TOP + "for d in sets:\n    jax.pmap(f)(d)\n"),
    Negative("made above the loop", _TOP + "f = jax.pmap(lambda x: x)\nfor d in sets:\n    f(d)\n"),
    Negative(
        "kept for later",
        _TOP + "steps = {}\nfor n in names:\n    steps[n] = jax.jit(functools.partial(f, n))\n",
    ),
    Negative(
        "in a function of the loop, which may run once",
        _TOP + "for n in names:\n    def make(x):\n        return jax.jit(lambda y: y * n)(x)\n",
    ),
    Negative("another function that the loop gives", _TOP + "for f in fs:\n    jax.jit(f)(x)\n"),
    Negative(
        "traced once",
        _TOP + "@functools.partial(jax.jit, inline=True)\ndef f(x):\n    for n in range(3):\n"
        "        x = jax.shard_map(lambda y: y * n, mesh=m)(x)\n    return x\n",
    ),
    Positive(
        "a lambda",
        _TOP + "def per_set(sets, f):\n    for d in sets:\n"
        "        yield jax.pmap(lambda x: f(x, d))(x)\n",
        (5,),
    ),
    Positive(
        "a partial, by name",
        _TOP + "while more:\n    run = functools.partial(f, data=d)\n    step = jax.pmap(run)\n"
        "    y = step(x)\n",
        (5,),
    ),
    Positive(
        "a def",
        _TOP + "for d in sets:\n    def run(x):\n        return x * d\n    y = jax.jit(run)(x)\n",
        (6,),
    ),
    Positive(
        "a shard_map under jit",
        _TOP + "for d in sets:\n"
        "    y = jax.jit(jax.shard_map(lambda x: x * d, mesh=m, in_specs=s, out_specs=s))(x)\n",
        (4,),
    ),
    Positive(
        "with options of its own",
        _TOP
        + "for d in sets:\n    functools.partial(jax.pmap, donate_argnums=0)(lambda x: x)(d)\n",
        (4,),
    ),
)
