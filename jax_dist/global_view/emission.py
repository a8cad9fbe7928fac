"""Evaluation of a plan: equations on global arrays, and manual regions, each in a `shard_map`.

Shapes: a uniform value is `[*s]`, however it is sharded; a varying one is `[N, *s]`, sharded over
the mapped axis, so that each device has its own `[1, *s]`. The body of a region sees `[*s]` of
both. What a loop carries keeps one form: a carry that varies once varies from the start, so a
uniform value goes in as `[N, *s]`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist._passes import interpreter, rebind
from jax_dist._passes.interpreter import Atom, Handler, Values, record_of
from jax_dist.global_view.analysis import ValueFacts, variables
from jax_dist.global_view.mesh_axes import MeshAxes, Shard
from jax_dist.global_view.regions import BodyPlan, EnteredEquation, Region

_Shards: TypeAlias = Mapping[Var, Shard]
_Operands: TypeAlias = Mapping[int, Shard]  # the sharded operands of an equation, by position
_Handlers: TypeAlias = dict[int, Handler]  # by the identity of the equation


@dataclasses.dataclass(frozen=True, slots=True)
class Emitter:
    """The mesh that plans run on, and how exactly they run."""

    axes: MeshAxes
    reorders: bool  # whether sums may be taken over sharded values, in another order

    def run(self, plan: BodyPlan, args: Sequence[Any]) -> Values:
        """Return a body's results for `args`; both are `[*s]` if uniform, else `[N, *s]`."""
        inputs = [*plan.body.constvars, *plan.body.invars]
        env: dict[Any, Any] = dict(zip(inputs, [*plan.closed.consts, *args], strict=True))
        for step in plan.steps:
            if isinstance(step, Region):
                outvars = step.body.outvars
                outs = self._run_region(plan.facts, step, env)
            elif isinstance(step, EnteredEquation):
                outvars = step.eqn.outvars
                outs = self._run_entered(plan.facts, step, _read(step.eqn.invars, env))
            else:
                outvars = step.outvars
                outs = self._run_global(step, _read(step.invars, env))
            env.update(zip(outvars, outs, strict=True))
        return _read(plan.body.outvars, env)

    def constrain(self, value: Any, spec: P | None) -> Any:
        """Shard a value by a spec; None leaves it as it is."""
        if spec is None:
            return value
        return lax.with_sharding_constraint(value, NamedSharding(self.axes.mesh, spec))

    def gather(self, value: Any, spec: P | None = None) -> Any:
        """Return a uniform value, gathered along the mapped axis as regions read it."""
        if self.axes.model:
            return self.constrain(value, None if spec is None else self.axes.drop_mapped(spec))
        return self.constrain(value, P())

    def stack(self, value: Any) -> Any:
        """Return a copy for each device: `(4, 2)` becomes `(8, 4, 2)` on 8 devices."""
        value, axes = self.gather(value), self.axes
        stacked = jnp.broadcast_to(value, (axes.size, *jnp.shape(value)))
        others = [P.UNCONSTRAINED if axes.model else None] * jnp.ndim(value)
        return self.constrain(stacked, P(axes.mapped, *others))

    def _run_global(self, eqn: JaxprEqn, operands: Values) -> Values:
        """Run an equation on global arrays, replicated first if its bits depend on shardings."""
        record = record_of(eqn)
        keeps_bits = record.elementwise or record.moves
        may_reorder = self.reorders and record.sums and not record.ordered
        # Whole numbers are reduced to the same bits in any order. Not so a maximum of floats: in
        # XLA on CPU, one over shards loses a NaN in one of them.
        is_exact = record.reduces and not jnp.issubdtype(jnp.result_type(operands[0]), jnp.inexact)
        if keeps_bits or may_reorder or is_exact:
            return interpreter.replay(eqn, operands)
        outs = interpreter.replay(eqn, [self.constrain(value, P()) for value in operands])
        # Without this, XLA would shard the bodies of a loop as the readers of its result want it.
        return [self.constrain(out, P()) for out in outs]

    def _run_region(self, facts: ValueFacts, region: Region, env: Mapping[Var, Any]) -> Values:
        """Return the results of a region in one `shard_map`; `env` has the arrays it reads."""
        body, axes = region.body, self.axes

        def read_operand(var: Var) -> Any:
            if facts.is_uniform(var) and var not in region.shards:
                return self.gather(env[var], facts.spec_of(var))
            return env[var]

        def run_on_device(*blocks: Any) -> Values:  # `(1, 4)` of a varying `(8, 4)`, run as `(4,)`
            pairs = zip(body.invars, blocks, strict=True)
            args = [x if facts.is_uniform(var) else lax.squeeze(x, [0]) for var, x in pairs]
            results = zip(body.outvars, _RegionBody(axes, region).run(args), strict=True)
            return [x if facts.is_uniform(var) else lax.expand_dims(x, [0]) for var, x in results]

        def region_spec(var: Any, shards: _Shards) -> P:
            if not facts.is_uniform(var):
                return P(axes.mapped)
            shard = shards.get(var)
            return P() if shard is None else P(*[None] * shard.dim, shard.spec[shard.dim])

        mapped = jax.shard_map(
            run_on_device,
            mesh=axes.mesh,
            in_specs=tuple(region_spec(var, region.shards) for var in body.invars),
            out_specs=[region_spec(var, region.scatters) for var in body.outvars],
            # As in pmap: with types, a gradient by a uniform value would be summed twice.
            check_vma=False,
            axis_names=set(axes.mapped if axes.model else axes.mesh.axis_names),
        )
        return mapped(*map(read_operand, body.invars))

    # --- loops and branches

    def _run_entered(self, facts: ValueFacts, step: EnteredEquation, values: Values) -> Values:
        """Run a loop or branch whose bodies have plans; what varies in `values` is `[N, *s]`."""
        eqn, name = step.eqn, _compat.name_of(step.eqn)
        # A constant of the loop that no iteration wants sharded is gathered once, before it.
        constants = interpreter.loop_counts(eqn).constants if name in ("scan", "while") else 0
        for number in range(constants):
            if step.uniform_ins[number] and step.in_specs[number] is None:
                values[number] = self.gather(values[number], facts.spec_of(eqn.invars[number]))
        with interpreter.use_location(eqn, anew=True):
            if name == "scan":
                return self._run_scan(step, values)
            if name == "while":
                return self._run_while(step, values)
            index, *operands = values  # of a cond
            branches = [functools.partial(self._run_body, step, plan) for plan in step.plans]
            return lax.switch(jnp.asarray(index, jnp.int32), branches, *operands)

    def _run_scan(self, step: EnteredEquation, values: Values) -> Values:
        """Run a scan; its xs and ys that vary are `[N, T, *s]`, and `[T, N, *s]` for `lax.scan`."""
        (plan,), counts = step.plans, interpreter.loop_counts(step.eqn)
        values = self._stack_all(values, step.uniform_ins, plan.uniform_ins)
        constants = values[: counts.constants]
        carries = values[counts.constants : counts.first_x]
        carries = self._constrain_all(carries, step.out_specs[: counts.carries])
        pairs = zip(values[counts.first_x :], plan.uniform_ins[counts.first_x :], strict=True)
        xs = [x if is_uniform else jnp.moveaxis(x, 1, 0) for x, is_uniform in pairs]
        run_iteration = lambda args: self._run_body(step, plan, *args)
        outs = _scan_with(step.eqn, [*constants, *carries, *xs], run_iteration)
        pairs = zip(outs[counts.carries :], step.uniform_outs[counts.carries :], strict=True)
        ys = [y if is_uniform else jnp.moveaxis(y, 0, 1) for y, is_uniform in pairs]
        return [*outs[: counts.carries], *ys]

    def _run_while(self, step: EnteredEquation, values: Values) -> Values:
        """Run a while loop; `values` are constants of its condition, of its body, and carries."""
        condition, body = step.plans
        for_condition = step.eqn.params["cond_nconsts"]
        first_carry = interpreter.loop_counts(step.eqn).constants
        uniform_inside = [*condition.uniform_ins[:for_condition], *body.uniform_ins]
        values = self._stack_all(values, step.uniform_ins, uniform_inside)
        body_constants = values[for_condition:first_carry]
        return lax.while_loop(
            lambda carry: self.run(condition, [*values[:for_condition], *carry])[0],
            lambda carry: self._run_body(step, body, *body_constants, *carry),
            self._constrain_all(values[first_carry:], step.out_specs),
        )

    def _run_body(self, step: EnteredEquation, plan: BodyPlan, *args: Any) -> Values:
        """Run a body of `step`; a result that varies in another branch or iteration is stacked."""
        specs = map(plan.facts.spec_of, plan.body.outvars)
        outs = self._constrain_all(self.run(plan, args), specs)
        return self._stack_all(outs, plan.uniform_outs, step.uniform_outs)

    def _constrain_all(self, values: Values, specs: Iterable[P | None]) -> Values:
        return [self.constrain(x, spec) for x, spec in zip(values, specs, strict=True)]

    def _stack_all(self, values: Values, before: Sequence[bool], after: Sequence[bool]) -> Values:
        """Stack as `[N, *s]` the values that are uniform by `before`, but not by `after`."""
        flags = zip(values, before, after, strict=True)
        return [x if old == new else self.stack(x) for x, old, new in flags]


