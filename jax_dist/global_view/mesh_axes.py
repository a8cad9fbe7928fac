"""The mapped axis on a mesh, where it may be several axes, and what runs over it in regions.

In a region, a `shard_map` over the mapped axis, XLA shards values over the other axes of the mesh,
the model axes, as the state is. What it cannot shard runs whole on each device along these axes.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist._passes import interpreter, rebind
from jax_dist._passes.interpreter import Handler, Values, names_of, record_of
from jax_dist._passes.uniformity import find_sharded_axes


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """The sharding of a uniform value of which each device along the mapped axis holds a shard."""

    dim: int  # the dimension sharded over the mapped axis, or a part of it, and nothing else
    spec: P  # of the whole value, also over model axes

    @property
    def shard_of_iteration(self) -> "Shard":
        """The shard of one iteration of a scan: `P(None, "i")`, dim 1, becomes `P("i")`, dim 0."""
        return Shard(self.dim - 1, P(*self.spec[1:]))


@dataclasses.dataclass(frozen=True, slots=True)
class MeshAxes:
    """The mapped axis and the model axes of a mesh."""

    name: Any  # of the mapped axis in the step
    mesh: Mesh
    mapped: tuple[Any, ...]  # the mesh axes that it is, outermost first
    model: frozenset[Any] = frozenset()  # the model axes, if XLA may shard over them in regions

    @property
    def size(self) -> int:
        """The number of devices along the mapped axis, N."""
        return math.prod(self.mesh.shape[name] for name in self.mapped)

    @property
    def local_size(self) -> int:
        """The number of devices of this process along the mapped axis, L."""
        return math.prod(self.mesh.local_mesh.shape[name] for name in self.mapped)

    @property
    def platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    @property
    def rebinds(self) -> bool:
        """True if equations must be bound again: the mesh has other axes than the step names."""
        return bool(self.model) or self.mapped != (self.name,)

    @property
    def by_device(self) -> NamedSharding:
        """The sharding of `[N, *s]`."""
        return NamedSharding(self.mesh, P(self.mapped))

    def sharding_of_varying(self, wanted: P) -> NamedSharding:
        """Return the sharding of `[N, *s]`, where `[*s]` would have the spec `wanted`."""
        # P("model") becomes P("i", "model"); P("i") stays, since no axis shards two dimensions.
        is_free = find_sharded_axes(wanted).isdisjoint(self.mapped)
        return NamedSharding(self.mesh, P(self.mapped, *(wanted if is_free else ())))

    def drop_mapped(self, spec: P) -> P:
        """Return a spec without the axes of the mapped one: that of a value gathered over them."""
        parts = [tuple(n for n in names_of(part) if n not in self.mapped) for part in spec]
        return P(*[part or None for part in parts])

    def shard_of(self, spec: Any) -> Shard | None:
        """Return the shard by the first dimension sharded over the mapped axis alone, or None."""
        for dim, part in enumerate(spec or ()):
            if part is not None and {*names_of(part)} <= {*self.mapped}:
                return Shard(dim, spec)
        return None

    def sum(self, value: Any, shard: Shard | None = None) -> Any:
        """Sum over the mapped axis; with `shard`, `(8, 4)` on 4 devices becomes `(2, 4)`."""
        total, remaining_axes = self._avoid_bfloat16_on_cpu(value), self.mapped
        if shard is not None:
            dim, scatter_axes = shard.dim, names_of(shard.spec[shard.dim])
            scatter = lambda x: lax.psum_scatter(x, scatter_axes, scatter_dimension=dim, tiled=True)
            total = self._run_per_model_shard(scatter, total, shard.spec)
            # In HSDP, a dimension is sharded over one of two mapped axes: sum over the other, too.
            remaining_axes = tuple(axis for axis in self.mapped if axis not in scatter_axes)
        total = lax.psum(total, remaining_axes) if remaining_axes else total
        return total.astype(value.dtype)

    def gather(self, value: Any, shard: Shard) -> Any:
        """Return the whole value of a shard: `(2, 4)` on 4 devices becomes `(8, 4)`, for dim 0."""
        names = names_of(shard.spec[shard.dim])
        gather = lambda x: lax.all_gather(x, names, axis=shard.dim, tiled=True)
        return self._run_per_model_shard(gather, value, shard.spec)

    def _run_per_model_shard(self, collective: Callable[[Any], Any], value: Any, spec: P) -> Any:
        """Run a collective in each shard of the model axes, over which XLA would gather first."""
        if not self.model:
            return collective(value)
        specs: Any = {"in_specs": self.drop_mapped(spec), "out_specs": self.drop_mapped(spec)}
        return jax.shard_map(collective, **specs, axis_names={*self.model}, check_vma=False)(value)

    def _avoid_bfloat16_on_cpu(self, value: Any) -> Any:
        """Return the operand of a reduction, as float32 where XLA for CPU aborts at bfloat16."""
        aborts = self.model and self.platform == "cpu" and value.dtype == jnp.bfloat16
        return value.astype(jnp.float32) if aborts else value

    def handler_of(self, eqn: JaxprEqn) -> Handler | None:
        """Return what evaluates an equation on one device, or None: its primitive, unchanged."""
        if self.name in interpreter.named_axes(eqn):
            return self._run_collective  # over the axes of the mesh
        record = record_of(eqn)  # facts about its primitive
        # If devices along a model axis took different paths, one that has left a loop would be
        # missing in the collectives by which XLA shards the body.
        is_data_dependent = record.kind == "branch" or _compat.name_of(eqn) == "while"
        if self.model and (record.unsplit or is_data_dependent):  # unsplit: XLA cannot shard it
            return self._run_whole
        return interpreter.replay if record.tied else None  # tied: cannot be bound on a new mesh

    def _run_collective(self, eqn: JaxprEqn, values: Values) -> Values:
        """Run `psum[axes=("i",)]` as `psum[axes=("replica", "shard")]`, if "i" is these axes."""
        if _compat.name_of(eqn) == "axis_index":
            return [lax.axis_index(self.mapped)]
        record = record_of(eqn)
        axes_parameter = record.axes_param  # "axes" of a psum, "axis_name" of an all_gather
        eqn = eqn.replace(params={**eqn.params, axes_parameter: self.mapped})
        moves_only = record.collective not in ("sum", "max", "min", "scatter")  # as a gather does
        if moves_only:
            return rebind.bind_again(eqn, values)
        outs = rebind.bind_again(eqn, [self._avoid_bfloat16_on_cpu(value) for value in values])
        return [out.astype(value.dtype) for out, value in zip(outs, values, strict=True)]

    def _run_whole(self, eqn: JaxprEqn, values: Values) -> Values:
        """Run an equation on whole values on each device along the model axes, by a `shard_map`."""
        without_model = dataclasses.replace(self, model=frozenset())  # there XLA may shard nothing
        bind = lambda *args: rebind.bind_again(eqn, list(args), without_model.handler_of)
        specs = {"in_specs": P(), "out_specs": [P() for _ in eqn.outvars]}
        return jax.shard_map(bind, **specs, axis_names={*self.model}, check_vma=False)(*values)
