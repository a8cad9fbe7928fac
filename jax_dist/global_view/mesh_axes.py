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
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist._rewrite import interpreter, rebind
from jax_dist._rewrite.interpreter import Handler, Values, names_of, record_of


@dataclasses.dataclass(frozen=True, slots=True)
class MeshAxes:
    """The mapped axis and the model axes of a mesh."""

    name: Any  # of the mapped axis in the step
    sizes: Mapping[Any, int]  # of the mesh axes that it is, outermost first
    model: frozenset[Any] = frozenset()  # the model axes, if XLA may shard over them in regions
    platform: str = ""

    @property
    def part(self) -> Any:
        """The part of a spec that shards a dimension over all devices of the mapped axis."""
        return tuple(self.sizes) if len(self.sizes) > 1 else next(iter(self.sizes))

    @property
    def rebinds(self) -> bool:
        """True if equations of the step are others on this mesh."""
        return bool(self.model) or tuple(self.sizes) != (self.name,)

    def varying(self, rank: int) -> P:
        """Return the spec of a varying value, `[N, *s]`."""
        return P(self.part, *[P.UNCONSTRAINED if self.model else None] * (rank - 1))

    def gathered(self, spec: Any) -> P:
        """Return a spec without the mapped axis."""
        parts = [tuple(n for n in names_of(part) if n not in self.sizes) for part in spec]
        return P(*[part or None for part in parts])

    def sum(self, value: Any, dim: int | None = None, spec: Any = ()) -> Any:
        """Sum over all devices; with `dim`, each keeps only its shard of it, by `spec`."""
        wide, over = self._widen(value), tuple(self.sizes)
        if dim is not None:
            names = names_of(spec[dim])
            scatter = functools.partial(
                lax.psum_scatter, axis_name=names, scatter_dimension=dim, tiled=True
            )
            wide = self._send(scatter, wide, spec)
            over = tuple(name for name in over if name not in names)
        return (lax.psum(wide, over) if over else wide).astype(value.dtype)

    def gather(self, value: Any, dim: int, spec: P) -> Any:
        """Return the whole of a dimension, of which each device has a shard."""
        gather = lambda shard: lax.all_gather(shard, names_of(spec[dim]), axis=dim, tiled=True)
        return self._send(gather, value, spec)

    def _send(self, send: Callable[[Any], Any], value: Any, spec: Any) -> Any:
        """Run a collective on the shards along the model axes, which XLA would gather first."""
        if self.model:
            at, axes = self.gathered(spec), set(self.model)
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
        if _compat.name_of(eqn) == "axis_index":
            return [lax.axis_index(tuple(self.sizes))]
        record = record_of(eqn)
        eqn = eqn.replace(params={**eqn.params, record.axes: tuple(self.sizes)})
        if record.over not in ("sum", "max", "min", "scatter"):
            return rebind.bind_again(eqn, values)
        outs = rebind.bind_again(eqn, [self._widen(value) for value in values])
        return [out.astype(value.dtype) for out, value in zip(outs, values, strict=True)]

    def _run_whole(self, eqn: JaxprEqn, values: Values) -> Values:
        """Run an equation in a `shard_map` that replicates it over the model axes."""
        inside = dataclasses.replace(self, model=frozenset())
        bind = lambda *args: rebind.bind_again(eqn, list(args), inside.handler_of)
        specs, axes = {"in_specs": P(), "out_specs": [P() for _ in eqn.outvars]}, set(self.model)
        return jax.shard_map(bind, **specs, axis_names=axes, check_vma=False)(*values)
