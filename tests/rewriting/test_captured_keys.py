"""Programs with another key in each process: rewritten, they have the same, and are found."""

import functools
import pathlib
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dist
from jax_dist.testing import run_processes


@custom_partitioning
def _centre(x):
    return x - x.mean(-1, keepdims=True)


class _Scale:
    def __call__(self, x):
        return {"b": x * 2, "a": x + 1}


def _capturing_functions():
    """Return functions of `[8, 64]` that capture random arrays, seeded by the system."""
    random, mesh = np.random.default_rng(), Mesh(np.array(jax.devices()), ("i",))
    table = jnp.asarray(random.normal(size=(64, 64)), jnp.float32)
    key = jax.random.key(int(random.integers(1 << 30)))
    weights = [random.normal(size=(64, 64)).astype(np.float32)]
    constrain = lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("i")))
    return {
        "closure": lambda x: x @ table,
        "key": lambda x: x + jax.random.normal(key, x.shape),
        "mapped": lambda x: jax.pmap(lambda v: jax.lax.psum(v @ table, "i"), "i")(x),
        "numpy": lambda x: x @ weights[0],
        "partitioned": lambda x: _centre(constrain(x * 2)),
        "viewed": lambda w, x: w - jax.lax.pmean((x @ table @ w).mean(), "i"),
        "decorated": lambda x: x @ table,
    }


def compile_all(folder: str, factor: float = 1.0) -> set[str]:
    """Run in a process: return the names of the files in the cache, in which it begins."""
    warnings.simplefilter("ignore", jax_dist.CapturedArrayWarning)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

    def partition(mesh, arguments, result):
        rows = NamedSharding(mesh, P("i", None))
        return mesh, lambda x: _centre.fun(x) * factor, rows, (rows,)

    _centre.def_partition(partition, sharding_rule="i j -> i j")
    x, square = np.ones((8, 64), np.float32), np.ones((64, 64), np.float32)
    for kind, captures in (("plain", "allow"), ("lifted", "lift")):
        for name, fun in _capturing_functions().items():
            fun.__name__ = f"{kind}_{name}"
            if name == "viewed":
                view = jax_dist.global_view(fun, "i", shardings="fsdp", captures=captures)
                view.lower(view.place(square), view.place_batch(square)).compile()
            elif name == "decorated":
                jax_dist.pmap(fun, captures=captures)(x)
            else:
                (jax.jit if kind == "plain" else jax_dist.rewrite)(fun)(x)
    jax_dist.pmap(_Scale())(x)
    jax_dist.pmap(functools.partial(lambda a, x: x - a, 3.0))(x)
    jax_dist.pmap(lambda x: x + x.sum(), donate_argnums=0)(x)
    jax_dist.pmap(lambda x: jax_dist.pmap(lambda y: y + 1)(x))(x[:4, :2])
    jax_dist.pmap(lambda x: jax.lax.all_gather(x, "i").sum(), "i")(x)
    return {path.name for path in pathlib.Path(folder).glob("*-cache")}


@pytest.mark.thorough
def test_rewritten_programs_are_found_by_the_next_process(tmp_path):
    def compile_in_a_process(*args):
        (outcome,) = run_processes(compile_all, str(tmp_path), *args, processes=1, cpu_devices=8)
        assert outcome.error is None
        return outcome.value

    def programs(files):
        return {re.sub(r"^jit_(\w+)-\w+-cache$", r"\1", file) for file in files}

    first, second = compile_in_a_process(), compile_in_a_process()
    names = _capturing_functions()

    assert programs(first) >= {f"lifted_{name}" for name in names}
    assert programs(second - first) == {f"plain_{name}" for name in names}
    changed = programs(compile_in_a_process(2.0) - second)  # of the custom_partitioning operation
    assert "lifted_partitioned" in changed
    assert "lifted_closure" not in changed
