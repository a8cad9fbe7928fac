"""For tests: simulated devices, comparisons with `jax.pmap`, processes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_dist
from jax_dist._exceptions import text_of
from jax_dist._test_processes import Outcome, run_processes
from jax_dist.errors import refusal

__all__ = (
    "Outcome",
    "assert_same_as_pmap",
    "run_processes",
    "simulated_devices",
)


def simulated_devices(count: int = 8) -> None:
    """Makes this process see simulated CPU devices, and no others.

    Call it at the top of conftest.py, before anything computes with JAX. If JAX is already running,
    it only checks the devices.

    Args:
      count: how many devices to simulate.

    Raises:
      RuntimeError: JAX is already running with other devices.

    >>> simulated_devices(8)
    >>> jax.device_count()
    8
    """
    number = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    try:
        jax.config.update("jax_num_cpu_devices", number + 1)
    except RuntimeError:  # JAX refuses another number once it has chosen its devices
        if (jax.default_backend(), jax.local_device_count()) == ("cpu", count):
            return
    else:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)  # this goes before XLA_FLAGS
        return
    raise refusal(
        RuntimeError,
        what=f"simulated_devices({count}) comes too late",
        which=[f"JAX runs with {jax.local_device_count()} {jax.default_backend()} devices"],
        why="JAX chooses its devices once, when it is first used",
        do="Call it at the top of conftest.py, before anything computes, or set "
        f"JAX_NUM_CPU_DEVICES={count} and JAX_PLATFORMS=cpu in the environment.",
    )


def assert_same_as_pmap(
    fun: Callable,
    *args: Any,
    axis_name: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    pmap: Callable | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
    **pmap_options: Any,
) -> Any:
    """Calls a function mapped by `jax.pmap` and by `jax_dist.pmap`, and compares the results.

    It compares the structure, and for each array the shape, dtype, weak type, values, and which
    device holds which slice. If `jax.pmap` raises, the other must raise too: an error of the same
    class or of a subclass, or any ValueError for a ValueError.

    Args:
      fun: the function to map.
      *args: its arguments. Donated ones are copied, and stay usable.
      axis_name: names the mapped axis, as in `pmap`.
      kwargs: its keyword arguments.
      pmap: what to compare with `jax.pmap`; `jax_dist.pmap` if not given.
      rtol: how far values may differ, relative to what `jax.pmap` computes.
      atol: how far they may differ besides. With both 0, they must be equal; NaN equals NaN.
      **pmap_options: further options for both, such as `in_axes` and `donate_argnums`.

    Returns:
      The result of the other pmap; None if both raised.

    Raises:
      AssertionError: they differ. The message lists all differences.

    >>> assert_same_as_pmap(lambda x: x / jax.lax.psum(x, "i"), np.ones(8), axis_name="i").tolist()
    [0.125, 0.125, 0.125, 0.125, 0.125, 0.125, 0.125, 0.125]
    """
    other = jax_dist.pmap if pmap is None else pmap
    donated = pmap_options.get("donate_argnums", ())
    donated = {donated} if isinstance(donated, int) else set(donated)
    copy = lambda leaf: leaf.copy() if isinstance(leaf, jax.Array | np.ndarray) else leaf

    def attempt(pmap: Callable) -> tuple[Any, Exception | None]:
        given = [jax.tree.map(copy, arg) if i in donated else arg for i, arg in enumerate(args)]
        try:
            mapped = pmap(fun, axis_name, **pmap_options)
            return jax.block_until_ready(mapped(*given, **(kwargs or {}))), None
        except Exception as error:  # noqa: BLE001  # whatever it raises is compared
            return None, error

    expected, expected_error = attempt(jax.pmap)
    result, error = attempt(other)
    kind = ValueError if isinstance(expected_error, ValueError) else type(expected_error)
    differences: Sequence[str] = ()
    if error is None and expected_error is None:
        differences = list(_differences(result, expected, rtol, atol))
    elif expected_error is None:
        differences = [f"it raises {_summary(error)}, jax.pmap does not"]
    elif error is None:
        differences = [f"jax.pmap raises {_summary(expected_error)}, it does not"]
    elif not isinstance(error, kind):
        differences = [f"it raises {_summary(error)}, jax.pmap {_summary(expected_error)}"]
    if differences:
        raise refusal(
            AssertionError,
            what=f"pmap of '{getattr(fun, '__name__', fun)}' is not the same as jax.pmap of it",
            which=differences,
            why="it stands in for jax.pmap, with the same values in the same places",
            do="Give rtol or atol if values may differ by rounding; the rest must be the same.",
        ) from error
    return result


def _summary(error: Exception | None) -> str:
    text = "" if error is None else text_of(error).partition("\n")[0]
    return f"{type(error).__name__}({text!r})"


def _differences(result: Any, expected: Any, rtol: float, atol: float) -> Iterator[str]:
    structure, expected_structure = jax.tree.structure(result), jax.tree.structure(expected)
    if structure != expected_structure:
        yield f"result: structure {structure}, with jax.pmap {expected_structure}"
        return
    paths = jax.tree_util.tree_leaves_with_path(result)
    for (path, leaf), expected_leaf in zip(paths, jax.tree.leaves(expected), strict=True):
        for difference in _leaf_differences(leaf, expected_leaf, rtol, atol):
            yield f"result{jax.tree_util.keystr(path)}: {difference}"


def _leaf_differences(leaf: Any, expected: Any, rtol: float, atol: float) -> Iterator[str]:
    if isinstance(leaf, jax.Array) != isinstance(expected, jax.Array):
        yield f"class {type(leaf).__name__}, with jax.pmap {type(expected).__name__}"
        return
    if leaf.dtype != expected.dtype:
        yield f"dtype {leaf.dtype}, with jax.pmap {expected.dtype}"
    if leaf.shape != expected.shape:
        yield f"shape {leaf.shape}, with jax.pmap {expected.shape}"
    elif leaf.dtype == expected.dtype:
        yield from _value_differences(leaf, expected, rtol, atol)
    if isinstance(leaf, jax.Array):
        weak, expected_weak = jax.typeof(leaf).weak_type, jax.typeof(expected).weak_type
        if weak != expected_weak:
            yield f"weak type {weak}, with jax.pmap {expected_weak}"
        if leaf.shape == expected.shape:
            held, expected_held = _placement(leaf), _placement(expected)
            wrong = [device for device in held if held[device] != expected_held.get(device)]
            if list(held) != list(expected_held):
                yield f"slices on devices {list(held)}, with jax.pmap {list(expected_held)}"
            elif wrong:
                first, there = held[wrong[0]], expected_held[wrong[0]]
                yield f"device {wrong[0]} holds {first}, with jax.pmap {there}"


def _value_differences(leaf: Any, other: Any, rtol: float, atol: float) -> Iterator[str]:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf, other = jax.random.key_data(leaf), jax.random.key_data(other)
    values, expected = np.asarray(leaf), np.asarray(other)
    same = (values == expected) | ((values != values) & (expected != expected))  # NaN is not itself
    if rtol or atol:
        wide = [each.astype(np.complex128) for each in (values, expected)]  # any number fits
        same |= np.isclose(*wide, rtol=rtol, atol=atol)
    wrong = np.argwhere(~same)
    if len(wrong):
        at = tuple(wrong[0].tolist())
        yield (
            f"{len(wrong)} of {same.size} values differ, first at {list(at)}: "
            f"{values[at]}, with jax.pmap {expected[at]}"
        )


def _placement(array: jax.Array) -> dict[int, str]:
    """Device to slice, in the order of the mesh, as in `{0: "[0:1, 0:3]", 1: "[1:2, 0:3]"}`."""
    placement = {}
    for shard in array.addressable_shards:
        # Not strict: the index of an array of keys also has the dimensions of one key.
        sides = zip(shard.index, array.shape, strict=False)
        bounds = []
        for side, size in sides:
            # One form for what is written in several: `0`, `0:1` and `:` of a dimension of size 1.
            whole = slice(side, side + 1) if isinstance(side, int) else side
            bounds.append("{}:{}".format(*whole.indices(size)))
        placement[shard.device.id] = f"[{', '.join(bounds)}]"
    return placement
