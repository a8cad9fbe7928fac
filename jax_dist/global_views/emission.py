"""Runs a plan: shared equations on global arrays, the others in `shard_map`.

Shapes: a shared value is `[*s]`, however it lies; one that varies is `[N, *s]`, cut over the mapped
axis, so that each device has its own `[1, *s]`. The body sees `[*s]` of both.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import eval_jaxpr
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist.global_views import control_flow
from jax_dist.global_views.islands import BodyPlan, Island, Step
from jax_dist.global_views.parts import Gathers, Handlers, Shard
from jax_dist.passes import interpreter, rebind
from jax_dist.passes.interpreter import ELEMENTWISE, INLINED, Values


@dataclasses.dataclass(frozen=True, slots=True)
class Emitter:
    """How plans are run: on which mesh, and how exactly."""

    mesh: Mesh
    name: Any  # of the mapped axis, and of its mesh axis
    cuts_state: bool  # whether any shared value may be cut
    regathers: bool  # whether islands gather what is cut where they read it, each time
    reorders: bool  # whether sums may be taken over cut values, in another order
    anew: bool  # whether the equations name a mesh in their types, so that they are bound again
    anew_inside: bool  # whether that is another one than islands have

    @property
    def size(self) -> int:
        return self.mesh.shape[self.name]

    def run(self, plan: BodyPlan, args: Sequence[Any]) -> Values:
        """The results of a body: shared `[*s]`, others `[N, *s]`, as `plan.outs` says."""
        known: dict[Var, Any] = dict(zip(plan.body.invars, [*plan.consts, *args], strict=True))
        values = _Values(self, known)
        for stage in plan.stages:
            for step in stage.outside:
                self._run_outside(plan, step, values)
            if stage.island is not None:
                made = self._run_island(plan, stage.island, values)
                known.update(zip(stage.island.makes, made, strict=True))
        return [self._literal(a) if isinstance(a, Literal) else known[a] for a in plan.body.outvars]

    # ---- how values lie

    def laid(self, value: Any, spec: P) -> Any:
        return lax.with_sharding_constraint(value, NamedSharding(self.mesh, spec))

    def whole(self, value: Any) -> Any:
        """A shared value as every device needs it: gathered, if it is cut."""
        if not self.cuts_state or not jnp.ndim(value):
            return value
        return self.laid(value, P())

    def as_varying(self, value: Any, *, is_shared: bool) -> Any:
        """`[*s] -> [N, *s]`: each device its own copy."""
        if not is_shared:
            return value
        value = self.whole(value)
        return self.laid(jnp.broadcast_to(value, (self.size, *jnp.shape(value))), P(self.name))

    def _literal(self, literal: Literal) -> Any:
        (value,) = rebind.untied_literals([literal], [literal.val])
        return value

    # ---- outside

    def _run_outside(self, plan: BodyPlan, step: Step, values: "_Values") -> None:
        eqn = step.eqn
        if step.inner:
            whole = control_flow.reads_whole(step)
            operands = [
                self._literal(atom)
                if isinstance(atom, Literal)
                else (values.whole if place in whole else values.plain)(atom)
                for place, atom in enumerate(eqn.invars)
            ]
            with interpreter.located(eqn, anew=True):
                outs = control_flow.run_entered(self, plan, step, operands)
        else:
            is_whole = self.cuts_state and self._needs_whole(eqn)
            read = values.whole if is_whole else values.plain
            operands = list(dict.fromkeys(a for a in eqn.invars if isinstance(a, Var)))
            given = [read(var) for var in operands]
            outs = _evaluate([eqn], operands, eqn.outvars, given, anew=self.anew)
            if is_whole:  # or a body in it would be cut, as its reader wants the result
                outs = [self.whole(out) for out in outs]
        values.known.update(zip(eqn.outvars, outs, strict=True))

    def _needs_whole(self, eqn: JaxprEqn) -> bool:
        """Whether an equation would give other bits on cut operands."""
        name = eqn.primitive.name
        if name in ELEMENTWISE or name in _MOVES or (self.reorders and name in _SUMS):
            return False
        bodies = interpreter.bodies(eqn)
        if bodies and name in _CONTAINERS:
            inside = [inner for body in bodies for inner in interpreter.open_jaxpr(body).eqns]
            return any(map(self._needs_whole, inside))
        return True

    # ---- islands

    def _run_island(self, plan: BodyPlan, island: Island, values: "_Values") -> Values:
        is_shared = plan.is_shared
        parts = island.parts if self.regathers else {}

        def on_device(*blocks: Any) -> Values:
            slices = [
                block if is_shared(var) else lax.squeeze(block, [0])
                for var, block in zip(island.reads, blocks, strict=True)
            ]
            outs = self._on_device(island, slices, parts)
            return [
                out if is_shared(var) else lax.expand_dims(out, [0])
                for var, out in zip(island.makes, outs, strict=True)
            ]

        def in_spec(var: Var) -> P:
            if var in parts:
                return P(*[None] * parts[var], self.name)
            return P() if is_shared(var) else P(self.name)

        mapped = jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=tuple(map(in_spec, island.reads)),
            out_specs=[self._out_spec(plan, island, var) for var in island.makes],
            # As in pmap: with types, a gradient by what is shared would be summed twice.
            check_vma=False,
        )
        is_whole = lambda var: is_shared(var) and var not in parts
        return mapped(*[(values.whole if is_whole(v) else values.plain)(v) for v in island.reads])

    def _out_spec(self, plan: BodyPlan, island: Island, var: Var) -> P:
        if not plan.is_shared(var):
            return P(self.name)
        dim = island.scatters.get(var)
        return P() if dim is None else P(*[None] * dim, self.name)

    def _on_device(self, island: Island, slices: Values, parts: Mapping[Var, int]) -> Values:
        body = _stretch(island.eqns, island.reads, island.makes)
        summed = functools.partial(self._summed, island)
        sums = [eqn for eqn in island.eqns if any(v in island.scatters for v in eqn.outvars)]
        bind = rebind.bind_again if self.anew_inside else interpreter.replay
        gathers = Gathers(self.name, self._evaluate_inside, bind)
        handlers = gathers.handlers(body, {var: Shard(dim) for var, dim in parts.items()})
        return self._evaluate_inside(body, slices, handlers | {id(eqn): summed for eqn in sums})

    def _evaluate_inside(self, jaxpr: Any, values: Sequence[Any], handlers: Handlers) -> Values:
        """A body, with some equations handled otherwise."""
        if self.anew_inside:
            of_eqn = lambda eqn: handlers.get(id(eqn)) or _without_constraint(eqn)
            return rebind.evaluate(jaxpr, values, of_eqn)
        eqns = enumerate(interpreter.open_jaxpr(jaxpr).eqns)
        at = {place: handlers[id(eqn)] for place, eqn in eqns if id(eqn) in handlers}
        return interpreter.run(jaxpr, values, at, anew=True)

    def _summed(self, island: Island, eqn: JaxprEqn, operands: Values) -> Values:
        """A psum, of which some results are wanted cut."""
        outs = []
        for var, value in zip(eqn.outvars, operands, strict=True):
            dim = island.scatters.get(var)
            if dim is None:
                outs.append(lax.psum(value, self.name))
            else:
                scatter = functools.partial(lax.psum_scatter, tiled=True)
                outs.append(scatter(value, self.name, scatter_dimension=dim))
        return outs


@dataclasses.dataclass(frozen=True, slots=True)
class _Values:
    """What is known while a body runs; what is gathered once is kept."""

    emitter: Emitter
    known: dict[Var, Any]
    gathered: dict[Var, Any] = dataclasses.field(default_factory=dict)

    def plain(self, var: Var) -> Any:
        return self.known[var]

    def whole(self, var: Var) -> Any:
        if var not in self.gathered:
            self.gathered[var] = self.emitter.whole(self.known[var])
        return self.gathered[var]


def _evaluate(
    eqns: Sequence[JaxprEqn],
    reads: Sequence[Var],
    makes: Sequence[Var],
    values: Values,
    *,
    anew: bool,
) -> Values:
    """Some equations, as they were traced, or bound again in the context of now."""
    stretch = _stretch(eqns, reads, makes)
    if anew:
        return rebind.evaluate(stretch, values, _without_constraint)
    return eval_jaxpr(stretch, (), *values)


def _stretch(eqns: Sequence[JaxprEqn], reads: Sequence[Var], makes: Sequence[Var]) -> Jaxpr:
    effects = frozenset().union(*[eqn.effects for eqn in eqns])
    return Jaxpr((), list(reads), list(makes), eqns, effects, interpreter.unnamed())


def _without_constraint(eqn: JaxprEqn) -> Any:
    return (lambda _, values: values) if eqn.primitive.name == "sharding_constraint" else None


# On cut values these give the bits that they give on whole ones; a maximum does not, for XLA on CPU
# loses a NaN in one of the parts.
_MOVES = frozenset(
    (
        *("broadcast_in_dim", "concatenate", "copy_p", "dynamic_slice", "dynamic_update_slice"),
        *("expand_dims", "iota", "pad", "pvary", "reshape", "rev", "slice", "split", "squeeze"),
        *("stack", "tile", "transpose"),
    )
)
_SUMS = frozenset(("reduce_sum", "dot_general", "cumsum"))  # in another order, when cut
_CONTAINERS = frozenset((*INLINED, "custom_jvp_call", "custom_vjp_call"))
