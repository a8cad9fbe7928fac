"""Steps x shardings: the numbers are those of pmap."""

import itertools

import jax
import pytest
from against_pmap import compare, mesh_of
from jax.sharding import PartitionSpec as P
from steps import CASES, LAYERED, LOSSES, ROWS, with_loss


def _two_dimensions(path, leaf):
    return P("i", "model") if leaf.ndim == 2 and min(leaf.shape) >= 8 else P()


EXACT = {"gradients": "reduce"}
FSDP = {"shardings": "fsdp", **EXACT}
HSDP = {"mesh": mesh_of(replica=2, shard=4), "mesh_axes": ("replica", "shard"), "regather": True}
MODEL = {"mesh": mesh_of(i=4, model=2), "shardings": _two_dimensions}
# Of each: the number of devices along the mapped axis, the bound, and the options. A sum over
# shards, as a norm is one, and one that XLA shards over model axes, has another order.
SHARDINGS = {
    "replicated": (8, 0, {}),
    "fsdp": (8, 0, FSDP),
    "scattered": (8, 1e-5, {"shardings": "fsdp"}),
    "regather": (8, 0, {**FSDP, "regather": True}),
    "renamed": (8, 0, {**FSDP, "mesh": mesh_of(data=8), "mesh_axes": ("data",)}),
    "hsdp": (8, 0, {**FSDP, **HSDP}),
    "model, whole": (4, 0, {**MODEL, **EXACT}),
    "model": (4, 2e-3, MODEL),
}
QUICK = {
    ("skips", "fsdp"),
    ("MultiSteps", "scattered"),
    ("layer scan", "regather"),
    ("unsynchronized", "hsdp"),
    ("adam", "model"),
    ("rows", "renamed"),
}
# XLA for CPU in jax 0.12 rounds quotients by roots otherwise in shards of some shapes.
ROOTS = {"adam", "MultiSteps", "clip", "apply_if_finite"}
# A leaf that varies cannot be sharded by a rule over the axis along which it varies.
UNSUITED = {("flax", "model"), ("flax", "model, whole")}


@pytest.mark.parametrize(
    ("case", "sharding"),
    [
        pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.thorough)
        for pair in itertools.product(CASES, SHARDINGS)
        if pair not in UNSUITED
    ],
)
def test_the_numbers_are_those_of_pmap(case, sharding):
    step, state, batch = CASES[case]()
    count, bound, options = SHARDINGS[sharding]
    if case in ROOTS and sharding == "hsdp" and jax.__version_info__ >= (0, 12):
        bound = 1e-6
    batch = jax.tree.map(lambda leaf: leaf[:count], batch)
    compare(step, state, *batch, bound=bound, **options)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "checkpoints"])
def test_the_numbers_are_those_of_pmap_where_each_device_holds_a_layer(name):
    rule = lambda path, leaf: P("i") if leaf.ndim else P()
    step, w = with_loss(LOSSES[name]), LAYERED[:2].repeat(4, 0)
    compare(step, w, ROWS, shardings=rule, regather=True, **EXACT)
