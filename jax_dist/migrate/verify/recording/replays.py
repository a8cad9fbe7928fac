"""Replays of a step over global arrays: on the arguments that pmap had, on 1, 2 and all devices.

The bound for what may differ comes from the step itself: it runs on perturbed arguments, too.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from .records import RecordedCall, RecordedLeaf, to_numpy

CALLS = 3  # how many calls of each place are replayed

_PERTURBED = 2  # runs on perturbed arguments
_FACTOR = 10.0  # by which the largest change by a perturbation may be exceeded
_RATIO = 1e-2  # a factor nearer than this to the number of devices counts as equal to it
# By the program's jitted step and a number of devices: the step on these.
_jitted: dict[tuple[Any, int], Any] = {}
_OTHER = "it gives something else for the whole batch"
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

    if old is None or old.raised:
        raise Difference("pmap was not called at the same time", "")
    leaves, tree = jax.tree.flatten(arguments)
    if len(leaves) != len(old.arguments):
        raise Difference("it takes other arguments than pmap did", "")
    pairs = [*zip(old.arguments, leaves, strict=True)]
    inputs = [_reshape_recorded(*pair) for pair in pairs]
    devices = jax.tree.leaves(options["in_shardings"])[0].mesh.devices.ravel()
    args, kwargs = jax.tree.unflatten(tree, inputs)
    text = str(jitted.trace(*args, **kwargs).jaxpr)
    epsilon = max([e for name, e in _PRECISIONS.items() if name in text], default=1e-7)
    results = _call(jitted, tree, inputs)
    bounds = _rounding_bounds(jitted, tree, inputs, results, epsilon)
    try:
        _compare_with_pmap(old.results, inputs, results, bounds, len(devices))
    except Difference as difference:
        text, reason = difference.args
        if any(leaf.is_keys for leaf in old.arguments):
            others = _call(jitted, tree, [_reshape_recorded(*pair, device=-1) for pair in pairs])
            is_drawn = any(map(largest_difference, results, others))
            reason = "keys per device" if is_drawn else reason or _OTHER
        raise Difference(text, reason) from None
    for count in (n for n in (1, 2) if n < len(devices) and len(devices) % n == 0):
        fewer = _call_on_fewer(devices[:count], jitted, step, options, tree, inputs)
        differences = map(largest_difference, results, fewer)
        if any(x > bound for x, bound in zip(differences, bounds, strict=True)):
            text = f"it gives something else on {count} of {len(devices)} devices"
            raise Difference(text, "the step counts its devices")
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
    for result, *changed in zip(results, *perturbed, strict=True):
        bound = max(largest_difference(result, other) for other in changed)
        if result.dtype.kind == "f":
            bound = _FACTOR * (bound + epsilon * largest_element(result))
        bounds.append(bound)
    return bounds


def _reshape_recorded(old: RecordedLeaf, leaf: Any, device: int = 0) -> Any:
    """Return an argument that pmap had, in the shape of the step's argument `leaf`.

    Of a batch [8, 4, 3] that is [32, 3]; of state with 8 equal copies, [8, ...], one of them; of
    random keys, that of one `device`. Raises Difference if it cannot have that shape.
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
    if not is_stacked and array.size != math.prod(shape):
        raise Difference(f"argument{old.path}: {array.shape} before, {shape} after", "")
    array = array[device] if is_stacked else array.reshape(shape)
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
    devices: Any, jitted: Any, step: Callable[..., Any], options: Mapping[str, Any], *call: Any
) -> list[Any]:
    """Return the results of a step on some of its devices; `call` is the rest of `_call`."""
    import jax

    def on_fewer(sharding: Any) -> Any:
        mesh = jax.sharding.Mesh(devices, sharding.mesh.axis_names)
        return jax.sharding.NamedSharding(mesh, sharding.spec)

    def fresh_step(*args: Any, **kwargs: Any) -> Any:  # jit caches the trace of `step` itself
        return step(*args, **kwargs)

    key = jitted, len(devices)
    if key not in _jitted:
        shardings = {name: options[name] for name in ("in_shardings", "out_shardings")}
        _jitted[key] = jax.jit(
            fresh_step,
            static_argnums=options.get("static_argnums", ()),
            compiler_options={"xla_backend_optimization_level": 0},  # compiled in half the time
            **jax.tree.map(on_fewer, shardings),
        )
    count = lambda *_: len(devices)
    # The step may ask for the number of devices: here it is that of the smaller mesh.
    with mock.patch.multiple(jax, device_count=count, local_device_count=count):
        return _call(_jitted[key], *call)


