"""The mapped axis on a mesh: which of its axes it is, and what XLA may cut over the others.

In the step the mapped axis has one name. On the mesh it may be several axes, and a collective of
the step goes over all of them. Where the islands are manual over these axes only, XLA cuts what is
computed in them over the further ones, as the state lies. What it cannot cut runs in a `shard_map`
of its own, whole on each device along the further axes. So does a loop or a branch in which devices
may go other ways: what XLA sends in its body waits for all devices, also for those that left it.
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
from jax_dist.uniformity import cut_along


@dataclasses.dataclass(frozen=True, slots=True)
class MeshAxes:
    """Where the mapped axis lies."""

    name: Any  # in the step
    sizes: Mapping[Any, int]  # of the mesh axes that it is, outermost first
    free: frozenset[Any] = frozenset()  # the further axes, if XLA may cut over them in islands
    # XLA for CPU then aborts at a sum of bfloat16, unless it is one of float32.
    widens: bool = False
    is_tpu: bool = False

    @property
    def part(self) -> Any:
        """Of a spec: what cuts a dimension over all devices of the mapped axis."""
        return tuple(self.sizes) if len(self.sizes) > 1 else next(iter(self.sizes))

    def varying(self, rank: int) -> P:
        """How a value of each device lies, `[N, *s]`."""
        return P(self.part, *[P.UNCONSTRAINED if self.free else None] * (rank - 1))

    def gathered(self, spec: Any) -> P:
        """As a spec, but whole along the mapped axis."""
        own = [tuple(n for n in names_of(part) if n not in self.sizes) for part in spec]
        return P(*[part or None for part in own])

    def summed(self, value: Any, dim: int | None = None, spec: Any = ()) -> Any:
        """The sum over all devices; of a dimension, each keeps the piece that the spec says."""
        wide, over = self._widened(value), tuple(self.sizes)
        if dim is not None:
            names = names_of(spec[dim])
            wide = self._in_place(functools.partial(self._scattered, names, dim), wide, spec)
            over = tuple(name for name in over if name not in names)
        out = (lax.psum(wide, over) if over else wide).astype(value.dtype)
        if not self.is_tpu or jnp.ndim(out) < 2:
            return out
        # By rows, as the state lies. XLA for TPU would rather copy all of the state, and early.
        return with_layout_constraint(out, Layout(tuple(range(out.ndim))))

    def _scattered(self, names: Any, dim: int, value: Any) -> Any:
        """Done as XLA for TPU does it, whose own constants for it take more memory."""
        if not self.is_tpu:
            return lax.psum_scatter(value, names, scatter_dimension=dim, tiled=True)
        size = value.shape[dim] // lax.axis_size(names)
        start = lax.axis_index(names).astype(jnp.uint32) * size  # never compared with zero
        return lax.dynamic_slice_in_dim(lax.psum(value, names), start, size, dim)

    def gather(self, value: Any, dim: int, spec: P) -> Any:
        """The whole along a dimension, of which each device has its own piece."""
        gather = lambda own: lax.all_gather(own, names_of(spec[dim]), axis=dim, tiled=True)
        return self._in_place(gather, value, spec)

    def _in_place(self, send: Callable[[Any], Any], value: Any, spec: Any) -> Any:
        """What is sent along the mapped axis, by each device of what it has along further ones.

        XLA would take it whole along these.
        """
        if self.free:
            at, free = self.gathered(spec), set(self.free)
            send = jax.shard_map(send, in_specs=at, out_specs=at, axis_names=free, check_vma=False)
        return send(value)

    def _widened(self, value: Any) -> Any:
        return value.astype(jnp.float32) if self.widens and value.dtype == jnp.bfloat16 else value

    # ---- equations in islands

    def changes(self, eqn: JaxprEqn) -> bool:
        """Whether an equation is another one in islands on this mesh."""
        # The mesh that it was traced with stands in its context.
        is_index = bool(self.free) and _compat.name_of(eqn) == "axis_index"
        return is_index or self._handler_of(eqn) is not None

    def handler_of(self, eqn: JaxprEqn) -> Handler | None:
        """What to do with an equation instead of binding it as it is."""
        return self._handler_of(eqn) or without_constraint(eqn)

    def _handler_of(self, eqn: JaxprEqn) -> Handler | None:
        # One that names no axis says that a value is whole along the further ones.
        is_constraint = _compat.name_of(eqn) == "sharding_constraint"
        if self.free and is_constraint and hasattr(eqn.params["sharding"], "spec"):
            return self._constrained
        is_own = self.name in interpreter.named_axes(eqn)
        if is_own and (tuple(self.sizes) != (self.name,) or self.widens):
            return self._collective
        record = record_of(eqn)
        decides = record.kind == "branch" or _compat.name_of(eqn) == "while"
        if self.free and (record.unsplit or decides):
            return self._whole
        return None

    def _constrained(self, eqn: JaxprEqn, values: Values) -> Values:
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
        own = [each for name in named for each in (self.sizes if name == self.name else (name,))]
        eqn = eqn.replace(params={**eqn.params, record.axes: tuple(own)})
        if record.over not in ("sum", "max", "min", "scatter"):
            return rebind.bind_again(eqn, values)
        outs = rebind.bind_again(eqn, [self._widened(value) for value in values])
        return [out.astype(value.dtype) for out, value in zip(outs, values, strict=True)]

    def _whole(self, eqn: JaxprEqn, values: Values) -> Values:
        inside = dataclasses.replace(self, free=frozenset())

        def bind(*whole: Any) -> Values:
            if record_of(eqn).tied:
                return interpreter.replay(eqn, whole)
            return rebind.bind_again(eqn, list(whole), inside.handler_of)

        specs, free = {"in_specs": P(), "out_specs": [P() for _ in eqn.outvars]}, set(self.free)
        return jax.shard_map(bind, **specs, axis_names=free, check_vma=False)(*values)


def without_constraint(eqn: JaxprEqn) -> Handler | None:
    """Leaves out a constraint, which holds for the mesh that it was traced with."""
    return (lambda _, values: values) if _compat.name_of(eqn) == "sharding_constraint" else None


def names_of_constraint(eqn: JaxprEqn) -> frozenset[Any]:
    """The mesh axes that a constraint of the user cuts over; none of another equation."""
    is_one = _compat.name_of(eqn) == "sharding_constraint"
    spec = getattr(eqn.params["sharding"], "spec", P()) if is_one else P()
    return cut_along(spec) - {P.UNCONSTRAINED}
