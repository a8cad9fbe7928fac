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
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist._rewrite import interpreter, rebind
from jax_dist._rewrite.interpreter import Handler, Values, names_of
from jax_dist._rewrite.primitive_facts import record_of
from jax_dist._rewrite.uniformity import cut_along


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

    def varying(self, rank: int) -> P:
        """Return the spec of a varying value, `[N, *s]`."""
        return P(self.part, *[P.UNCONSTRAINED if self.model else None] * (rank - 1))

    def gathered(self, spec: Any) -> P:
        """Return a spec without the mapped axis."""
        parts = [tuple(n for n in names_of(part) if n not in self.sizes) for part in spec]
        return P(*[part or None for part in parts])

    def sum(self, value: Any, dim: int | None = None, spec: Any = ()) -> Any:
        """Sum over all devices; of dimension `dim`, each keeps the shard that the spec says."""
        wide, over = self._widen(value), tuple(self.sizes)
        if dim is not None:
            names = names_of(spec[dim])
            wide = self._send(functools.partial(self._scatter, names, dim), wide, spec)
            over = tuple(name for name in over if name not in names)
        out = (lax.psum(wide, over) if over else wide).astype(value.dtype)
        if self.platform != "tpu" or jnp.ndim(out) < 2:
            return out
        # By rows, as the state is. XLA for TPU would rather copy all of the state, and early.
        return with_layout_constraint(out, Layout(tuple(range(out.ndim))))

    def _scatter(self, names: Any, dim: int, value: Any) -> Any:
        """Scatter as XLA for TPU does it, whose own constants for it take more memory."""
        if self.platform != "tpu":
            return lax.psum_scatter(value, names, scatter_dimension=dim, tiled=True)
        size = value.shape[dim] // lax.axis_size(names)
        start = lax.axis_index(names).astype(jnp.uint32) * size  # never compared with zero
        return lax.dynamic_slice_in_dim(lax.psum(value, names), start, size, dim)

    def gather(self, value: Any, dim: int, spec: P) -> Any:
        """Return the whole of a dimension, of which each device has a shard."""
        gather = lambda shard: lax.all_gather(shard, names_of(spec[dim]), axis=dim, tiled=True)
        return self._send(gather, value, spec)

    def _send(self, send: Callable[[Any], Any], value: Any, spec: Any) -> Any:
        """Send along the mapped axis what each device has along the model axes.

        XLA would gather it along these.
        """
        if self.model:
            at, axes = self.gathered(spec), set(self.model)
            send = jax.shard_map(send, in_specs=at, out_specs=at, axis_names=axes, check_vma=False)
        return send(value)

    def _widen(self, value: Any) -> Any:
        # XLA for CPU aborts at a sum of bfloat16 where model axes are not manual.
        widens = self.model and self.platform == "cpu" and value.dtype == jnp.bfloat16
        return value.astype(jnp.float32) if widens else value

    # ---- equations in regions

    def changes(self, eqn: JaxprEqn) -> bool:
        """Return whether an equation is another one in regions on this mesh."""
        # The mesh that it was traced with stands in its context.
        is_index = bool(self.model) and _compat.name_of(eqn) == "axis_index"
        return is_index or self._handler_of(eqn) is not None

    def handler_of(self, eqn: JaxprEqn) -> Handler | None:
        """Return what to do with an equation instead of binding it as it is."""
        return self._handler_of(eqn) or without_constraint(eqn)

    def _handler_of(self, eqn: JaxprEqn) -> Handler | None:
        record, name = record_of(eqn), _compat.name_of(eqn)
        is_renamed = tuple(self.sizes) != (self.name,)
        if self.name in interpreter.named_axes(eqn) and (is_renamed or self.model):
            return self._collective
        if not self.model:
            return None
        if name == "sharding_constraint" and hasattr(eqn.params["sharding"], "spec"):
            return self._constraint
        return (
            self._replicate
            if record.unsplit or record.kind == "branch" or name == "while"
            else None
        )

    def _constraint(self, eqn: JaxprEqn, values: Values) -> Values:
        # One that names no axis says that a value is whole along the model axes.
        spec, free = eqn.params["sharding"].spec, eqn.params["unconstrained_dims"]
        named = [*spec, *[None] * (jnp.ndim(values[0]) - len(spec))]
        parts = [P.UNCONSTRAINED if dim in free else part for dim, part in enumerate(named)]
        here = NamedSharding(jax.sharding.get_abstract_mesh(), P(*parts))
        return [lax.with_sharding_constraint(values[0], here)]

    def _collective(self, eqn: JaxprEqn, values: Values) -> Values:
        if _compat.name_of(eqn) == "axis_index":
            return [lax.axis_index(tuple(self.sizes))]
        record = record_of(eqn)
        named = names_of(eqn.params[record.axes])
        names = [each for name in named for each in (self.sizes if name == self.name else (name,))]
        eqn = eqn.replace(params={**eqn.params, record.axes: tuple(names)})
        if record.over not in ("sum", "max", "min", "scatter"):
            return rebind.bind_again(eqn, values)
        outs = rebind.bind_again(eqn, [self._widen(value) for value in values])
        return [out.astype(value.dtype) for out, value in zip(outs, values, strict=True)]

    def _replicate(self, eqn: JaxprEqn, values: Values) -> Values:
        """Run an equation whole on each device along the model axes."""
        inside = dataclasses.replace(self, model=frozenset())

        def bind(*whole: Any) -> Values:
            if record_of(eqn).tied:
                return interpreter.replay(eqn, whole)
            return rebind.bind_again(eqn, list(whole), inside.handler_of)

        specs, axes = {"in_specs": P(), "out_specs": [P() for _ in eqn.outvars]}, set(self.model)
        return jax.shard_map(bind, **specs, axis_names=axes, check_vma=False)(*values)


def without_constraint(eqn: JaxprEqn) -> Handler | None:
    """Leave out a constraint, which holds for the mesh that it was traced with."""
    return (lambda _, values: values) if _compat.name_of(eqn) == "sharding_constraint" else None


def axes_of_constraint(eqn: JaxprEqn) -> frozenset[Any]:
    """Return the mesh axes that a constraint of the user shards over; none of another equation."""
    is_constraint = _compat.name_of(eqn) == "sharding_constraint"
    spec = getattr(eqn.params["sharding"], "spec", P()) if is_constraint else P()
    return cut_along(spec) - {P.UNCONSTRAINED}
