"""The same function as pmap, as shard_map, and as a jit that is left to find its collectives."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist.passes import interpreter, places, rebind
from jax_dist.passes.interpreter import Values
from jax_dist.rewriting.comparison import Comparison
from jax_dist.rewriting.cost import Program, program_of
from jax_dist.rewriting.pmap_sites import PmapSite, mapped_dimension, pmap_site, pmap_sites


def compare(jaxpr: ClosedJaxpr, name: str, programs: tuple[Program, Program]) -> Comparison | None:
    """The ways to write a function with pmaps; None for one without.

    Args:
      jaxpr: of the function as it is.
      name: of the function.
      programs: as it is, and rewritten.
    """
    if not pmap_sites(jaxpr):
        return None
    before, after = programs
    rows = (("pmap", before), ("shard_map", after), ("automatic jit", _automatic(jaxpr)))
    return Comparison(name, rows)


def _automatic(jaxpr: ClosedJaxpr) -> Program | str:
    """Each pmap as a vmap whose mapped axis is cut over the mesh: XLA places the collectives."""
    if any(_has_region(site.body) for site in pmap_sites(jaxpr)):
        return "not tried for a pmap in a pmap"

    handlers = places.handlers(jaxpr, _handler_of)

    def automatic(*args: Any) -> Values:
        return places.run(jaxpr, args, handlers)

    # Whatever it is that vmap has no rule for, or fails over, as for a permutation of some devices
    # only: it is a row of a table, and the program runs as it is.
    try:
        return program_of(jax.jit(automatic).lower(*jaxpr.in_avals))
    except Exception as error:  # noqa: BLE001
        first, *_ = str(error).splitlines() or [""]
        return first or f"vmap raises {type(error).__name__}"


def _has_region(body: Any) -> bool:
    return any(eqn.primitive.name == "shard_map" for eqn in interpreter.equations(body))


def _handler_of(eqn: JaxprEqn) -> interpreter.Handler | None:
    site = pmap_site(eqn)
    if site is None:
        return None
    return lambda _, values: _batched(site, values)


def _batched(site: PmapSite, values: Values) -> Values:
    """The blocks of all devices side by side, along a dimension of their own."""
    dims_in = [mapped_dimension(spec) for spec in site.eqn.params["in_specs"]]
    dims_out = [mapped_dimension(spec) for spec in site.eqn.params["out_specs"]]
    laid = [_laid(site, value, dim) for value, dim in zip(values, dims_in, strict=True)]
    blocks = [_split(value, dim, site.size) for value, dim in zip(laid, dims_in, strict=True)]

    def body(*blocks: Any) -> Values:
        return rebind.evaluate(site.body, blocks)

    results = jax.vmap(
        body, in_axes=tuple(dims_in), out_axes=0, axis_name=site.axis, axis_size=site.size
    )(*blocks)
    return [_joined(result, dim) for result, dim in zip(results, dims_out, strict=True)]


def _split(value: Any, dim: int | None, count: int) -> Any:
    """`[.., n * k, ..] -> [.., n, k, ..]`"""
    if dim is None:
        return value
    return jnp.reshape(value, (*value.shape[:dim], count, -1, *value.shape[dim + 1 :]))


def _joined(result: Any, dim: int | None) -> Any:
    """`[n, .., k, ..] -> [.., n * k, ..]`; of what all devices share, one."""
    if dim is None:
        return result[0]
    moved = jnp.moveaxis(result, 0, dim)
    return jnp.reshape(moved, (*moved.shape[:dim], -1, *moved.shape[dim + 2 :]))


def _laid(site: PmapSite, value: Any, dim: int | None) -> Any:
    spec = P() if dim is None else P(*[None] * dim, site.axis)
    return lax.with_sharding_constraint(value, NamedSharding(site.mesh, spec))
