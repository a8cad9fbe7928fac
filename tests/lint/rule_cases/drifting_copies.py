"""Cases of JXD502."""

from rule_cases import Case, Negative, Positive

_TOP = "import jax\nfrom jax.sharding import PartitionSpec as P\n"
_BODY = (
    "def f(key, w):\n    key = jax.random.fold_in(key, jax.lax.axis_index('i'))\n"
    "    return w + jax.random.normal(key, w.shape)\n"
)
_MAPPED = "g = jax.shard_map(f, mesh=m, in_specs=P(), out_specs=P(), check_vma=False)\n"

CASES: tuple[Case, ...] = (
    Negative(
        "results are put together", _TOP + _BODY + _MAPPED.replace("out_specs=P()", "out_specs=s")
    ),
    Negative("JAX looks itself", _TOP + _BODY + _MAPPED.replace(", check_vma=False", "")),
    Negative(
        "a mean over the devices",
        _TOP + _BODY.replace("return w", "return jax.lax.pmean(w, 'i')") + _MAPPED,
    ),
    Negative(
        "another function may reduce", _TOP + _BODY.replace("return w", "return h(w)") + _MAPPED
    ),
    Positive("copies drift", _TOP + _BODY + _MAPPED, (4,)),
    Positive(
        "copies drift below another function, which may reduce",
        _TOP
        + _BODY.replace("return w", "return h(w)").replace("def f", "def e")
        + _MAPPED.replace("(f,", "(e,")
        + _BODY
        + _MAPPED,
        (8,),
    ),
)
