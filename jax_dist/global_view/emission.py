"""Runs a plan: shared equations on global arrays, the others in `shard_map`.

Shapes: a shared value is `[*s]`, however it lies; one that varies is `[N, *s]`, cut over the mapped
axis, so that each device has its own `[1, *s]`. The body sees `[*s]` of both.

A part of the state may also be gathered where it is read, and again where it is read again. A
device then does not keep all whole arrays from the forward to the backward pass; more is sent for
it. With FSDP this is called to reshard after the forward pass. A scan over stacked layers gathers
one layer in each turn.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import eval_jaxpr
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist._rewrite import interpreter, rebind
from jax_dist._rewrite.interpreter import Atom, Handler, Values, fixed_in, operands_of_bodies
from jax_dist._rewrite.primitive_facts import record_of
from jax_dist.global_view import loops
from jax_dist.global_view.islands import BodyPlan, Island, Step
from jax_dist.global_view.mesh_axes import MeshAxes, without_constraint
from jax_dist.global_view.uniformity import Cuts


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Shard:
    """One of the parts that a value is given in."""

    dim: int  # along which they are cut
    spec: P  # how they lie
    uses: Iterator[int] = dataclasses.field(default_factory=itertools.count)  # numbers of gathers


_Shards: TypeAlias = Mapping[Var, _Shard]
_Handlers: TypeAlias = dict[int, Handler]  # by the identity of the equation


@dataclasses.dataclass(frozen=True, slots=True)
class Emitter:
    """How plans are run: on which mesh, and how exactly."""

    mesh: Mesh
    axes: MeshAxes
    cuts_state: bool  # whether any shared value may be cut
    reorders: bool  # whether sums may be taken over cut values, in another order
    anew: bool  # whether the equations name a mesh in their types, so that they are bound again
    anew_inside: bool  # whether that is another one than islands have
    ties: bool  # whether gathers are told to wait for the other operands of what reads them

    def run(self, plan: BodyPlan, args: Sequence[Any]) -> Values:
        """The results of a body: shared `[*s]`, others `[N, *s]`, as `plan.outs` says."""
        known: dict[Var, Any] = dict(zip(plan.body.invars, [*plan.consts, *args], strict=True))
        values = _Values(self, plan.cuts, known)
        for stage in plan.stages:
            for step in stage.outside:
                if step.inner:
                    outs = self._run_entered(plan, step, values)
                else:
                    outs = self._run_outside(step.eqn, values)
                known.update(zip(step.eqn.outvars, outs, strict=True))
            if stage.island is not None:
                made = self._run_island(plan, stage.island, values)
                known.update(zip(stage.island.makes, made, strict=True))
        return [values.plain(atom) for atom in plan.body.outvars]

    # ---- how values lie

    def laid(self, value: Any, spec: P) -> Any:
        return lax.with_sharding_constraint(value, NamedSharding(self.mesh, spec))

    def whole(self, value: Any) -> Any:
        """A shared value as every device needs it: gathered, if it is cut."""
        return self.laid(value, P()) if self.cuts_state and jnp.ndim(value) else value

    def for_each_device(self, value: Any) -> Any:
        """`[*s] -> [N, *s]`: each device its own copy."""
        value = self.for_islands(value)
        stacked = jnp.broadcast_to(value, (math.prod(self.axes.sizes.values()), *jnp.shape(value)))
        return self.laid(stacked, self.axes.varying(stacked.ndim))

    def for_islands(self, value: Any, spec: P | None = None) -> Any:
        """A shared value, gathered along the mapped axis; `spec` says how it lies."""
        if not self.axes.free:
            return self.whole(value)
        return value if spec is None else self.laid(value, self.axes.gathered(spec))

    # ---- outside

    def _run_entered(self, plan: BodyPlan, step: Step, values: "_Values") -> Values:
        eqn, whole = step.eqn, self._read_whole(step)
        operands = [
            (values.for_islands if place in whole and isinstance(atom, Var) else values.plain)(atom)
            for place, atom in enumerate(eqn.invars)
        ]
        with interpreter.located(eqn, anew=True):
            return loops.run(self, plan, step, operands)

    def _read_whole(self, step: Step) -> set[int]:
        """The operands that the bodies of a loop read whole, and that do not change in its turns.

        They are gathered before the loop, if they are cut, and not in each turn.
        """
        if record_of(step.eqn).kind != "loop":
            return set()
        found, fixed = set(), fixed_in(step.eqn)
        for inner, places in zip(step.inner, operands_of_bodies(step.eqn), strict=True):
            read: set[Atom] = set()
            for stage in inner.stages:
                read.update(stage.island.reads if stage.island is not None else ())
                for each in stage.outside:
                    needed = self._read_whole(each) if each.inner else ()
                    if not each.inner and self.cuts_state and self._needs_whole(each.eqn):
                        needed = range(len(each.eqn.invars))
                    operands = (each.eqn.invars[n] for n in needed)
                    read.update(atom for atom in operands if isinstance(atom, Var))
            inputs = zip(inner.body.invars[len(inner.consts) :], places, strict=True)
            found |= {place for var, place in inputs if place in fixed and var in read}
        return found

    def _run_outside(self, eqn: JaxprEqn, values: "_Values") -> Values:
        is_whole = self.cuts_state and self._needs_whole(eqn)
        operands = list(dict.fromkeys(a for a in eqn.invars if isinstance(a, Var)))
        given = [(values.whole if is_whole else values.plain)(var) for var in operands]
        stretch = _stretch([eqn], operands, eqn.outvars)
        if self.anew:
            outs = rebind.evaluate(stretch, given, without_constraint)
        else:
            outs = eval_jaxpr(stretch, (), *given)
        # Or a body in it would be cut, as its reader wants the result.
        return [self.whole(out) for out in outs] if is_whole else outs

    def _needs_whole(self, eqn: JaxprEqn) -> bool:
        """Whether an equation would give other bits on cut operands."""
        record = record_of(eqn)
        # A maximum of cut values loses a NaN in one of the parts, in XLA on CPU.
        if record.elementwise or record.moves:
            return False
        if self.reorders and record.sums and not record.ordered:
            return False
        operands: list[Any] = [atom.aval for atom in eqn.invars]
        if record.reduces and not jnp.issubdtype(operands[0].dtype, jnp.inexact):
            return False  # exact in any order
        bodies = interpreter.bodies(eqn)
        if bodies and record.call in ("inline", "ruled"):
            inside = [inner for body in bodies for inner in interpreter.open_jaxpr(body).eqns]
            return any(map(self._needs_whole, inside))
        return True

    # ---- islands

    def _run_island(self, plan: BodyPlan, island: Island, values: "_Values") -> Values:
        is_shared = plan.is_shared
        parts, body = island.parts, _stretch(island.eqns, island.reads, island.makes)
        scattered = [eqn for eqn in body.eqns if not island.scatters.keys().isdisjoint(eqn.outvars)]

        def total(var: Var, value: Any) -> Any:
            dim = island.scatters.get(var)
            return self.axes.summed(value, dim, () if dim is None else plan.cuts[var])

        def summed(eqn: JaxprEqn, operands: Values) -> Values:
            return [total(*pair) for pair in zip(eqn.outvars, operands, strict=True)]

        def on_device(*blocks: Any) -> Values:
            slices = [
                block if is_shared(var) else lax.squeeze(block, [0])
                for var, block in zip(island.reads, blocks, strict=True)
            ]
            shards = {var: _Shard(dim, plan.cuts[var]) for var, dim in parts.items()}
            handlers = self._gathering(body, shards)
            handlers.update((id(eqn), summed) for eqn in scattered)
            outs = self._run_inside(body, slices, handlers)
            return [
                out if is_shared(var) else lax.expand_dims(out, [0])
                for var, out in zip(island.makes, outs, strict=True)
            ]

        def spec(var: Var, dim: int | None) -> P:
            if not is_shared(var):
                return P(self.axes.part)
            return P() if dim is None else P(*[None] * dim, plan.cuts[var][dim])

        mapped = jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=tuple(spec(var, parts.get(var)) for var in island.reads),
            out_specs=[spec(var, island.scatters.get(var)) for var in island.makes],
            # As in pmap: with types, a gradient by what is shared would be summed twice.
            check_vma=False,
            axis_names=set(self.axes.sizes) if self.axes.free else set(self.mesh.axis_names),
        )
        is_whole = lambda var: is_shared(var) and var not in parts
        given = [(values.for_islands if is_whole(v) else values.plain)(v) for v in island.reads]
        return mapped(*given)

    def _run_inside(self, jaxpr: Any, values: Sequence[Any], handlers: _Handlers) -> Values:
        """A body, with some equations handled otherwise."""
        if self.anew_inside:
            of_eqn = lambda eqn: handlers.get(id(eqn)) or self._inside(eqn)
            return rebind.evaluate(jaxpr, values, of_eqn)
        eqns = enumerate(interpreter.open_jaxpr(jaxpr).eqns)
        at = {place: handlers[id(eqn)] for place, eqn in eqns if id(eqn) in handlers}
        return interpreter.run(jaxpr, values, at, anew=True)

    def _inside(self, eqn: JaxprEqn) -> Handler | None:
        if record_of(eqn).tied and not self.anew:
            return interpreter.replay
        return self.axes.handler_of(eqn)

    # ---- what islands gather

    def _gathering(self, body: Jaxpr, parts: _Shards) -> _Handlers:
        """Return handlers for what reads parts."""
        handlers: _Handlers = {}
        for eqn in body.eqns:
            read = {
                n: parts[a] for n, a in enumerate(eqn.invars) if isinstance(a, Var) and a in parts
            }
            if read:
                handlers[id(eqn)] = functools.partial(self._run_gathering, read)
        return handlers

    def _run_gathering(self, read: Mapping[int, _Shard], eqn: JaxprEqn, values: Values) -> Values:
        """Run an equation that reads parts at these places."""
        inside = _parts_inside(eqn, read)
        whole = self._with_whole(eqn, values, read, [n for n in read if n not in inside])
        if not inside:
            if self.anew_inside:
                return rebind.bind_again(eqn, whole, self._inside)
            return interpreter.replay(eqn, whole)
        (jaxpr,) = interpreter.bodies(eqn)
        body = interpreter.open_jaxpr(jaxpr)
        parts = {body.invars[place]: part for place, part in inside.items()}
        run = lambda args: self._run_inside(jaxpr, args, self._gathering(body, parts))
        if _compat.name_of(eqn) != "scan":
            # Evaluated in its place, a checkpoint keeps what it is for: a computation of its own.
            is_checkpoint = record_of(eqn).call == "checkpoint"
            return run(lax.optimization_barrier(whole) if is_checkpoint else whole)
        layout = _compat.scan_layout(eqn.params, len(whole), len(eqn.outvars))
        first, carried = len(layout.constants), len(layout.carries_in)

        def turn(carry: Values, xs: Values) -> tuple[Values, Values]:
            outs = run([*whole[:first], *carry, *xs])
            return outs[:carried], outs[carried:]

        return loops.scanned(turn, eqn, whole[first : first + carried], whole[first + carried :])

    def _with_whole(
        self, eqn: JaxprEqn, values: Values, read: Mapping[int, _Shard], places: Sequence[int]
    ) -> Values:
        """The operands, those in these places gathered, if need be not before others are there."""
        values = list(values)
        is_other = lambda n: self.ties and isinstance(eqn.invars[n], Var) and n not in read
        tied = [*places, *filter(is_other, range(len(values)))] if places else []
        barred = lax.optimization_barrier(tuple(values[n] for n in tied))
        for n, value in zip(tied, barred, strict=True):
            if n in read:
                # XLA on CPU drops barriers before it looks for equal instructions for the last
                # time, so two gathers of one value differ: each has one more dimension of length 1.
                more = tuple(range(next(read[n].uses)))
                spec, dim = P(*[None for _ in more], *read[n].spec), read[n].dim + len(more)
                value = self.axes.gather(jnp.expand_dims(value, more), dim, spec)
                value = jnp.squeeze(value, more)
            values[n] = value
        return values


@dataclasses.dataclass(frozen=True, slots=True)
class _Values:
    """What is known while a body runs; what is gathered once is kept."""

    emitter: Emitter
    cuts: Cuts
    known: dict[Var, Any]
    gathered: dict[Var, Any] = dataclasses.field(default_factory=dict)
    for_all: dict[Var, Any] = dataclasses.field(default_factory=dict)

    def plain(self, atom: Atom) -> Any:
        if isinstance(atom, Literal):
            (value,) = rebind.untied_literals([atom], [atom.val])
            return value
        return self.known[atom]

    def for_islands(self, var: Atom) -> Any:
        if var not in self.for_all:
            self.for_all[var] = self.emitter.for_islands(self.known[var], self.cuts.get(var))
        return self.for_all[var]

    def whole(self, var: Atom) -> Any:
        if var not in self.gathered:
            self.gathered[var] = self.emitter.whole(self.known[var])
        return self.gathered[var]


def _stretch(eqns: Sequence[JaxprEqn], reads: Sequence[Var], makes: Sequence[Var]) -> Jaxpr:
    effects = frozenset().union(*[eqn.effects for eqn in eqns])
    return Jaxpr((), list(reads), list(makes), eqns, effects, interpreter.unnamed())


def _parts_inside(eqn: JaxprEqn, read: Mapping[int, _Shard]) -> dict[int, _Shard]:
    """The operands that the body of an equation takes in parts.

    Those of a call; and of a scan what it walks over, unless along the dimension that is cut. What
    all its turns read is gathered once, before it.
    """
    if record_of(eqn).call in ("inline", "checkpoint"):
        found = dict(read)
    elif _compat.name_of(eqn) == "scan":
        layout = _compat.scan_layout(eqn.params, len(eqn.invars), len(eqn.outvars))
        first = len(layout.constants) + len(layout.carries_in)
        found = {
            n: _Shard(part.dim - 1, P(*part.spec[1:]))
            for n, part in read.items()
            if n >= first and part.dim
        }
    else:
        return {}
    body = interpreter.open_jaxpr(interpreter.bodies(eqn)[0])
    results = {atom for atom in body.outvars if isinstance(atom, Var)}
    return {place: part for place, part in found.items() if body.invars[place] not in results}
