"""Evaluation of a plan: equations on global arrays, and regions in `shard_map`.

Shapes: a uniform value is `[*s]`, however it is sharded; a varying one is `[N, *s]`, sharded over
the mapped axis, so that each device has its own `[1, *s]`. The body sees `[*s]` of both.

With `regather`, shards of the state are gathered each time that they are read.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist._rewrite import interpreter, rebind
from jax_dist._rewrite.interpreter import (
    Atom,
    Handler,
    Values,
    fixed_in,
    operands_of_bodies,
    record_of,
)
from jax_dist.global_view.analysis import Specs, ValueFacts, variables
from jax_dist.global_view.loops import EnteredEquation, scan_as
from jax_dist.global_view.mesh_axes import MeshAxes
from jax_dist.global_view.regions import BodyPlan, GlobalEquation, Region, TurnSum


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Shard:
    """A value of which each device has a shard."""

    dim: int  # that is sharded over the mapped axis
    spec: P


_Shards: TypeAlias = Mapping[Var, _Shard]
_Operands: TypeAlias = Mapping[int, _Shard]  # the sharded operands of an equation, by position
_Sums: TypeAlias = Mapping[Var, Callable[[Any], Any]]  # of what each turn of a scan makes
_Handlers: TypeAlias = dict[int, Handler]  # by the identity of the equation


@dataclasses.dataclass(frozen=True, slots=True)
class Emitter:
    """The mesh that plans run on, and how exactly they run."""

    mesh: Mesh
    axes: MeshAxes
    shards_state: bool  # whether any uniform value may be sharded
    reorders: bool  # whether sums may be taken over sharded values, in another order

    def run(self, plan: BodyPlan, args: Sequence[Any]) -> Values:
        """Return the results of a body: uniform `[*s]`, others `[N, *s]`, as `plan.outs` says."""
        known = dict(zip(plan.body.invars, [*plan.consts, *args], strict=True))
        for stage in plan.stages:
            for step in stage.outside:
                operands = _read(step.eqn.invars, known)
                if step.inner:
                    outs = self._run_entered(plan.facts, step, operands)
                else:
                    outs = self._run_global(step.eqn, operands)
                known.update(zip(step.eqn.outvars, outs, strict=True))
            if stage.region is not None:
                outs = self._run_region(plan.facts, stage.region, known)
                known.update(zip(stage.region.makes, outs, strict=True))
        return _read(plan.body.outvars, known)

    def constrain(self, value: Any, spec: P) -> Any:
        return lax.with_sharding_constraint(value, NamedSharding(self.mesh, spec))

    def replicate(self, value: Any) -> Any:
        """Return a uniform value as every device needs it: gathered, if it is sharded."""
        is_whole = not self.shards_state or not jnp.ndim(value)
        return value if is_whole else self.constrain(value, P())

    def gather(self, value: Any, spec: P | None = None) -> Any:
        """Return a uniform value for a region, gathered along the mapped axis."""
        if not self.axes.model:
            return self.replicate(value)
        return value if spec is None else self.constrain(value, self.axes.gathered(spec))

    def stack(self, value: Any) -> Any:
        """`[*s] -> [N, *s]`: give each device its own copy."""
        value = self.gather(value)
        stacked = jnp.broadcast_to(value, (math.prod(self.axes.sizes.values()), *jnp.shape(value)))
        return self.constrain(stacked, self.axes.varying(stacked.ndim))

    def _run_entered(self, facts: ValueFacts, step: GlobalEquation, operands: Values) -> Values:
        eqn = step.eqn
        wanted = {
            place
            for inner, places in zip(step.inner, operands_of_bodies(eqn), strict=True)
            for var, place in zip(inner.inputs, places, strict=True)
            if inner.facts.spec_of(var) is not None
        }
        # What no turn of a loop wants sharded is gathered once, before it.
        for place in fixed_in(eqn) if record_of(eqn).kind == "loop" else ():
            atom = eqn.invars[place]
            if place not in wanted and isinstance(atom, Var) and facts.is_uniform(atom):
                operands[place] = self.gather(operands[place], facts.spec_of(atom))
        with interpreter.located(eqn, anew=True):
            return EnteredEquation(self, facts, step).run(operands)

    def _run_global(self, eqn: JaxprEqn, operands: Values) -> Values:
        """Run an equation on global arrays, replicated first if its bits depend on shardings."""
        if not (self.shards_state and self._needs_whole(eqn)):
            return interpreter.replay(eqn, operands)
        outs = interpreter.replay(eqn, [self.replicate(value) for value in operands])
        # Or a body in it would be sharded, as its reader wants the result.
        return [self.replicate(out) for out in outs]

    def _needs_whole(self, eqn: JaxprEqn) -> bool:
        """Return whether an equation would give other bits on sharded operands."""
        record = record_of(eqn)
        operands: list[Any] = [atom.aval for atom in eqn.invars]
        # A maximum of shards loses a NaN in one of them, in XLA on CPU.
        keeps_bits = record.elementwise or record.moves
        is_sum = self.reorders and record.sums and not record.ordered
        # Whole numbers are reduced to the same bits in any order.
        is_exact = record.reduces and not jnp.issubdtype(operands[0].dtype, jnp.inexact)
        return not (keeps_bits or is_sum or is_exact)

    def _run_region(self, facts: ValueFacts, region: Region, known: Mapping[Var, Any]) -> Values:
        """Run a region in one `shard_map`; `known` has the global arrays that it reads."""
        body = _jaxpr_of(region.eqns, region.reads, region.makes)
        is_gathered = lambda var: facts.is_uniform(var) and var not in region.shards

        def on_device(*blocks: Any) -> Values:
            args = [
                block if facts.is_uniform(var) else lax.squeeze(block, [0])
                for var, block in zip(region.reads, blocks, strict=True)
            ]
            shards = {var: _Shard(dim, facts.specs[var]) for var, dim in region.shards.items()}
            sums, handlers = self._sums(facts.specs, region)
            outs = self._run_inside(body, args, {**self._gathering(body, shards, sums), **handlers})
            return [
                out if facts.is_uniform(var) else lax.expand_dims(out, [0])
                for var, out in zip(region.makes, outs, strict=True)
            ]

        def spec_of(var: Var, dim: int | None) -> P:
            if not facts.is_uniform(var):
                return P(self.axes.part)
            return P() if dim is None else P(*[None] * dim, facts.specs[var][dim])

        mapped = jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=tuple(spec_of(var, region.shards.get(var)) for var in region.reads),
            out_specs=[spec_of(var, region.scatters.get(var)) for var in region.makes],
            # As in pmap: with types, a gradient by a uniform value would be summed twice.
            check_vma=False,
            axis_names=set(self.axes.sizes) if self.axes.model else set(self.mesh.axis_names),
        )
        return mapped(
            *[
                self.gather(known[var], facts.spec_of(var)) if is_gathered(var) else known[var]
                for var in region.reads
            ]
        )

    def _sums(self, specs: Specs, region: Region) -> tuple[_Sums, _Handlers]:
        """Return the sums that each turn of a scan takes, and handlers for scattered psums."""
        in_turns = {turn_sum.total for turn_sum in region.turn_sums.values()}

        def total(var: Var, value: Any, first: int = 0) -> Any:
            """Sum over devices; a turn of a scan has the dimensions from `first` on."""
            dim = region.scatters.get(var)
            if dim is None:  # not scattered: all devices keep the whole sum
                return self.axes.sum(value)
            return self.axes.sum(value, dim - first, P(*specs[var][first:]))

        def turn_total(turn_sum: TurnSum, value: Any) -> Any:
            for eqn in turn_sum.between:
                operands = _read(eqn.invars, dict.fromkeys(variables(eqn.invars), value))
                (value,) = self._bind(eqn, operands)
            return total(turn_sum.total, value, 1)

        def run_psum(eqn: JaxprEqn, operands: Values) -> Values:
            pairs = zip(eqn.outvars, operands, strict=True)
            return [value if var in in_turns else total(var, value) for var, value in pairs]

        handlers: _Handlers = {
            id(eqn): run_psum
            for eqn in region.eqns
            if not region.scatters.keys().isdisjoint(eqn.outvars)
        }
        for turn_sum in region.turn_sums.values():
            handlers.update((id(eqn), _forward) for eqn in turn_sum.between)
        sums = {
            result: functools.partial(turn_total, turn_sum)
            for result, turn_sum in region.turn_sums.items()
        }
        return sums, handlers

    def _run_inside(self, jaxpr: Any, values: Sequence[Any], handlers: _Handlers) -> Values:
        """Run a jaxpr on values; `handlers` replace the evaluation of some of its equations."""
        if self.axes.rebinds:
            handler_of = lambda eqn: handlers.get(id(eqn)) or self.axes.handler_of(eqn)
            return rebind.evaluate(jaxpr, values, handler_of)
        return interpreter.run(jaxpr, values, lambda eqn: handlers.get(id(eqn)))

    def _bind(self, eqn: JaxprEqn, values: Values) -> Values:
        if self.axes.rebinds:
            return rebind.bind_again(eqn, values, self.axes.handler_of)
        return interpreter.replay(eqn, values)

    def _gathering(self, body: Jaxpr, shards: _Shards, sums: _Sums) -> _Handlers:
        """Return handlers for what reads shards, and for scans that sum in their turns."""
        handlers: _Handlers = {}
        for eqn in body.eqns:
            read = {
                n: shards[atom]
                for n, atom in enumerate(eqn.invars)
                if isinstance(atom, Var) and atom in shards
            }
            if read or not sums.keys().isdisjoint(eqn.outvars):
                handlers[id(eqn)] = functools.partial(self._run_gathering, read, sums)
        return handlers

    def _run_gathering(self, read: _Operands, sums: _Sums, eqn: JaxprEqn, values: Values) -> Values:
        """Run an equation that reads shards, or a scan of which each turn sums its own results."""
        inside = _shards_inside(eqn, read)
        gathered = {n: shard for n, shard in read.items() if n not in inside}
        whole = self._gather_operands(eqn, values, gathered, read) if gathered else values
        if not inside and sums.keys().isdisjoint(eqn.outvars):
            return self._bind(eqn, whole)
        (jaxpr,) = interpreter.bodies(eqn)
        body = interpreter.open_jaxpr(jaxpr)
        shards = {body.invars[place]: shard for place, shard in inside.items()}
        run = lambda args: self._run_inside(jaxpr, args, self._gathering(body, shards, {}))
        if _compat.name_of(eqn) != "scan":
            # Evaluated in its place, a checkpoint keeps what it is for: a computation of its own.
            is_checkpoint = record_of(eqn).call == "checkpoint"
            return run(lax.optimization_barrier(whole) if is_checkpoint else whole)
        layout = _compat.scan_layout(eqn.params, len(whole), len(eqn.outvars))
        first, carried = len(layout.constants), len(layout.carries_in)

        def turn(carry: Values, xs: Values) -> tuple[Values, Values]:
            outs = run([*whole[:first], *carry, *xs])
            named = zip(eqn.outvars, outs, strict=True)
            outs = [sums[var](out) if var in sums else out for var, out in named]
            return outs[:carried], outs[carried:]

        return scan_as(turn, eqn, whole[first : first + carried], whole[first + carried :])

    def _gather_operands(
        self, eqn: JaxprEqn, values: Values, gathered: _Operands, read: _Operands
    ) -> Values:
        """Gather sharded operands, but only after the other operands are computed."""
        values = list(values)
        # XLA for TPU gathers late by itself, and does not fuse what is tied by a barrier.
        ties = self.axes.platform != "tpu"
        others = [n for n, atom in enumerate(eqn.invars) if isinstance(atom, Var) and n not in read]
        tied = [*gathered, *others] if ties else [*gathered]
        barred = lax.optimization_barrier(tuple(values[n] for n in tied))
        for n, value in zip(tied, barred, strict=True):
            shard = gathered.get(n)
            values[n] = value if shard is None else self.axes.gather(value, shard.dim, shard.spec)
        return values


def _read(atoms: Sequence[Atom], known: Mapping[Var, Any]) -> Values:
    return rebind.untied_literals(atoms, interpreter.read_all(atoms, known))


def _forward(eqn: JaxprEqn, values: Values) -> Values:
    """Return the operand unchanged: the scan before it has evaluated this equation already."""
    return [value for value, atom in zip(values, eqn.invars, strict=True) if isinstance(atom, Var)]


def _jaxpr_of(eqns: Sequence[JaxprEqn], reads: Sequence[Var], makes: Sequence[Var]) -> Jaxpr:
    effects = frozenset().union(*[eqn.effects for eqn in eqns])
    return Jaxpr((), list(reads), list(makes), eqns, effects, interpreter.unnamed())


def _shards_inside(eqn: JaxprEqn, read: _Operands) -> dict[int, _Shard]:
    """Return the operands that the body of an equation takes as shards.

    Those of a call; and of a scan what it goes over, unless along the dimension that is sharded.
    What all its turns read is gathered once, before it.
    """
    if record_of(eqn).call in ("inline", "checkpoint"):
        shards = dict(read)
    elif _compat.name_of(eqn) == "scan":
        layout = _compat.scan_layout(eqn.params, len(eqn.invars), len(eqn.outvars))
        first = len(layout.constants) + len(layout.carries_in)
        shards = {
            n: _Shard(shard.dim - 1, P(*shard.spec[1:]))
            for n, shard in read.items()
            if n >= first and shard.dim
        }
    else:
        return {}
    body = interpreter.open_jaxpr(interpreter.bodies(eqn)[0])
    results = {atom for atom in body.outvars if isinstance(atom, Var)}
    return {place: shard for place, shard in shards.items() if body.invars[place] not in results}