@dataclasses.dataclass(frozen=True, slots=True)
class _RegionBody:
    """Evaluation of a region on one device, with its psums scattered and its shards gathered."""

    axes: MeshAxes
    region: Region

    def run(self, args: Values) -> Values:
        """Return the results on this device: `[*s]`, or a shard of those in `region.scatters`."""
        # What evaluates some equations in another way than their primitive.
        handlers = self._gather_handlers(self.region.body, self.region.shards)
        for eqn in self.region.body.eqns:
            if not self.region.scatters.keys().isdisjoint(eqn.outvars):
                handlers[id(eqn)] = self._run_psum  # a psum_scatter
        for iteration_sum in self.region.iteration_sums.values():  # computed within the scan
            handlers.update((id(eqn), _forward) for eqn in iteration_sum.between)
        return self._evaluate(self.region.body, args, handlers)

    def _evaluate(self, jaxpr: Any, values: Values, handlers: _Handlers) -> Values:
        """Run a jaxpr on values; `handlers` replace the evaluation of some of its equations."""
        if self.axes.rebinds:
            handler_of = lambda eqn: handlers.get(id(eqn)) or self.axes.handler_of(eqn)
            return rebind.evaluate(jaxpr, values, handler_of)
        return interpreter.run(jaxpr, values, lambda eqn: handlers.get(id(eqn)))

    def _bind(self, eqn: JaxprEqn, values: Values) -> Values:
        if self.axes.rebinds:
            return rebind.bind_again(eqn, values, self.axes.handler_of)
        return interpreter.replay(eqn, values)

    def _run_psum(self, eqn: JaxprEqn, values: Values) -> Values:
        """Run a psum with scattered results; one that a scan has summed already is passed on."""
        summed_in_scan = {scan_sum.total for scan_sum in self.region.iteration_sums.values()}
        return [
            value if var in summed_in_scan else self.axes.sum(value, self.region.scatters.get(var))
            for var, value in zip(eqn.outvars, values, strict=True)
        ]

    def _sum_of_iteration(self, result: Var, value: Any) -> Any:
        """Return what one iteration of a scan stacks for `result`, if its body computes `value`.

        That is the value; or, of `ys` in `c, ys = scan ..; g = mul ys 0.1; t = psum g`, if that sum
        is taken inside (see `IterationSum`): the sum of `mul value 0.1` over devices.
        """
        iteration_sum = self.region.iteration_sums.get(result)
        if iteration_sum is None:
            return value
        for eqn in iteration_sum.between:
            (operand,) = variables(eqn.invars)  # its others are literals
            (value,) = self._bind(eqn, _read(eqn.invars, {operand: value}))
        return self.axes.sum(value, self.region.scatters[iteration_sum.total].of_iteration)

    def _gather_handlers(self, body: Jaxpr, shards: _Shards) -> _Handlers:
        """Return handlers for equations that read the `shards`, and for scans that sum inside."""
        handlers: _Handlers = {}
        for eqn in body.eqns:
            operands = {n: atom for n, atom in enumerate(eqn.invars) if isinstance(atom, Var)}
            sharded = {n: shards[var] for n, var in operands.items() if var in shards}
            if sharded or not self.region.iteration_sums.keys().isdisjoint(eqn.outvars):
                handlers[id(eqn)] = functools.partial(self._run_gathering, sharded)
        return handlers

    def _run_gathering(self, sharded: _Operands, eqn: JaxprEqn, values: Values) -> Values:
        """Run an equation whose operands in `sharded` are shards, gathered here or in its body.

        A scan over layers gathers one in each iteration; it may also sum what it stacks there.
        """
        for_body = _shards_for_body(eqn, sharded)
        gathered_here = {n: shard for n, shard in sharded.items() if n not in for_body}
        operands = self._gather_operands(eqn, values, gathered_here) if gathered_here else values
        sums_inside = not self.region.iteration_sums.keys().isdisjoint(eqn.outvars)
        if not for_body and not sums_inside:
            return self._bind(eqn, operands)
        (jaxpr,) = interpreter.bodies(eqn)
        body = interpreter.open_jaxpr(jaxpr)
        handlers = self._gather_handlers(body, {body.invars[n]: x for n, x in for_body.items()})
        if _compat.name_of(eqn) == "scan":
            run_body = lambda args: self._evaluate(jaxpr, args, handlers)
            run_iteration = lambda args: [*map(self._sum_of_iteration, eqn.outvars, run_body(args))]
            return _scan_with(eqn, operands, run_iteration)
        if record_of(eqn).call == "checkpoint":
            # Keeps XLA from merging what a checkpoint computes again with the forward pass, now
            # that its body is evaluated in place.
            operands = lax.optimization_barrier(operands)
        return self._evaluate(jaxpr, operands, handlers)

    def _gather_operands(self, eqn: JaxprEqn, values: Values, shards: _Operands) -> Values:
        """Gather the operands in `shards`, after all others are computed, to save memory."""
        values = list(values)
        # XLA for TPU gathers late by itself, and does not fuse what is tied by a barrier.
        not_literal = [n for n, atom in enumerate(eqn.invars) if isinstance(atom, Var)]
        numbers = [*shards] if self.axes.platform == "tpu" else not_literal
        after_barrier = lax.optimization_barrier(tuple(values[n] for n in numbers))
        for n, value in zip(numbers, after_barrier, strict=True):
            values[n] = self.axes.gather(value, shards[n]) if n in shards else value
        return values


