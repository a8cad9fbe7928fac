"""What each way to map a function over devices computes, where pmap-era programs go wrong.

    python benchmarks/comparison.py              # all; half a minute
    python benchmarks/comparison.py --markdown   # the table of docs/comparison.md

It needs equinox, flax and chex, and makes 8 simulated CPU devices. Every cell is run: "right", the
wrong number, or the type of the error.
"""

import argparse
import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import chex
import equinox
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_dist
from jax_dist.testing import run_processes, simulated_devices

Mapped = Callable[..., Any]
X = np.arange(8.0, dtype=np.float32)  # [8]: one number for each device


def use_jax(fun: Mapped, axis: str, in_axes: Any = 0) -> Mapped:
    return jax.pmap(fun, axis, in_axes=in_axes)


def use_shard_map(fun: Mapped, axis: str, in_axes: Any = 0) -> Mapped:
    """Map as a first port does: a mesh with Auto axes, and every other option left alone."""
    axes = in_axes if isinstance(in_axes, tuple) else (in_axes,)

    def call(*args: Any) -> Any:
        mesh = jax.sharding.Mesh(jax.devices()[: args[-1].shape[0]], (axis,))
        whole = (axes * len(args))[: len(args)]
        specs = tuple(P() if dimension is None else P(axis) for dimension in whole)

        def body(*slices: Any) -> Any:
            inside = [y if spec == P() else y[0] for y, spec in zip(slices, specs, strict=True)]
            return jax.tree.map(lambda y: y[None], fun(*inside))

        return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(axis)))(*args)

    return call


def use_equinox(fun: Mapped, axis: str, in_axes: Any = 0) -> Mapped:
    return equinox.filter_pmap(fun, axis_name=axis, in_axes=in_axes)


def use_flax(fun: Mapped, axis: str, in_axes: Any = 0) -> Mapped:
    return nnx.pmap(fun, axis_name=axis, in_axes=in_axes)


def use_chex(fun: Mapped, axis: str, in_axes: Any = 0) -> Mapped:
    """Replace pmap by vmap, as for tests on one device."""

    def call(*args: Any) -> Any:
        with chex.fake_pmap():
            return jax.pmap(fun, axis, in_axes=in_axes)(*args)

    return call


def use_jax_dist(fun: Mapped, axis: str, in_axes: Any = 0) -> Mapped:
    return jax_dist.pmap(fun, axis, in_axes=in_axes)


WAYS = {
    "jax.pmap": use_jax,
    "shard_map by hand": use_shard_map,
    "equinox.filter_pmap": use_equinox,
    "flax.nnx.pmap": use_flax,
    "chex.fake_pmap": use_chex,
    "jax_dist.pmap": use_jax_dist,
}


def psum(pmap: Mapped) -> Any:
    return pmap(lambda x: lax.psum(x, "i"), "i")(X), [28.0] * 8


def gradient(pmap: Mapped) -> Any:
    def update(w: Any, x: Any) -> Any:
        return lax.pmean(jax.grad(lambda w: jnp.sum(w * x))(w), "i")

    return pmap(update, "i", in_axes=(None, 0))(jnp.float32(1), X), [3.5] * 8


def map_twice(pmap: Mapped) -> Any:
    inner = pmap(lambda y: lax.psum(y, "j"), "j")
    return pmap(lambda row: inner(row), "i")(X.reshape(2, 4)), [[6.0] * 4, [22.0] * 4]


def map_on_one_device(pmap: Mapped) -> Any:
    on_one = jax.device_put(X, jax.devices()[3])
    return pmap(lambda x: lax.psum(x, "i"), "i")(on_one), [28.0] * 8


def feed_state_back(pmap: Mapped) -> Any:
    step = pmap(lambda w, x: w + lax.pmean(x, "i"), "i")
    w = step(np.zeros(8, np.float32), X)[0]
    return step(jnp.stack([w] * 8), X), [7.0] * 8


