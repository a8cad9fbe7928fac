"""What the processes run in the tests of pmap in several; here, so that they import no pytest.

Each process reports the slices that it holds, as plain data.
"""

import warnings
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_dist


def _own(*shape: int) -> np.ndarray:
    """Return the slices of this process of `arange` over `[8, *shape]`."""
    whole = np.arange(8 * int(np.prod(shape)), dtype=np.float32).reshape(8, *shape)
    local = jax.local_device_count()
    start = jax.process_index() * local
    return whole[start : start + local]


def _slices(array: jax.Array) -> list:
    """Return the values on the devices of this process, in order, as nested lists."""
    whole = np.zeros(array.shape, array.dtype)
    held = np.zeros(len(whole), bool)
    for shard in array.addressable_shards:
        whole[shard.index] = shard.data
        held[shard.index[0]] = True
    return whole[held].tolist()


def _psum(x: jax.Array) -> jax.Array:
    return lax.psum(x, "i")


def _step(x: jax.Array) -> jax.Array:
    return lax.psum(x, "i") / 8 + x


def _nested(x: jax.Array) -> jax.Array:
    return jax_dist.pmap(lambda y: lax.psum(y, ("i", "j")) + lax.axis_index("j"), "j")(x)


def rows(names: Collection[str] = ()) -> dict[str, list]:
    """Run in every process: each row the slices that it holds of the result; these, or all."""
    total = jax_dist.pmap(_psum, "i")
    step = jax_dist.pmap(_step, "i")
    square = jax_dist.pmap(lambda x: lax.psum(x, "i") ** 2, "i")
    weighted = jax_dist.pmap(lambda x: x * lax.psum(x, "i"), "i")
    warnings.filterwarnings("ignore", "JXD401")
    x, key = _own(), jax.random.key(3)
    weak = jnp.full((300,), 2.5)
    weak_there = jax.device_put(weak, jax.local_devices()[-1])
    calls: dict[str, Callable[[], jax.Array]] = {
        "alone": lambda: total(x),
        "jit": lambda: jax.jit(total)(x),
        "scan": lambda: lax.scan(lambda c, _: (step(c), None), x, None, length=3)[0],
        "jit(scan)": lambda: jax.jit(
            lambda x: lax.scan(lambda c, _: (step(c), None), x, None, length=3)[0]
        )(x),
        "fori_loop": lambda: lax.fori_loop(0, 3, lambda _, c: step(c), x),
        "while_loop": lambda: lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, step(c[1])), (0, x)
        )[1],
        "cond": lambda: jax.jit(lambda x: lax.cond(x[0] < 100, total, lambda x: x, x))(x),
        "grad": lambda: jax.grad(lambda x: square(x).sum())(x),
        "jit(grad)": lambda: jax.jit(jax.grad(lambda x: (weighted(x) ** 2).sum()))(x),
        "jvp": lambda: jax.jvp(weighted, (x,), (x + 1,))[1],
        "vmap": lambda: jax.vmap(total, in_axes=1, out_axes=1)(np.stack([x, 2 * x], 1)),
        "vmap(grad)": lambda: jax.vmap(jax.grad(lambda x: square(x).sum()), in_axes=1, out_axes=1)(
            np.stack([x, 2 * x], 1)
        ),
        "nested": lambda: jax_dist.pmap(_nested, "i")(_own().reshape(-1, 2)),
        "jit(nested)": lambda: jax.jit(jax_dist.pmap(_nested, "i"))(_own().reshape(-1, 2)),
        "another mesh set": lambda: _under_another_mesh(total, x),
        "misplaced": lambda: total(jax.device_put(x, jax.local_devices()[-1])),
        "index": lambda: jax_dist.pmap(lambda x: x * 0 + lax.axis_index("i"), "i")(x),
        "ppermute": lambda: jax_dist.pmap(
            lambda x: lax.ppermute(x, "i", [(k, (k + 1) % 8) for k in range(8)]), "i"
        )(x),
        "all_gather": lambda: jax_dist.pmap(lambda x: lax.all_gather(x, "i"), "i")(x),
        "second axis": lambda: jax_dist.pmap(_step, "i", in_axes=1)(_own(3).T),
        "integers under jit": lambda: jax.jit(total)(x.astype(np.int32)),
        "keys": lambda: jax_dist.pmap(
            lambda key: jax.random.uniform(jax.random.fold_in(key, lax.axis_index("i"))), "i"
        )(jax.random.split(jax.random.key(0), len(x))),
        "a captured key": lambda: jax_dist.pmap(
            lambda x: x + jax.random.uniform(jax.random.fold_in(key, lax.axis_index("i"))), "i"
        )(x),
        "captured, of weak type": lambda: jax_dist.pmap(lambda x: x + weak.sum(), "i")(x),
        "the same, on a device": lambda: jax_dist.pmap(lambda x: x + weak_there.sum(), "i")(x),
    }
    return {name: _slices(calls[name]()) for name in names or calls}


# Where it matters how many processes there are, and not only that there are several.
IN_FOUR = ("alone", "jit(scan)", "jit(grad)", "nested", "another mesh set", "ppermute")


def rows_in_four() -> dict[str, list]:
    """Run in every process: a few of the rows."""
    return rows(IN_FOUR)


def _under_another_mesh(mapped: Callable, x: np.ndarray) -> jax.Array:
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    with jax.set_mesh(mesh):
        return mapped(x)


def parts() -> dict[str, Any]:
    """Run in each of two processes: the rows, and all that is below, in one job."""
    tasks = (rows, local_view, own_values, global_arrays, mistakes)
    return {task.__name__: task() for task in tasks}