def _read(atoms: Sequence[Atom], env: Mapping[Var, Any]) -> Values:
    return rebind.drop_mesh_of_literals(atoms, interpreter.read_all(atoms, env))


def _forward(eqn: JaxprEqn, values: Values) -> Values:
    """Return the operand unchanged: the scan before it has evaluated this equation already."""
    return [value for value, atom in zip(values, eqn.invars, strict=True) if isinstance(atom, Var)]


def _shards_for_body(eqn: JaxprEqn, sharded: _Operands) -> _Operands:
    """Return which `sharded` operands the body of an equation takes as shards, by operand number.

    All of a call; of a scan those that it slices, unless they are sharded over the iterations
    (dimension 0): a `P(None, "i")` is `P("i")` in the body. A constant of the scan is gathered once
    before it; one that is a result too must be whole.
    """
    if record_of(eqn).call in ("inline", "checkpoint"):
        shards = dict(sharded)
    elif _compat.name_of(eqn) == "scan":
        first_x = interpreter.loop_counts(eqn).first_x
        sliced = {n: shard for n, shard in sharded.items() if n >= first_x and shard.dim != 0}
        shards = {n: shard.of_iteration for n, shard in sliced.items()}
    else:
        return {}
    body = interpreter.open_jaxpr(interpreter.bodies(eqn)[0])
    return {n: shard for n, shard in shards.items() if body.invars[n] not in body.outvars}


def _scan_with(eqn: JaxprEqn, values: Values, run_iteration: Callable[[Values], Values]) -> Values:
    """Run a scan with a function of constants, carries and slices in the place of its jaxpr."""
    constants, carries = interpreter.loop_counts(eqn)
    first_x = constants + carries

    def iteration(carry: Values, slices: Values) -> tuple[Values, Values]:
        outs = run_iteration([*values[:constants], *carry, *slices])
        return outs[:carries], outs[carries:]

    params = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = lax.scan(iteration, values[constants:first_x], values[first_x:], **params)
    return [*carry, *ys]
