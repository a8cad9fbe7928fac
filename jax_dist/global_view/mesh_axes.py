"""The mapped axis on a mesh: which mesh axes it is, and what XLA may shard over the model axes.

In the step the mapped axis has one name. On the mesh it may be several axes, and a collective of
the step goes over all of them. Where regions are manual over these axes only, XLA shards what is
computed in them over the others, the model axes, as the state is. What it cannot shard runs in a
`shard_map` of its own, whole on each device along the model axes. So does a loop or a branch in
which devices may take different paths: what XLA sends in its body waits for all devices, also for
those that left it.
"""

import dataclasses
import functools
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
from jax_dist._passes.uniformity import cut_along


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """The sharding of a uniform value of which each device along the mapped axis holds a shard."""

    dim: int  # the dimension that is sharded over axes of the mapped one, and only these
    spec: P  # of the whole value, also over model axes

    @property
    def of_iteration(self) -> "Shard":
        """The shard that a scan over the first dimension has in each iteration."""
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
        """True if equations of the step have to be bound again, for other axes than they name."""
        return bool(self.model) or self.mapped != (self.name,)

    @property
    def by_device(self) -> NamedSharding:
        """The sharding of `[N, *s]`."""
        return NamedSharding(self.mesh, P(self.mapped))

    def sharding_of_varying(self, wanted: P) -> NamedSharding:
        """Return the sharding of `[N, *s]` where a uniform `[*s]` would be sharded as wanted."""
        is_free = cut_along(wanted).isdisjoint(self.mapped)
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
        """Sum over the mapped axis; with `shard`, each device gets its shard of the sum only."""
        wide, over = self._widen(value), self.mapped
        if shard is not None:
            names = names_of(shard.spec[shard.dim])
            scatter = functools.partial(
                lax.psum_scatter, axis_name=names, scatter_dimension=shard.dim, tiled=True
            )
            wide = self._send(scatter, wide, shard.spec)
            over = tuple(name for name in over if name not in names)
        return (lax.psum(wide, over) if over else wide).astype(value.dtype)

    def gather(self, value: Any, shard: Shard) -> Any:
        """Gather the dimension of which each device has a shard; the inverse of slicing it."""
        names = names_of(shard.spec[shard.dim])
        gather = functools.partial(lax.all_gather, axis_name=names, axis=shard.dim, tiled=True)
        return self._send(gather, value, shard.spec)

    def _send(self, send: Callable[[Any], Any], value: Any, spec: P) -> Any:
        """Run a collective in each shard of the model axes, over which XLA would gather first."""
        if self.model:
            at, axes = self.drop_mapped(spec), set(self.model)
            send = jax.shard_map(send, in_specs=at, out_specs=at, axis_names=axes, check_vma=False)
        return send(value)

    def _widen(self, value: Any) -> Any:
        # XLA for CPU aborts at a sum of bfloat16 where model axes are not manual.
        widens = self.model and self.platform == "cpu" and value.dtype == jnp.bfloat16
        return value.astype(jnp.float32) if widens else value

    def handler_of(self, eqn: JaxprEqn) -> Handler | None:
        """Return the function that evaluates an equation in a region; None to bind it unchanged."""
        record, name = record_of(eqn), _compat.name_of(eqn)
        if self.name in interpreter.named_axes(eqn):
            return self._run_collective
        if self.model and (record.unsplit or record.kind == "branch" or name == "while"):
            return self._run_whole
        return interpreter.replay if record.tied else None

    def _run_collective(self, eqn: JaxprEqn, values: Values) -> Values:
        """Run a collective of the step over the mesh axes that its mapped axis is."""
        if _compat.name_of(eqn) == "axis_index":
            return [lax.axis_index(self.mapped)]
        record = record_of(eqn)
        eqn = eqn.replace(params={**eqn.params, record.axes: self.mapped})
        if record.over not in ("sum", "max", "min", "scatter"):
            return rebind.bind_again(eqn, values)
        outs = rebind.bind_again(eqn, [self._widen(value) for value in values])
        return [out.astype(value.dtype) for out, value in zip(outs, values, strict=True)]

    def _run_whole(self, eqn: JaxprEqn, values: Values) -> Values:
        """Run an equation in a `shard_map` that replicates it over the model axes."""
        all_manual = dataclasses.replace(self, model=frozenset())  # there XLA may shard nothing
        bind = lambda *args: rebind.bind_again(eqn, list(args), all_manual.handler_of)
        specs, axes = {"in_specs": P(), "out_specs": [P() for _ in eqn.outvars]}, set(self.model)
        return jax.shard_map(bind, **specs, axis_names=axes, check_vma=False)(*values)