def local_view() -> dict[str, Any]:
    """Run in every process: results look as jax.pmap's do."""
    x = _own(3)
    mapped = jax_dist.pmap(lambda x: (x * 2, lax.psum(x, "i")), "i", out_axes=(0, None))
    theirs = jax.pmap(lambda x: (x * 2, lax.psum(x, "i")), "i", out_axes=(0, None))
    ours, total = mapped(x)
    again, _ = mapped(ours)
    old, old_total = theirs(x)
    devices = [shard.device for shard in ours.addressable_shards]
    given = []
    step = jax_dist.pmap(lambda s: s + 1, "i", donate_argnums=0)
    state = jnp.zeros(jax.local_device_count())
    for _ in range(3):
        given.append(state)
        state = step(state)
    own = jax_dist.pmap(lambda x: lax.psum(x, "i"), "i", devices=jax.local_devices())(_own())
    with_default = jax_dist.pmap(lambda s, by=2.0: s * by, donate_argnums=(0, 1))
    weak = [_types(pmap) for pmap in (jax_dist.pmap, jax.pmap)]
    return {
        "same as jax.pmap": bool((ours == old).all()) and bool((total == old_total).all()),
        "fully addressable": ours.is_fully_addressable and total.is_fully_addressable,
        "on own devices": devices == jax.local_devices(),
        "fed back": bool((again == 4 * x).all()),
        "state": state.tolist(),
        "donated": [array.is_deleted() for array in given],
        "own devices only": own.tolist(),
        "donated, but left to its default": with_default(np.ones(4, np.float32)).tolist(),
        "weak types as with jax.pmap": weak[0] == weak[1],
    }


def _types(pmap: Callable) -> list[tuple]:
    """Return the weak types that body and caller see: `[L]`, captured `[300]`, replicated `[]`."""
    weak, runs = jnp.full((jax.local_device_count(),), 2.5), []
    table = jax.device_put(jnp.full((300,), 1.5), jax.local_devices()[-1])

    def body(x: jax.Array, y: jax.Array) -> tuple:
        runs.append((jax.typeof(x).weak_type, jax.typeof(y).weak_type))
        return x * 2, table, x * jnp.bfloat16(1), jnp.full((3,), 2.0), y

    mapped = pmap(body, "i", in_axes=(0, None))
    results = mapped(weak, 2.0)
    results = [*results, *mapped(results[0], 2.0)]
    return [*runs[:1], *((each.dtype.name, each.weak_type) for each in results)]


def own_values() -> dict[str, Any]:
    """Run in every process: each captures values of its own, as a constant of jax.pmap's."""
    warnings.filterwarnings("ignore", "JXD401")
    rank, x = jax.process_index(), _own()
    own = jax.device_put(jnp.full((300,), 1.0 + rank), jax.local_devices()[rank])
    summed = [
        pmap(lambda x: lax.psum(x + own.sum(), "i"), "i")(x).tolist()
        for pmap in (jax_dist.pmap, jax.pmap)
    ]
    # Nobody waits for a process that runs a program without collectives alone.
    alone = jax_dist.pmap(lambda x: x + own.sum(), "i")(x).tolist() if rank == 0 else None
    return {"summed": summed[0], "as with jax.pmap": summed[0] == summed[1], "alone": alone}


def global_arrays() -> dict[str, Any]:
    """Run in every process: arrays="global"."""
    step = jax_dist.pmap(lambda s, b: s + lax.psum(b, "i"), "i", arrays="global", donate_argnums=0)
    state: Any = np.zeros(jax.local_device_count(), np.float32)
    for _ in range(3):
        state = step(state, _own())  # the batch is NumPy and holds the slices of this process
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("z",))
    spec = jax.sharding.PartitionSpec("z")
    placed = jax_dist.shard(_own(), mesh, spec)
    return {
        "whole": (state.shape, state.is_fully_addressable),
        "state": _slices(state),
        "from shard": _slices(jax_dist.pmap(_psum, "i", arrays="global")(placed)),
        "in jit": _slices(jax.jit(jax_dist.pmap(_psum, "i", arrays="global"))(placed)),
    }


def mistakes() -> list[str]:
    """Run in every process: the errors of calls that cannot be right."""
    x = _own()
    local = jax_dist.pmap(lambda x, y: x + y, "i")
    whole = jax_dist.pmap(lambda x, y: x + y, "i", arrays="global")
    mapped = jax_dist.pmap(_psum, "i")
    scattered = [d for pair in zip(jax.devices()[:4], jax.devices()[4:], strict=True) for d in pair]
    calls = [
        lambda: local(x, np.ones(5)),
        lambda: local(x, np.ones(8)),
        lambda: whole(x, np.ones(3)),
        lambda: mapped(np.ones(6)),
        lambda: mapped(np.ones(8)),
        lambda: jax_dist.pmap(_psum, "i", arrays="global")(np.ones(8)),
        lambda: jax.grad(lambda x: mapped(x).sum())(mapped(x)),
        lambda: jax.jit(jax_dist.pmap(_psum, "i", arrays="global"))(np.ones(7)),
        lambda: jax.jit(jax_dist.pmap(_psum, "i", devices=scattered))(x),
        lambda: jax_dist.pmap(_psum, "i", axis_size=4)(x),
        lambda: jax_dist.device_put_replicated(x, jax.devices()),
    ]
    texts = []
    for call in calls:
        try:
            call()
        except ValueError as error:
            texts.append(f"{type(error).__name__}: {error}")
        else:
            texts.append("no error")
    assert _slices(mapped(x)) == [28.0] * 4  # and all processes can go on
    return texts