def map_under_mesh(pmap: Mapped) -> Any:
    auto = (jax.sharding.AxisType.Auto,) * 2
    with jax.set_mesh(jax.make_mesh((2, 4), ("a", "b"), axis_types=auto)):
        return pmap(lambda x: lax.psum(x, "i"), "i")(X), [28.0] * 8


def map_in_scan(pmap: Mapped) -> Any:
    mapped = pmap(lambda x: x + lax.pmean(x, "i"), "i")
    return lax.scan(lambda x, _: (mapped(x), None), X, length=2)[0], [k + 10.5 for k in range(8)]


def count_devices(pmap: Mapped) -> Any:
    result = pmap(lambda x: 2 * x, "i")(X)
    return len(result.sharding.device_set), 8


CASES = {
    "`psum`": psum,
    "gradient, then `pmean`": gradient,
    "inside a `scan`": map_in_scan,
    "nested": map_twice,
    "an array on one device": map_on_one_device,
    "state by `[0]`, fed back": feed_state_back,
    "under `jax.set_mesh`": map_under_mesh,
    "runs on all devices": count_devices,
}


def verdict(case: Mapped, pmap: Mapped) -> str:
    """Return the outcome: "right", the wrong value, or the type of the error."""
    try:
        with _quiet():
            result, expected = case(pmap)
            values = np.asarray(result)
    except Exception as error:  # noqa: BLE001  # every error is a result here
        return type(error).__name__
    if values.shape == np.shape(expected) and np.allclose(values, expected):
        return "right"
    return f"{values.ravel()[0]:g}, not {np.ravel(expected)[0]:g}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def sums_of_two_processes() -> dict[str, list[str]]:
    """Run in each of two processes with 4 devices: alone, and inside jit."""
    half = X[:4] + 4 * jax.process_index()
    names = ("jax.pmap", "equinox.filter_pmap", "flax.nnx.pmap", "jax_dist.pmap")
    return {name: [_sum(WAYS[name], half, wrap) for wrap in (_alone, jax.jit)] for name in names}


def _alone(fun: Mapped) -> Mapped:
    return fun


def _sum(way: Mapped, half: Any, wrap: Mapped) -> str:
    try:
        with _quiet():
            total = wrap(way(lambda x: lax.psum(x, "i"), "i"))(half)
        return f"{total.addressable_shards[0].data.item():g}"
    except Exception as error:  # noqa: BLE001  # every error is a result here
        return type(error).__name__


def run_two_processes() -> dict[str, list[str]]:
    """Return `{way: [alone, inside jit]}`, such as "right" or "6 and 22, not 28"."""
    outcomes = run_processes(sums_of_two_processes, processes=2, cpu_devices=4, timeout=300)
    first, second = (outcome.value for outcome in outcomes)
    return {
        name: [_join_sums(*pair) for pair in zip(first[name], second[name], strict=True)]
        for name in first
    }


def _join_sums(one: str, other: str) -> str:
    if one == other == "28":
        return "right"
    return one if one == other else f"{one} and {other}, not 28"


def rows() -> Iterator[tuple[str, ...]]:
    """Return the cases with the outcome for each way."""
    for name, case in CASES.items():
        yield (name, *(verdict(case, functools.partial(way)) for way in WAYS.values()))
    outcomes = run_two_processes()
    for place, name in enumerate(("2 processes", "2 processes, inside `jit`")):
        yield (name, *(outcomes[way][place] if way in outcomes else "not run" for way in WAYS))


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--markdown", action="store_true", help="print the table of the page")
    options = parser.parse_args()
    simulated_devices(8)
    table = [("", *(f"`{name}`" if "." in name else name for name in WAYS)), *rows()]
    if options.markdown:
        table.insert(1, tuple("---" for _ in table[0]))
        print("\n".join(f"| {' | '.join(row)} |" for row in table))
        return
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)))


if __name__ == "__main__":
    main()
