"""Calls whose results were recorded with jax 0.7.2, the last release with the old pmap.

    python tests/pmap/recorded_cases.py        # with jax 0.7.2: writes recorded_0_7_2.json

Newer versions of jax.pmap refuse many of these calls (nested pmap, misplaced arrays, other meshes),
so they cannot be the oracle for them.
"""

import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

FILE = pathlib.Path(__file__).with_name("recorded_0_7_2.json")
CASES: dict[str, Callable[[Callable], Any]] = {}

_EIGHT = np.arange(8, dtype=np.float32)
_GRID = np.arange(8, dtype=np.float32).reshape(2, 4)
_CUBE = np.arange(16, dtype=np.float32).reshape(2, 2, 2, 2)


def case(run: Callable[[Callable], Any]) -> Callable[[Callable], Any]:
    CASES[run.__name__] = run
    return run


def _mesh(*names: str, shape: tuple[int, ...] = (8,)) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(shape), names)


def _nested(pmap: Callable, body: Callable, x: Any, **outer: Any) -> Any:
    return pmap(lambda x: pmap(body, axis_name="j")(x), axis_name="i", **outer)(x)


# ---------------------------------------------------------------------------------------- nested


@case
def nested_psum_inner(pmap):
    return _nested(pmap, lambda y: lax.psum(y, "j"), _GRID)


@case
def nested_psum_outer(pmap):
    return _nested(pmap, lambda y: lax.psum(y, "i"), _GRID)


@case
def nested_psum_both(pmap):
    return _nested(pmap, lambda y: lax.psum(y, ("i", "j")), _GRID)


@case
def nested_gathers(pmap):
    return _nested(pmap, lambda y: (lax.all_gather(y, "i"), lax.all_gather(y, "j")), _GRID)


@case
def nested_permutations(pmap):
    def body(y):
        return (
            lax.ppermute(y, "i", [(0, 1), (1, 0)]),
            lax.ppermute(y, "j", [(k, (k + 1) % 4) for k in range(4)]),
        )

    return _nested(pmap, body, _GRID)


@case
def nested_axis_index(pmap):
    return _nested(pmap, lambda y: (lax.axis_index("i"), lax.axis_index("j"), y), _GRID)


@case
def nested_pmean_then_outer_work(pmap):
    def outer(x):
        inner = pmap(lambda y: y - lax.pmean(y, "j"), axis_name="j")(x)
        return lax.psum(inner * inner, "i").sum()

    return pmap(outer, axis_name="i")(_GRID)


@case
def nested_without_names(pmap):
    return pmap(lambda x: pmap(lambda y: y * 2)(x) + 1)(_GRID)


@case
def nested_in_axes(pmap):
    inner = pmap(lambda y, s: y * s, axis_name="j", in_axes=(1, None))
    return pmap(lambda x, s: inner(x, s), axis_name="i", in_axes=(0, None))(_CUBE[:, 0], 3.0)


@case
def nested_three_deep(pmap):
    def outer(x):
        def middle(y):
            return pmap(lambda z: lax.psum(z, ("i", "k")) + lax.axis_index("j"), axis_name="k")(y)

        return pmap(middle, axis_name="j")(x)

    return pmap(outer, axis_name="i")(_CUBE)


@case
def nested_grad_of_outer(pmap):
    f = pmap(lambda x: pmap(lambda y: jnp.sin(y) * 2, axis_name="j")(x), axis_name="i")
    return jax.grad(lambda x: f(x).sum())(_GRID)


@case
def nested_static_and_tree(pmap):
    @functools.partial(pmap, axis_name="i", static_broadcasted_argnums=1)
    def outer(tree, n):
        inner = pmap(lambda y: y["a"] * n + lax.psum(y["b"], ("i", "j")), axis_name="j")
        return inner(tree)

    return outer({"a": _GRID, "b": _GRID + 1}, 3)


@case
def nested_bool(pmap):
    return _nested(pmap, jnp.logical_not, _GRID > 3)


@case
def nested_random(pmap):
    keys = jax.random.split(jax.random.key(3), 8).reshape(2, 4)
    return _nested(pmap, lambda key: jax.random.uniform(key), keys)


# --------------------------------------------------------------------------------------- misplaced


@case
def committed_to_one_device(pmap):
    x = jax.device_put(_EIGHT, jax.devices()[3])
    return pmap(lambda x: x - lax.pmean(x, "i"), axis_name="i")(x)


@case
def replicated_over_all_devices(pmap):
    x = jax.device_put(_EIGHT, jax.sharding.NamedSharding(_mesh("z"), jax.sharding.PartitionSpec()))
    return pmap(lambda x: lax.psum(x, "i"), axis_name="i")(x)


