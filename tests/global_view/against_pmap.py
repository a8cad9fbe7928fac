"""The same step as pmap runs it, and in the global view, compared to the bit.

XLA fuses a multiplication and an addition into one operation of one rounding wherever they come to
stand in one loop, which is a matter of the program around them; `jax.pmap` in another program gives
other last bits, too. So both are compiled without its fusions, and without the small loops that XLA
on CPU compiles as one function each. Nor with its library of kernels for sums: that adds up in
another order than XLA does, and is asked only where an operand lies in memory by its dimensions.
The older code generator, which the tests ask for where there is one, is wrong without fusions: with
it and jax 0.10.2, a drawn step lost the fourth digit.
"""

import importlib.metadata
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from packaging.version import Version

from jax_dist import global_view

PLAIN: Any = {
    "xla_disable_hlo_passes": "fusion,small-while-loop-hoisting",
    "xla_cpu_experimental_ynn_fusion_type": "",
}
if Version(importlib.metadata.version("jaxlib")) < Version("0.11"):  # unknown in 0.12
    PLAIN["xla_cpu_use_fusion_emitters"] = True


def mesh_of(**sizes: int) -> Mesh:
    """Return a mesh of all devices: `mesh_of(i=4, model=2)`."""
    return Mesh(np.array(jax.devices()).reshape(*sizes.values()), tuple(sizes))


def stacked(state: Any, count: int = 8) -> Any:
    """Return the state as `flax.jax_utils.replicate` gives it."""
    return jax.tree.map(lambda leaf: jnp.stack([jnp.asarray(leaf)] * count), state)


def as_pmap(tree: Any, like: Any) -> Any:
    """Return leaves `[*s]` of the global view as the `[N, *s]` of pmap."""
    stack = lambda leaf, other: leaf if leaf.shape == other.shape else stacked(leaf, len(other))
    return jax.tree.map(stack, tree, like)


def assert_same(got: Any, wanted: Any, bound: float = 0) -> None:
    """Assert that leaves are equal to the bit, or to a part of the largest number of the leaf.

    A leaf of whole numbers, or of a key, has the same bits either way.
    """
    leaves = jax.tree.leaves(as_pmap(got, wanted))
    for (path, theirs), ours in zip(jax.tree.leaves_with_path(wanted), leaves, strict=True):
        name = jax.tree_util.keystr(path)
        if bound and jnp.issubdtype(theirs.dtype, jnp.inexact):
            theirs = np.asarray(theirs)
            atol = bound * float(np.abs(theirs).max(initial=0))
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol, err_msg=name)
            continue
        if jnp.issubdtype(theirs.dtype, jax.dtypes.prng_key):
            theirs, ours = jax.random.key_data(theirs), jax.random.key_data(ours)
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), name
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes(), name


def memory_of(compiled: jax.stages.Compiled) -> int:
    """Return the bytes of arguments and temporary arrays on one device."""
    analysis: Any = compiled.memory_analysis()
    return analysis.argument_size_in_bytes + analysis.temp_size_in_bytes


def compare(
    step: Callable,
    state: Any,
    *batch: Any,
    times: int = 2,
    slices: Any = False,
    bound: float = 0,
    scanned: bool = False,
    **options: Any,
) -> Any:
    """Run a step several times under pmap and in a view; return the view.

    Args:
      step: of one device, over an axis "i".
      state: as it starts.
      *batch: `[N, ...]`, for the first N devices under pmap.
      times: how often it is run.
      slices: of each leaf of the state, whether it is `[N, *s]` already, as `place` takes it.
      bound: 0 if all bits are to be those of pmap; else the difference that a leaf may have.
      scanned: whether the view runs in a scan of one program, and not in one program for each step.
      **options: of `global_view`.
    """
    count = len(jax.tree.leaves(batch)[0])
    copy = lambda flag, leaf: leaf if flag else stacked(leaf, count)
    reference = jax.tree.map(copy, jax.tree.broadcast(slices, state), state)
    mapped = jax.pmap(step, axis_name="i", devices=jax.devices()[:count])
    pmapped = jax.jit(mapped).lower(reference, *batch).compile(compiler_options=PLAIN)
    view = global_view(step, "i", **{"captures": "allow", **options})
    placed = view.place(state, *batch, stacked=slices)
    if scanned:
        turns = jax.tree.map(lambda leaf: np.stack([leaf] * times), batch)
        loop = jax.jit(lambda state, turns: lax.scan(lambda s, one: view(s, *one), state, turns))
        program = loop.lower(placed, turns).compile(compiler_options=PLAIN)
        placed, rest = program(placed, turns)
        for turn in range(times):
            reference, wanted = pmapped(reference, *batch)
            assert_same(jax.tree.map(lambda leaf, turn=turn: leaf[turn], rest), wanted, bound)
        assert_same(placed, reference, bound)
        return view
    program = view.lower(placed, *batch).compile(compiler_options=PLAIN)
    placed_batch = jax.device_put(batch, program.input_shardings[0][1:])
    for _ in range(times):
        wanted, got = pmapped(reference, *batch), program(placed, *placed_batch)
        assert_same(got, wanted, bound)
        reference = wanted[0] if isinstance(wanted, tuple) else wanted
        placed = got[0] if isinstance(got, tuple) else got
    return view
