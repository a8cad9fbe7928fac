"""Replays of a step over global arrays: on the arguments that pmap had, on 1, 2 and all devices.

The bound for what may differ comes from the step itself: it runs on perturbed arguments, too.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .records import RecordedCall, RecordedLeaf, to_numpy

CALLS = 3  # how many calls of each place are replayed

_PERTURBED = 2  # runs on perturbed arguments
_FACTOR = 10.0  # by which the largest change by a perturbation may be exceeded
_LEAST = 0.1  # of the median of all results: smaller ones may be rounding errors of these
_RATIO = 1e-2  # a factor nearer than this to the number of devices counts as equal to it
_RANDOM = "it gives something else for the whole batch, likely by its random numbers"
_PRECISIONS = {"f8_": 2.0**-3, "bf16[": 2.0**-8, "f16[": 2.0**-11}


class Difference(Exception):
    """A step differs from pmap; the arguments are how, and the reason, "" if it is not known."""


def replay(
    jitted: Any,
    step: Callable[..., Any],
    options: Mapping[str, Any],
    arguments: tuple[Any, Any],
    old: RecordedCall | None,
) -> tuple[float, list[float]]:
    """Raise Difference if a step differs from what pmap gave for the same arguments.

    Returns:
      The precision of the step, by which its arguments were perturbed, and by how much of its
      largest element each result may be rounded then.

    Args:
      jitted: the program's own `jax.jit(step, **options)`, whose executable runs on all devices.
      step: the function inside of `jax.jit`.
      options: the keyword arguments of `jax.jit`, with the shardings.
      arguments: positional and by keyword, as the new program gives them.
    """
    import jax

    if jax.process_count() > 1:
        raise Difference("a plain jit is compared in one process only", "verify it in one process")
    if old is None or old.raised:
        raise Difference("pmap was not called at the same time", "")
    leaves, tree = jax.tree.flatten(arguments)
    inputs = [_reshape_recorded(*pair) for pair in zip(old.arguments, leaves, strict=True)]
    devices = jax.tree.leaves(options["in_shardings"])[0].mesh.devices.ravel()
    args, kwargs = jax.tree.unflatten(tree, inputs)
    text = str(jitted.trace(*args, **kwargs).jaxpr)
    epsilon = max([e for name, e in _PRECISIONS.items() if name in text], default=1e-7)
    results = _call(jitted, tree, inputs)
    bounds = _rounding_bounds(jitted, tree, inputs, results, epsilon)
    differences = [*_find_differences(old.results, inputs, results, bounds, len(devices))]
    if differences:
        reason = next((reason for _, reason in differences if reason), "")
        others = _call(jitted, tree, [*map(_other_key, inputs)])
        pairs = [(x, y) for x, y in zip(results, others, strict=True) if x.dtype.kind == "f"]
        if any(largest_difference(*pair) for pair in pairs):  # not if the rate of a dropout is 0
            has_key_per_device = any(x.is_keys and len(set(x.rows)) > 1 for x in old.arguments)
            reason = "keys per device" if has_key_per_device else _RANDOM
        raise Difference(differences[0][0], reason)
    for count in (n for n in (1, 2) if n < len(devices) and len(devices) % n == 0):
        fewer = _call_on_fewer(devices[:count], step, options, tree, inputs)
        for leaf, x, y, bound in zip(old.results, results, fewer, bounds, strict=True):
            if (difference := largest_difference(x, y)) > bound:
                text = f"on {count} of {len(devices)} devices, result{leaf.path} differs by up to"
                text += f" {difference:.3g}; {bound:.2g} is rounding"
                raise Difference(text, "it depends on the number of devices")
    largest = map(largest_element, results)
    return epsilon, [bound / (x or 1.0) for x, bound in zip(largest, bounds, strict=True)]


def _rounding_bounds(
    jitted: Any, tree: Any, inputs: Sequence[Any], results: Sequence[Any], epsilon: float
) -> list[float]:
    """Return by how much each result changes if inputs change by `epsilon` of themselves."""
    perturbed = [
        _call(jitted, tree, [_perturb(x, epsilon, seed) for x in inputs])
        for seed in range(1, _PERTURBED + 1)
    ]
    bounds: list[float] = []
    sizes = [largest_element(result) for result in results if result.dtype.kind == "f"]
    # Of a bias whose gradient is zero, rounding is all there is: it comes from larger numbers.
    least = _LEAST * statistics.median(sizes or [0.0])
    for result, *changed in zip(results, *perturbed, strict=True):
        bound = max(largest_difference(result, other) for other in changed)
        if result.dtype.kind == "f":
            bound = _FACTOR * (bound + epsilon * max(largest_element(result), least))
        bounds.append(bound)
    return bounds


def _reshape_recorded(old: RecordedLeaf, leaf: Any) -> Any:
    """Return an argument that pmap had, in the shape of the step's argument `leaf`.

    Of a batch [8, 4, 3] that is [32, 3]; of state with 8 equal copies, [8, ...], and of random
    keys, the first of them. Raises Difference if copies of state differ.
    """
    import jax

    if old.text is not None or not hasattr(leaf, "dtype"):  # no array
        return leaf
    is_key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    shape = jax.random.key_data(leaf).shape if is_key else leaf.shape
    array = old.load()
    is_stacked = array.shape != shape and array.shape[1:] == shape
    if is_stacked and len(set(old.rows)) > 1 and not old.is_keys:
        text = f"argument{old.path}: it differs from device to device"
        raise Difference(text, "the copies of its state differ")
    array = array[0] if is_stacked else array.reshape(shape)
    if is_key:
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf))
    array = array.astype(leaf.dtype)
    # As a Python number it keeps the type that jit compiles the program's own call for.
    return array.item() if array.ndim == 0 and getattr(leaf, "weak_type", False) else array


def _call(jitted: Any, tree: Any, inputs: Sequence[Any]) -> list[Any]:
    """Return the results of a jitted step for the leaves of its arguments, as NumPy arrays."""
    import jax
    import numpy as np

    args, kwargs = jax.tree.unflatten(tree, inputs)
    arrays = [to_numpy(leaf)[0] for leaf in jax.tree.leaves(jitted(*args, **kwargs))]
    return [x.astype(np.float32) if x.dtype.kind == "V" else x for x in arrays]


def _call_on_fewer(
    devices: Any, step: Callable[..., Any], options: Mapping[str, Any], *call: Any
) -> list[Any]:
    """Return the results of a step on some of its devices; `call` is the rest of `_call`."""
    import jax

    def on_fewer(sharding: Any) -> Any:
        mesh = jax.sharding.Mesh(devices, sharding.mesh.axis_names)
        return jax.sharding.NamedSharding(mesh, sharding.spec)

    shardings = {name: options[name] for name in ("in_shardings", "out_shardings")}
    jitted = jax.jit(  # for each call; JAX caches its program by that of `step`
        step,
        static_argnums=options.get("static_argnums", ()),
        compiler_options={"xla_backend_optimization_level": 0},  # compiled in half the time
        **jax.tree.map(on_fewer, shardings),
    )
    return _call(jitted, *call)


def _perturb(x: Any, epsilon: float, seed: int) -> Any:
    """Return an array of which each element is larger or smaller by `epsilon` of itself."""
    import jax
    import numpy as np

    if not isinstance(x, np.ndarray) or not jax.numpy.issubdtype(x.dtype, np.floating):
        return x
    epsilon = max(epsilon, float(jax.numpy.finfo(x.dtype).eps))
    signs = np.random.default_rng(seed).choice([-epsilon, epsilon], x.shape)
    return (x.astype(np.float64) * (1 + signs)).astype(x.dtype)


def _other_key(x: Any) -> Any:
    """Return another random key for what may be one: a typed key, or 2 or 4 words."""
    import jax
    import numpy as np

    if isinstance(x, jax.Array):
        return jax.random.wrap_key_data(jax.random.key_data(x) + 1, impl=jax.random.key_impl(x))
    is_key = isinstance(x, np.ndarray) and x.dtype == np.uint32 and x.shape in ((2,), (4,))
    return x + np.uint32(1) if is_key else x


def largest_element(x: Any) -> float:
    """Return the largest absolute value of a number in an array, without NaNs and infinities."""
    import numpy as np

    return float(np.abs(x[np.isfinite(x)]).max(initial=0))


def largest_difference(x: Any, y: Any) -> float:
    """Return the largest difference of two arrays; infinity if NaNs or non-numbers differ."""
    import numpy as np

    if x.dtype.kind not in "fiu":
        return 0.0 if np.array_equal(x, y) else math.inf
    with np.errstate(invalid="ignore", over="ignore"):
        if not x.dtype == y.dtype == np.float32:  # the usual type, in half the time
            x, y = x.astype(np.float64), y.astype(np.float64)
        difference = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, np.abs(x - y))
    return float(np.nan_to_num(difference, nan=math.inf).max(initial=0.0))


def _find_differences(
    old_results: Sequence[RecordedLeaf],
    inputs: Sequence[Any],
    results: Sequence[Any],
    bounds: Sequence[float],
    device_count: int,
) -> Iterator[tuple[str, str]]:
    """Yield how a result of the step differs by more than its bound from pmap's, and why, or ""."""
    for old, result, bound in zip(old_results, results, bounds, strict=True):
        of_pmap = old.load()
        if of_pmap.shape != result.shape == of_pmap.shape[1:]:  # pmap returned a copy per device
            if len(set(old.rows)) > 1:
                text = f"result{old.path}: it differs from device to device"
                yield text, "the copies of its results differ"
            of_pmap = of_pmap[0]
        of_pmap = of_pmap.reshape(result.shape)
        if largest_difference(of_pmap, result) > bound:
            text, reason = f"values differ{format_difference(of_pmap, result)}", ""
            for ratio in _median_ratios(of_pmap, result, inputs):
                if abs(max(ratio, 1 / ratio) / device_count - 1) < _RATIO:
                    local, across = ("sum", "pmean") if ratio > 1 else ("mean", "psum")
                    reason = f"a {local} over the local batch under {across}"
                    break
            yield f"result{old.path}: {text}; {bound:.2g} is rounding", reason


