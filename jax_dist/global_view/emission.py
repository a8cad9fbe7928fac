"""Evaluation of a plan: equations on global arrays, and manual regions, each in a `shard_map`.

Shapes: a uniform value is `[*s]`, however it is sharded; a varying one is `[N, *s]`, sharded over
the mapped axis, so that each device has its own `[1, *s]`. A region sees `[*s]` of both. A loop
carry that varies in one iteration is `[N, *s]` in all.
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
from jax_dist.global_view.regions import BodyPlan, ControlFlow, Region

_Shards: TypeAlias = Mapping[Var, Shard]  # of values of which a device holds only a shard
_ShardedOperands: TypeAlias = Mapping[int, Shard]  # the same, by operand number of an equation
# What evaluates an equation in place of its primitive, as `handler(eqn, values)`, by `id(eqn)`.
_Handlers: TypeAlias = dict[int, Handler]


@dataclasses.dataclass(frozen=True, slots=True)
class Emitter:
    """Runs plans on a mesh, in the trace of a jit."""

    axes: MeshAxes
    reorders_sums: bool  # whether sums may be taken over sharded values, in another order

    def run(self, plan: BodyPlan, args: Sequence[Any]) -> Values:
        """Return the results of a planned body for `args`, global arrays.

        Both are `[*s]` of a value that is the same on all devices ("uniform"), and else `[N, *s]`.
        """
        body = plan.closed.jaxpr
        inputs = [*body.constvars, *body.invars]
        env: dict[Any, Any] = dict(zip(inputs, [*plan.closed.consts, *args], strict=True))
        for part in plan.parts:
            if isinstance(part, Region):  # equations that run on each device, in one shard_map
                outvars = part.body.outvars
                outs = self._run_region(plan.facts, part, env)
            elif isinstance(part, ControlFlow):  # a loop or branch, with a plan for each body
                outvars = part.eqn.outvars
                outs = self._run_control_flow(plan.facts, part, _read(part.eqn.invars, env))
            else:  # an equation on global arrays
                outvars = part.outvars
                outs = self._run_global(part, _read(part.invars, env))
            env.update(zip(outvars, outs, strict=True))
        return _read(body.outvars, env)

    def shard(self, value: Any, spec: P | None) -> Any:
        """Shard a value by a spec; None leaves it as it is."""
        if spec is None:
            return value
        return lax.with_sharding_constraint(value, NamedSharding(self.axes.mesh, spec))

    def gather(self, value: Any, spec: P | None = None) -> Any:
        """Return a uniform value, gathered along the mapped axis as regions read it."""
        if self.axes.model:
            return self.shard(value, None if spec is None else self.axes.drop_mapped(spec))
        return self.shard(value, P())

    def stack(self, value: Any) -> Any:
        """Return a copy for each device: `(4, 2)` becomes `(8, 4, 2)` on 8 devices."""
        value, axes = self.gather(value), self.axes
        stacked = jnp.broadcast_to(value, (axes.size, *jnp.shape(value)))
        others = [P.UNCONSTRAINED if axes.model else None] * jnp.ndim(value)
        return self.shard(stacked, P(axes.mapped, *others))

    def _run_global(self, eqn: JaxprEqn, operands: Values) -> Values:
        """Run an equation on global arrays, replicated first if its bits depend on shardings."""
        record = record_of(eqn)
        keeps_bits = record.elementwise or record.moves
        may_reorder = self.reorders_sums and record.sums and not record.ordered
        # Whole numbers are reduced to the same bits in any order. Not so a maximum of floats: in
        # XLA on CPU, one over shards loses a NaN in one of them.
        is_exact = record.reduces and not jnp.issubdtype(jnp.result_type(operands[0]), jnp.inexact)
        if keeps_bits or may_reorder or is_exact:
            return interpreter.replay(eqn, operands)
        outs = interpreter.replay(eqn, [self.shard(value, P()) for value in operands])
        # Without this, XLA would shard the bodies of a loop as the readers of its result want it.
        return [self.shard(out, P()) for out in outs]

    def _run_region(self, facts: ValueFacts, region: Region, env: Mapping[Var, Any]) -> Values:
        """Run the equations of a region on each device, in one `shard_map`; return its results.

        `env` has the global arrays that it reads: `[*s]` of a value that is the same on all devices
        ("uniform"), and else `[N, *s]`. On a device each is `[*s]`, or a shard of it if it is in
        `region.sharded_inputs`, or among the results in `region.scattered_sums`.
        """
        body, axes = region.body, self.axes

        def read_input(var: Var) -> Any:
            must_gather = facts.is_uniform(var) and var not in region.sharded_inputs
            return self.gather(env[var], facts.spec_of(var)) if must_gather else env[var]

        def run_on_device(*blocks: Any) -> Values:  # `(1, 4)` of a varying `(8, 4)`, run as `(4,)`
            inputs = zip(body.invars, blocks, strict=True)
            args = [x if facts.is_uniform(var) else lax.squeeze(x, [0]) for var, x in inputs]
            results = zip(body.outvars, _RegionBody(axes, region).run(args), strict=True)
            return [x if facts.is_uniform(var) else lax.expand_dims(x, [0]) for var, x in results]

        def block_spec(var: Any, shards: _Shards) -> P:
            if not facts.is_uniform(var):
                return P(axes.mapped)
            shard = shards.get(var)
            return P() if shard is None else P(*[None] * shard.dim, shard.spec[shard.dim])

        mapped = jax.shard_map(
            run_on_device,
            mesh=axes.mesh,
            in_specs=tuple(block_spec(var, region.sharded_inputs) for var in body.invars),
            out_specs=[block_spec(var, region.scattered_sums) for var in body.outvars],
            # As in pmap: with types, a gradient by a uniform value would be summed twice.
            check_vma=False,
            # Over the model axes, as of tensor parallelism, XLA shards the computations.
            axis_names=set(axes.mapped if axes.model else axes.mesh.axis_names),
        )
        return mapped(*map(read_input, body.invars))

    def _run_control_flow(self, facts: ValueFacts, part: ControlFlow, values: Values) -> Values:
        """Run a loop or branch, whose bodies are planned, on its operands `values`.

        These are `[*s]` if all devices hold the same (`part.uniform_operands`), else `[N, *s]`.
        """
        eqn, name = part.eqn, _compat.name_of(part.eqn)
        # The first operands of a loop are its constants. They are gathered once, before the loop,
        # unless its iterations compute with them as they are sharded.
        constants = interpreter.loop_counts(eqn).constants if name in ("scan", "while") else 0
        for number in range(constants):
            if part.uniform_operands[number] and part.operand_specs[number] is None:
                values[number] = self.gather(values[number], facts.spec_of(eqn.invars[number]))
        with interpreter.use_location(eqn, anew=True):
            if name == "scan":
                return self._run_scan(part, values)
            if name == "while":
                return self._run_while(part, values)
            index, *operands = values  # of a cond
            branches = [functools.partial(self._run_body, part, plan) for plan in part.plans]
            return lax.switch(jnp.asarray(index, jnp.int32), branches, *operands)

    def _run_scan(self, part: ControlFlow, values: Values) -> Values:
        """Run a scan with a planned body; `values` are its constants, first carries, and xs.

        An x or y of T iterations is `[T, *s]` if all devices hold the same (uniform), and else
        `[N, T, *s]`, which has to be `[T, N, *s]` for `lax.scan`.
        """
        (plan,), (constants, carries) = part.plans, interpreter.loop_counts(part.eqn)
        first_x = constants + carries
        values = self._stack_varying(values, part.uniform_operands, plan.uniform_inputs)
        first_carries = self._shard_all(values[constants:first_x], part.result_specs[:carries])
        pairs = zip(values[first_x:], plan.uniform_inputs[first_x:], strict=True)
        xs = [x if is_uniform else jnp.moveaxis(x, 1, 0) for x, is_uniform in pairs]
        run_iteration = lambda args: self._run_body(part, plan, *args)
        outs = _scan_with(part.eqn, [*values[:constants], *first_carries, *xs], run_iteration)
        pairs = zip(outs[carries:], part.uniform_results[carries:], strict=True)
        ys = [y if is_uniform else jnp.moveaxis(y, 0, 1) for y, is_uniform in pairs]
        return [*outs[:carries], *ys]

    def _run_while(self, part: ControlFlow, values: Values) -> Values:
        """Run a while loop with a planned condition and body.

        `values` are the constants of the condition, those of the body, and the first carries. One
        that is the same on all devices before the loop, but not in it, goes in as `[N, *s]`.
        """
        condition, body = part.plans
        body_start = part.eqn.params["cond_nconsts"]
        carry_start = interpreter.loop_counts(part.eqn).constants
        uniform_inside = [*condition.uniform_inputs[:body_start], *body.uniform_inputs]
        values = self._stack_varying(values, part.uniform_operands, uniform_inside)
        body_constants = values[body_start:carry_start]
        return lax.while_loop(
            lambda carry: self.run(condition, [*values[:body_start], *carry])[0],
            lambda carry: self._run_body(part, body, *body_constants, *carry),
            self._shard_all(values[carry_start:], part.result_specs),
        )

    def _run_body(self, part: ControlFlow, plan: BodyPlan, *args: Any) -> Values:
        """Run a body of `part`; a result that varies in another branch or iteration is stacked."""
        specs = map(plan.facts.spec_of, plan.closed.jaxpr.outvars)
        outs = self._shard_all(self.run(plan, args), specs)
        return self._stack_varying(outs, plan.uniform_results, part.uniform_results)

    def _shard_all(self, values: Values, specs: Iterable[P | None]) -> Values:
        return [self.shard(x, spec) for x, spec in zip(values, specs, strict=True)]

    def _stack_varying(self, values: Values, before: list[bool], after: list[bool]) -> Values:
        """Stack as `[N, *s]` the values that are uniform by `before`, but not by `after`."""
        flags = zip(values, before, after, strict=True)
        return [x if old == new else self.stack(x) for x, old, new in flags]


@dataclasses.dataclass(frozen=True, slots=True)
class _RegionBody:
    """Evaluation of a region on one device, with its psums scattered and its shards gathered."""

    axes: MeshAxes
    region: Region

    def run(self, args: Values) -> Values:
        """Run the equations of the region on this device.

        Inputs that come in as shards are gathered where they are read. A psum whose result is kept
        sharded becomes a psum_scatter, or is taken in the scan before it (see `ScanSum`).
        """
        handlers = self._handlers_for(self.region.body, self.region.sharded_inputs)
        for eqn in self.region.body.eqns:
            if not self.region.scattered_sums.keys().isdisjoint(eqn.outvars):
                handlers[id(eqn)] = self._run_scattered_psum
        # A handler `pass_on(eqn, values)`: the scan before has computed the result of the equation.
        pass_on = lambda eqn, values: [values[eqn.invars.index(*variables(eqn.invars))]]
        for scan_sum in self.region.scan_sums.values():
            handlers.update((id(eqn), pass_on) for eqn in scan_sum.between)
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

    def _run_scattered_psum(self, eqn: JaxprEqn, values: Values) -> Values:
        """Run a psum with scattered results; one that a scan has summed already is passed on."""
        summed_in_scan = {scan_sum.total for scan_sum in self.region.scan_sums.values()}
        scattered = self.region.scattered_sums
        return [
            value if var in summed_in_scan else self.axes.sum(value, scattered.get(var))
            for var, value in zip(eqn.outvars, values, strict=True)
        ]

    def _sum_in_iteration(self, stacked: Var, value: Any) -> Any:
        """Return what an iteration of a scan stacks for its result; its body computes `value`.

        That is `value`, unless only a psum reads the stacked result, as gradients of layers in
        `_, stacked = scan ..; scaled = mul stacked 0.1; total = psum scaled`. Then it is, of the
        sum of `mul value 0.1` over devices, the shard of this device.
        """
        scan_sum = self.region.scan_sums.get(stacked)
        if scan_sum is None:
            return value
        for eqn in scan_sum.between:  # here the mul
            (operand,) = variables(eqn.invars)  # its others are literals
            (value,) = self._bind(eqn, _read(eqn.invars, {operand: value}))
        shard_of_total = self.region.scattered_sums[scan_sum.total]
        return self.axes.sum(value, shard_of_total.shard_of_iteration)

    def _handlers_for(self, body: Jaxpr, shards: _Shards) -> _Handlers:
        """Return handlers, by `id(eqn)`, for equations that read `shards`, or sum in a scan."""
        handlers: _Handlers = {}
        for eqn in body.eqns:
            operands = {n: atom for n, atom in enumerate(eqn.invars) if isinstance(atom, Var)}
            sharded = {n: shards[var] for n, var in operands.items() if var in shards}
            if sharded or not self.region.scan_sums.keys().isdisjoint(eqn.outvars):
                handlers[id(eqn)] = functools.partial(self._run_on_shards, sharded)
        return handlers

    def _run_on_shards(self, sharded: _ShardedOperands, eqn: JaxprEqn, values: Values) -> Values:
        """Run an equation of whose operands in `sharded` this device holds only a shard.

        They are gathered before it; or, if it has a body that can take shards, by the equation of
        the body that reads them: a scan over layers gathers one layer in each iteration.
        """
        for_body = _select_shards_for_body(eqn, sharded)
        to_gather = {n: shard for n, shard in sharded.items() if n not in for_body}
        operands = self._gather_operands(eqn, values, to_gather) if to_gather else values
        sums_in_scan = not self.region.scan_sums.keys().isdisjoint(eqn.outvars)
        if not for_body and not sums_in_scan:
            return self._bind(eqn, operands)
        (jaxpr,) = interpreter.bodies(eqn)
        body = interpreter.open_jaxpr(jaxpr)
        handlers = self._handlers_for(body, {body.invars[n]: x for n, x in for_body.items()})
        if _compat.name_of(eqn) == "scan":
            run_body = lambda args: self._evaluate(jaxpr, args, handlers)
            run_iteration = lambda args: [*map(self._sum_in_iteration, eqn.outvars, run_body(args))]
            return _scan_with(eqn, operands, run_iteration)
        if record_of(eqn).call == "checkpoint":
            # Keeps XLA from merging what a checkpoint computes again with the forward pass, now
            # that its body is evaluated in place.
            operands = lax.optimization_barrier(operands)
        return self._evaluate(jaxpr, operands, handlers)

    def _gather_operands(self, eqn: JaxprEqn, values: Values, shards: _ShardedOperands) -> Values:
        """Return the operands of an equation, those in `shards` gathered over devices."""
        operands = list(values)
        # To save memory, a barrier lets no gather begin before all operands are computed. XLA for
        # TPU gathers late by itself, and would not fuse operands with others across a barrier.
        not_literal = [n for n, atom in enumerate(eqn.invars) if isinstance(atom, Var)]
        numbers = [*shards] if self.axes.platform == "tpu" else not_literal
        after_barrier = lax.optimization_barrier(tuple(values[n] for n in numbers))
        for n, value in zip(numbers, after_barrier, strict=True):
            operands[n] = self.axes.gather(value, shards[n]) if n in shards else value
        return operands


def _read(atoms: Sequence[Atom], env: Mapping[Var, Any]) -> Values:
    return rebind.drop_mesh_of_literals(atoms, interpreter.read_all(atoms, env))


def _select_shards_for_body(eqn: JaxprEqn, sharded: _ShardedOperands) -> _ShardedOperands:
    """Return the `sharded` operands that the body of an equation takes as shards, not gathered.

    Of a call these are all; of a scan the `xs` that it slices, unless they are sharded along its
    iterations. Its constants would be gathered again in each iteration.
    """
    if record_of(eqn).call in ("inline", "checkpoint"):
        shards = dict(sharded)
    elif _compat.name_of(eqn) == "scan":
        first_x = interpreter.loop_counts(eqn).first_x
        sliced = {n: shard for n, shard in sharded.items() if n >= first_x and shard.dim != 0}
        shards = {n: shard.shard_of_iteration for n, shard in sliced.items()}
    else:
        return {}
    body = interpreter.open_jaxpr(interpreter.bodies(eqn)[0])
    # What the body returns as it came in must be whole.
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
