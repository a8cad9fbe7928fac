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
from packaging.version import Version

from jax_dist import global_view

PLAIN: Any = {
    "xla_disable_hlo_passes": "fusion,small-while-loop-hoisting",
    "xla_cpu_experimental_ynn_fusion_type": "",
}
if Version(importlib.metadata.version("jaxlib")) < Version("0.11"):  # unknown in 0.12
    PLAIN["xla_cpu_use_fusion_emitters"] = True
DEVICES = 8


def stacked(state: Any, count: int = DEVICES) -> Any:
    """As `flax.jax_utils.replicate` gives it."""
    return jax.tree.map(lambda leaf: jnp.stack([jnp.asarray(leaf)] * count), state)


def bits(array: Any) -> tuple[Any, ...]:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    array = np.asarray(array)
    return array.shape, str(array.dtype), array.tobytes()


def as_pmap(tree: Any, like: Any) -> Any:
    """`[*s]` of the global view as the `[N, *s]` of pmap."""

    def again(leaf: Any, other: Any) -> Any:
        return leaf if leaf.shape == other.shape else stacked(leaf, len(other))

    return jax.tree.map(again, tree, like)


def assert_same(got: Any, wanted: Any, bound: float = 0) -> None:
    """Equal to the bit; or each leaf to a part of its largest number. What is shared has one value.

    A leaf of whole numbers, or of a key, has the same bits either way.
    """
    paired = zip(
        jax.tree.leaves_with_path(wanted), jax.tree.leaves(as_pmap(got, wanted)), strict=True
    )
    for (path, one), other in paired:
        name = jax.tree_util.keystr(path)
        if not bound or not jnp.issubdtype(one.dtype, jnp.inexact):
            assert bits(one) == bits(other), name
            continue
        theirs = np.asarray(one)
        largest = float(np.abs(theirs).max(initial=0))
        np.testing.assert_allclose(other, theirs, rtol=0, atol=bound * largest, err_msg=name)


def compare(
    step: Callable,
    state: Any,
    *batch: Any,
    times: int = 2,
    axis_name: str = "i",
    slices: Any = False,
    bound: float = 0,
    scanned: bool = False,
    **options: Any,
) -> Any:
    """Run a step so often, both ways; gives the view and its last state.

    Args:
      step: of one device.
      state: as it starts.
      *batch: `[N, ...]`, for the first N devices under pmap.
      times: how often it is run.
      axis_name: the mapped axis.
      slices: of each leaf of the state, whether it is `[N, *s]` already, as `place` takes it.
      bound: 0 if all bits are to be those of pmap; else the difference that a leaf may have.
      scanned: whether the view runs in a scan of one program, and not in one program for each step.
      **options: of `global_view`.
    """
    count = len(jax.tree.leaves(batch)[0])
    copy = lambda flag, leaf: leaf if flag else stacked(leaf, count)
    reference = jax.tree.map(copy, jax.tree.broadcast(slices, state), state)
    mapped = jax.pmap(step, axis_name=axis_name, devices=jax.devices()[:count])
    pmapped = jax.jit(mapped).lower(reference, *batch).compile(compiler_options=PLAIN)
    view = global_view(step, axis_name, **{"captures": "allow", **options})
    placed = view.place(state, *batch, stacked=slices)
    if scanned:
        turns = jax.tree.map(lambda leaf: np.stack([leaf] * times), batch)
        run = jax.jit(
            lambda placed, turns: lax.scan(lambda state, one: view(state, *one), placed, turns)
        )
        program = run.lower(placed, turns).compile(compiler_options=PLAIN)
        placed, rest = program(placed, turns)
        for turn in range(times):
            reference, wanted = pmapped(reference, *batch)
            assert_same(jax.tree.map(lambda leaf, turn=turn: leaf[turn], rest), wanted, bound)
        assert_same(placed, reference, bound)
        return view, placed
    seen = view.lower(placed, *batch).compile(compiler_options=PLAIN)
    others = [
        jax.device_put(leaf, sharding)
        for leaf, sharding in zip(jax.tree.leaves(batch), _of_batch(view, placed), strict=True)
    ]
    others = jax.tree.unflatten(jax.tree.structure(batch), others)
    for _ in range(times):
        wanted = pmapped(reference, *batch)
        got = seen(placed, *others)
        assert_same(got, wanted, bound)
        reference = wanted[0] if isinstance(wanted, tuple) else wanted
        placed = got[0] if isinstance(got, tuple) else got
    return view, placed


def _of_batch(view: Any, state: Any) -> list[Any]:
    """How the arguments after the state are wanted."""
    layouts = view._signatures.last.in_layouts[len(jax.tree.leaves(state)) :]
    return [sharding for _, sharding in layouts]