def format_difference(x: Any, y: Any) -> str:
    """Return " by up to 14, 8 times what it was": the largest difference, and the median ratio."""
    difference, ratio = largest_difference(x, y), next(_median_ratios(x, y), 1.0)
    text = f" by up to {difference:.3g}" if difference else ""
    return f"{text}, {ratio:.4g} times what it was" if abs(ratio - 1) > _RATIO else text


def _median_ratios(before: Any, after: Any, inputs: Sequence[Any] = ()) -> Iterator[float]:
    """Yield by what factor the array `after` differs from `before`: the median over its elements.

    Then of what they add to each input of their shape: it shows a wrong factor of the gradient in
    `w - 0.1 * gradient`. Factors of 0 and below explain nothing, and are left out.
    """
    import numpy as np

    states = [x for x in inputs if isinstance(x, np.ndarray) and x.shape == after.shape]
    for start in (0.0, *states):
        old, new = (np.asarray(array, np.float64) - start for array in (before, after))
        is_large = np.abs(old) > np.abs(old).max(initial=0) / 9  # small ones may be rounding
        is_usable = is_large & np.isfinite(old) & np.isfinite(new)
        ratio = float(np.median(new[is_usable] / old[is_usable])) if is_usable.any() else 0.0
        if ratio > 0:
            yield ratio
