"""The same step as pmap runs it, and in the global view, compared to the bit.

XLA fuses a multiplication and an addition into one operation of one rounding wherever they come to
stand in one loop, which is a matter of the program around them; `jax.pmap` in another program gives
other last bits, too. So both are compiled without its fusions, and without the small loops that XLA
on CPU compiles as one function each. The older code generator, which the tests ask for where there
is one, is wrong without fusions: with it and jax 0.10.2, a drawn step lost the fourth digit.
"""

import importlib.metadata
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from packaging.version import Version

from jax_dist import global_view

PLAIN: Any = {"xla_disable_hlo_passes": "fusion,small-while-loop-hoisting"}
if Version(importlib.metadata.version("jaxlib")) < Version("0.11"):  # unknown in 0.12
    PLAIN["xla_cpu_use_fusion_emitters"] = True
DEVICES = 8


def stacked(state: Any) -> Any:
    """As `flax.jax_utils.replicate` gives it."""
    return jax.tree.map(lambda leaf: jnp.stack([jnp.asarray(leaf)] * DEVICES), state)


def bits(array: Any) -> tuple[Any, ...]:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    array = np.asarray(array)
    return array.shape, str(array.dtype), array.tobytes()


def as_pmap(tree: Any, like: Any) -> Any:
    """`[*s]` of the global view as the `[N, *s]` of pmap."""

    def again(leaf: Any, other: Any) -> Any:
        return leaf if leaf.shape == other.shape else stacked(leaf)

    return jax.tree.map(again, tree, like)


def assert_same(got: Any, wanted: Any) -> None:
    """Equal to the bit; what is shared has one value instead of N."""
    paired = zip(
        jax.tree.leaves_with_path(wanted), jax.tree.leaves(as_pmap(got, wanted)), strict=True
    )
    for (path, one), other in paired:
        assert bits(one) == bits(other), jax.tree_util.keystr(path)


def compare(
    step: Callable, state: Any, *batch: Any, times: int = 2, axis_name: str = "i", **options: Any
) -> Any:
    """Runs a step so often, both ways; gives the view and its last state."""
    reference = stacked(state)
    program = jax.jit(jax.pmap(step, axis_name=axis_name)).lower(reference, *batch)
    pmapped = program.compile(compiler_options=PLAIN)
    view = global_view(step, axis_name, **{"captures": "allow", **options})
    held = view.place(state, *batch, stacked=False)
    seen = view.lower(held, *batch).compile(compiler_options=PLAIN)
    others = [
        jax.device_put(leaf, sharding)
        for leaf, sharding in zip(
            jax.tree.leaves(batch), _of_batch(view, held, len(batch)), strict=True
        )
    ]
    others = jax.tree.unflatten(jax.tree.structure(batch), others)
    for _ in range(times):
        wanted = pmapped(reference, *batch)
        got = seen(held, *others)
        assert_same(got, wanted)
        reference = wanted[0] if isinstance(wanted, tuple) else wanted
        held = got[0] if isinstance(got, tuple) else got
    return view, held


def _of_batch(view: Any, state: Any, count: int) -> list[Any]:
    """How the arguments after the state are wanted."""
    del count
    return list(view._signatures.last.in_shardings[len(jax.tree.leaves(state)) :])
