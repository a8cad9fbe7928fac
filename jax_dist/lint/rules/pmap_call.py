"""JXD001: `jax.pmap` is used."""

from jax_dist.lint.model import pmaps
from jax_dist.lint.rules import Findings, Found, Module, Rule

_MESSAGES = {
    "alias": "jax.pmap gets another name here",
    "partial alias": "jax.pmap with bound arguments gets a name here",
    "value": "jax.pmap is passed on as a value",
    "called decorator": "jax.pmap as a decorator with arguments fails: it wants the function first",
}

# The pmaps of other libraries: ours, and what is written by hand in plain JAX.
OF_LIBRARIES = {
    "equinox.filter_pmap": ("filter_pmap", "equinox.filter_shard_map"),
    "flax.nnx.pmap": ("nnx_pmap", "flax.nnx.shard_map"),
    "flax.experimental.nnx.pmap": ("nnx_pmap", "flax.nnx.shard_map"),
}


@Rule(
    "JXD001",
    what="`jax.pmap`, under any name, also passed on as a value; and `equinox.filter_pmap` and "
    "`flax.nnx.pmap`, which call it.",
    why="pmap is in maintenance mode since jax 0.8; underneath it is `jit(shard_map)`. With "
    "several processes, `jit`, `scan` and `grad` around it reduce over local devices only, "
    "without an error: see JXD002.",
    instead="`jax-dist migrate` rewrites pmap together with all that belongs to it, to "
    "`jax_dist.pmap` or to plain JAX.\n"
    "https://docs.jax.dev/en/latest/migrate_pmap.html",
    triggers=(b"pmap", b"filter_pmap"),
)
def pmap_call(module: Module) -> Findings:
    for site in pmaps.sites(module, pmaps.PMAP):
        message = _MESSAGES.get(site.form, "jax.pmap is in maintenance mode")
        yield Found(site.reference, f"{message}; jax-dist migrate rewrites it")
    for name, (ours, _) in OF_LIBRARIES.items():
        for reference in module.uses(name):
            message = f"{name} is jax.pmap underneath; jax_dist.{ours} takes its place"
            yield Found(reference, message)