def _perturb(x: Any, epsilon: float, seed: int) -> Any:
    """Return an array of which each element is larger or smaller by `epsilon` of itself."""
    import jax
    import numpy as np

    if not isinstance(x, np.ndarray) or not jax.numpy.issubdtype(x.dtype, np.floating):
        return x
    epsilon = max(epsilon, float(jax.numpy.finfo(x.dtype).eps))
    signs = np.random.default_rng(seed).choice([-epsilon, epsilon], x.shape)
    return (x.astype(np.float64) * (1 + signs)).astype(x.dtype)


def largest_element(x: Any) -> float:
    """Return the largest absolute value of a number in an array, without NaNs and infinities."""
    import numpy as np

    largest = float(np.abs(x).max(initial=0))
    return largest if math.isfinite(largest) else float(np.abs(x[np.isfinite(x)]).max(initial=0))


def largest_difference(x: Any, y: Any) -> float:
    """Return the largest difference of two arrays; infinity if NaNs or non-numbers differ."""
    import numpy as np

    if x.dtype.kind not in "fiu":
        return 0.0 if np.array_equal(x, y) else math.inf
    with np.errstate(invalid="ignore", over="ignore"):
        if x.dtype == y.dtype == np.float32:  # the usual case, in a third of the time
            largest = float(np.abs(x - y).max(initial=0))
            if math.isfinite(largest):
                return largest
        x, y = x.astype(np.float64), y.astype(np.float64)
        difference = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, np.abs(x - y))
    return float(np.nan_to_num(difference, nan=math.inf).max(initial=0.0))


def _compare_with_pmap(
    old_results: Sequence[RecordedLeaf],
    inputs: Sequence[Any],
    results: Sequence[Any],
    bounds: Sequence[float],
    device_count: int,
) -> None:
    """Raise Difference if a result of the step differs by more than its bound from pmap's."""
    if len(old_results) != len(results):
        raise Difference(f"{len(old_results)} results before, {len(results)} after", "")
    texts: list[str] = []
    reasons: list[str] = []
    for old, result, bound in zip(old_results, results, bounds, strict=True):
        of_pmap = old.load()
        if of_pmap.shape != result.shape == of_pmap.shape[1:]:  # pmap returned a copy per device
            if len(set(old.rows)) > 1:
                texts.append(f"result{old.path}: it differs from device to device")
                reasons.append("the copies of its results differ")
            of_pmap = of_pmap[0]
        of_pmap = of_pmap.reshape(result.shape)
        difference = largest_difference(of_pmap, result)
        if difference > bound:
            text, reason = _explain_factor([*median_ratios(of_pmap, result, inputs)], device_count)
            reasons += [reason] if reason else []
            differs = f"result{old.path}: values differ by up to {difference:.3g}{text}"
            texts.append(f"{differs}; {bound:.2g} is rounding")
    if texts:
        raise Difference(texts[0], reasons[0] if reasons else "")


def _explain_factor(ratios: Sequence[float], device_count: int) -> tuple[str, str]:
    """Return ", 8 times what it was" for the ratios of a result, and the likely reason, or ""."""
    for ratio in ratios:  # off by the number of devices: local and global reductions are mixed up
        if abs(max(ratio, 1 / ratio) / device_count - 1) < _RATIO:
            local, across = ("sum", "pmean") if ratio > 1 else ("mean", "psum")
            reason = f"a {local} over the local batch under {across}"
            return f", {ratio:.4g} times what it was", reason
    return f", {ratios[0]:.4g} times what it was" if ratios else "", ""


def median_ratios(before: Any, after: Any, inputs: Sequence[Any] = ()) -> Iterator[float]:
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
