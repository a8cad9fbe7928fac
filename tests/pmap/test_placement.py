"""replicate, unreplicate, shard, and the functions that JAX 0.10 removed."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from watching import lies_on, mesh, put

import jax_dist

_TREE = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": 3, "b": jnp.ones(4, jnp.int8)}
_EIGHT = np.arange(8, dtype=np.float32)


def test_replicate_puts_a_copy_on_each_device_on_some_or_on_those_of_a_mesh():
    result = jax_dist.replicate(_TREE)
    some = jax_dist.replicate(1.0, jax.devices()[2:5])

    chex.assert_trees_all_equal(result, _TREE)
    for leaf in jax.tree.leaves(result):
        assert leaf.sharding.is_fully_replicated
        assert [shard.device for shard in leaf.addressable_shards] == jax.devices()
    assert [shard.device for shard in some.addressable_shards] == jax.devices()[2:5]
    assert jax_dist.replicate(1.0, mesh("i")).sharding == NamedSharding(mesh("i"), P())
    mapped = jax_dist.pmap(lambda t, x: t["w"].sum() + x, in_axes=(None, 0))
    assert mapped(result, np.zeros(8)).tolist() == [15.0] * 8


def test_shard_cuts_by_one_spec_or_by_a_tree_of_them():
    x = np.arange(16, dtype=np.float32).reshape(8, 2)

    one = jax_dist.shard({"a": x, "b": x}, mesh("i"), P("i"))
    several = jax_dist.shard({"a": x, "b": x.T}, mesh("i"), {"a": P("i"), "b": P(None, "i")})

    assert one["b"].sharding.spec == P("i")
    assert several["b"].sharding.spec == P(None, "i")
    chex.assert_trees_all_equal(several, {"a": x, "b": x.T})


def test_shard_without_a_mesh_splits_a_batch_over_the_devices():
    batch = {"x": np.arange(48, dtype=np.float32).reshape(16, 3), "y": np.arange(16)}

    placed = jax_dist.shard(batch)

    rows = jax.tree.map(lambda x: x.reshape(8, 2, *x.shape[1:]), batch)
    chex.assert_trees_all_equal(placed, rows)
    for leaf in jax.tree.leaves(placed):
        lies_on(leaf, jax.devices())
    with jax.transfer_guard("disallow"):
        jax_dist.pmap(lambda b: b["x"] * 2)(placed)


def test_unreplicate_reads_one_device_only():
    stacked = jax_dist.pmap(lambda x: {"x": x, "y": (x + 1)[None]})(_EIGHT)

    with jax.transfer_guard_device_to_device("disallow"):
        result = jax_dist.unreplicate(stacked)

    chex.assert_trees_all_equal(result, {"x": jnp.float32(0), "y": jnp.ones(1)})
    assert all(leaf.devices() == {jax.devices()[0]} for leaf in jax.tree.leaves(result))


_SQUARE = np.arange(64.0, dtype=np.float32).reshape(8, 8)
_CUTS = (P("i", "j"), P(None, "i"), P(("i", "j")), P(None, ("i", "j")), P("j", "i"), P(None), P())
_STACKED = {  # arrays whose first slice is on one device or in parts on several
    **{
        f"cut {cut}": lambda cut=cut: put(_SQUARE, mesh("i", "j", shape=(2, 4)), *cut)
        for cut in _CUTS
    },
    "nested": lambda: jax_dist.pmap(jax_dist.pmap(lambda v: v + 1))(_SQUARE[:2, :4]),
    "out_axes=1": lambda: jax_dist.pmap(lambda v: v + jnp.arange(8.0), out_axes=1)(_EIGHT),
    "made from that": lambda: 1 + jax_dist.pmap(lambda v: v + jnp.arange(8.0), out_axes=1)(_EIGHT),
}


@pytest.mark.parametrize("name", _STACKED)
def test_unreplicate_gives_the_whole_slice_however_the_array_is_cut(name):
    array = _STACKED[name]()
    first = jax_dist.unreplicate(array)

    np.testing.assert_array_equal(first, np.asarray(array)[0])
    assert name == "nested" or len(first.devices()) == 1


@pytest.mark.parametrize("value", [3, 3.0, 3j, True, np.float32(3), jnp.asarray(3.0), jnp.ones(2)])
def test_weak_types_stay(value):
    stacked = jax_dist.device_put_replicated(value, jax.devices())

    for result in (
        stacked,
        jax_dist.device_put_sharded([value] * 8, jax.devices()),
        jax_dist.unreplicate(stacked),
        jax_dist.pmap(lambda x: x)(stacked),
        jax_dist.replicate(value),
    ):
        assert result.weak_type == jnp.asarray(value).weak_type
        assert result.dtype == jnp.asarray(value).dtype


def test_keys_can_be_put_too():
    keys = jax.random.split(jax.random.key(0), 8)

    copies = jax_dist.device_put_replicated(keys[3], jax.devices()[1:4])
    parts = jax_dist.device_put_sharded(list(keys), jax.devices())

    lies_on(copies, jax.devices()[1:4])
    assert (copies == keys[3]).all()
    assert (parts == keys).all()
    assert jax_dist.replicate(keys[3]) == keys[3]
    assert jax_dist.unreplicate(parts) == keys[0]
    bits = jax_dist.pmap(jax.random.bits)(parts)
    assert bits.tolist() == jax.vmap(jax.random.bits)(keys).tolist()


_OWN = {
    "NumPy": lambda ones: ones((8, 64)),
    "a view": lambda ones: ones((16, 64))[8:],
    "uncommitted": lambda _: jnp.ones((8, 64)),
    "on device 3": lambda _: jax.device_put(jnp.ones((8, 64)), jax.devices()[3]),
    "cut": lambda _: put(jnp.ones((8, 64)), mesh("i"), "i"),
    "on a mesh of other names": lambda _: put(jnp.ones((8, 64)), mesh("j"), "j"),
    "replicated": lambda _: put(jnp.ones((8, 64)), mesh("i")),
}
_PUT = {
    "replicate": jax_dist.replicate,
    "replicate on one": lambda tree: jax_dist.replicate(tree, jax.devices()[:1]),
    "shard": lambda tree: jax_dist.shard(tree, mesh("i"), P("i")),
    "shard, whole": lambda tree: jax_dist.shard(tree, mesh("i"), P()),
    "put replicated": lambda tree: jax_dist.device_put_replicated(tree, jax.devices()),
    "put sharded": lambda tree: jax_dist.device_put_sharded([tree] * 8, jax.devices()),
    "put sharded on one": lambda tree: jax_dist.device_put_sharded([tree], jax.devices()[:1]),
}


@pytest.mark.parametrize("own", _OWN)
@pytest.mark.parametrize("put", _PUT)
def test_what_is_put_shares_no_memory_with_what_the_user_has(put, own, shared_ones):
    tree = {"a": _OWN[own](shared_ones)}

    placed = _PUT[put](tree)
    if isinstance(tree["a"], np.ndarray):
        tree["a"][:] = 7
        assert np.asarray(placed["a"]).max() == 1
        tree["a"][:] = 1
    step = jax.jit(lambda tree: {"a": tree["a"] + 1}, donate_argnums=0)
    assert np.asarray(step(placed)["a"]).min() == 2

    assert np.asarray(tree["a"]).sum() == 8 * 64