@case
def sharded_over_another_mesh(pmap):
    spec = jax.sharding.PartitionSpec("b")
    mesh = _mesh("a", "b", shape=(2, 4))
    x = jax.device_put(_EIGHT, jax.sharding.NamedSharding(mesh, spec))
    return pmap(lambda x: lax.psum(x, "i") + x, axis_name="i")(x)


@case
def result_on_other_devices(pmap):
    first = pmap(lambda x: x + 1, devices=jax.devices()[4:])(_EIGHT[:4])
    return pmap(lambda x: x * 2, devices=jax.devices()[:4])(first)


@case
def replicated_result_as_mapped_argument(pmap):
    first = pmap(lambda x: lax.all_gather(x, "i"), axis_name="i", out_axes=None)(_EIGHT)
    return pmap(lambda x: x + 1)(first)


# ------------------------------------------------------------------------------------ plain calls


@case
def weak_types_and_constants(pmap):
    return pmap(lambda x, s: (3, 2.5, s, x * 2, True), in_axes=(0, None))(_EIGHT, 1.5)


@case
def dtypes(pmap):
    x = [_EIGHT.astype(t) for t in (np.int8, np.uint16, np.float16, np.complex64, np.bool_)]
    return pmap(lambda x: x)(x)


@case
def axes(pmap):
    x = np.arange(24, dtype=np.float32).reshape(3, 8)
    return pmap(lambda x, y: (x + y, x[:, None]), in_axes=(1, None), out_axes=(1, 2))(
        x, np.float32(2)
    )


@case
def out_axes_none(pmap):
    return pmap(lambda x: (lax.psum(x, "i"), x), axis_name="i", out_axes=(None, 0))(_EIGHT)


@case
def subset_and_reversed_devices(pmap):
    return pmap(lambda x: lax.axis_index("i"), axis_name="i", devices=jax.devices()[5:1:-1])(
        _EIGHT[:4]
    )


@case
def groups(pmap):
    pairs = [[0, 1], [2, 3], [4, 5], [6, 7]]
    return pmap(
        lambda x: (
            lax.psum(x, "i", axis_index_groups=pairs),
            lax.all_gather(x, "i", axis_index_groups=pairs),
        ),
        axis_name="i",
    )(_EIGHT)


@case
def scatter_and_all_to_all(pmap):
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    return pmap(lambda x: (lax.psum_scatter(x, "i"), lax.all_to_all(x, "i", 0, 0)), axis_name="i")(
        x
    )


@case
def keys(pmap):
    split = jax.random.split(jax.random.key(0), 8)
    raw = jax.random.split(jax.random.PRNGKey(0), 8)
    return pmap(lambda a, b: (jax.random.normal(a), jax.random.fold_in(b, 1)))(split, raw)


@case
def gradient_inside(pmap):
    def update(w, x):
        return lax.pmean(jax.grad(lambda w: jnp.sum(jnp.sin(w * x)))(w), "i")

    return pmap(update, axis_name="i", in_axes=(None, 0))(2.0, _EIGHT)


@case
def gradient_outside(pmap):
    f = pmap(lambda x: lax.psum(x, "i") ** 2, axis_name="i")
    return jax.grad(lambda x: f(x).sum())(_EIGHT)


@case
def empty(pmap):
    return pmap(lambda x, y: ((), {}, x, None), in_axes=(0, None))(np.ones((8, 0)), {})


@case
def keywords(pmap):
    return pmap(lambda x, *, y: x + y.sum(), in_axes=1)(np.ones((2, 8)), y=np.ones((8, 3)))


def describe(output: Any) -> dict[str, Any]:
    """Values, types and places of all leaves, as plain data."""
    leaves, structure = jax.tree.flatten(output)
    return {"structure": str(structure), "leaves": [_describe(jnp.asarray(x)) for x in leaves]}


def _describe(x: jax.Array) -> dict[str, Any]:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return {
        "shape": list(x.shape),
        "dtype": str(x.dtype),
        "weak": bool(x.weak_type),
        "values": np.asarray(x, np.complex128).ravel().view(np.float64).tolist(),
        # Which device holds which slices, by the start of each dimension.
        "places": sorted(
            [shard.device.id, [_start(part) for part in shard.index]]
            for shard in x.addressable_shards
        ),
    }


def _start(part: slice | int) -> int:
    return part if isinstance(part, int) else part.start or 0


def record() -> None:
    assert jax.__version__ == "0.7.2", jax.__version__
    assert jax.device_count() == 8
    results = {name: describe(run(jax.pmap)) for name, run in CASES.items()}
    lines = [f"{json.dumps(name)}: {json.dumps(result)}" for name, result in results.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    record()
