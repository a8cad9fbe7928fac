"""Stages of a body: equations on global arrays, and manual regions between.

A uniform value is computed on global arrays; what varies, and every collective over the axis, in a
`shard_map`: a manual region. Equations are put by what they need, not by where they stand: a region
takes all that can run when its stage has come, so a step of one all-reduce has one region, however
many leaves its gradients have. Loops, and branches on a uniform condition, are entered where they
make something uniform, or keep something sharded: their bodies have stages of their own.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist._passes import interpreter
from jax_dist._passes.interpreter import loop_counts, record_of
from jax_dist.global_view import analysis
from jax_dist.global_view.analysis import AxisAnalysis, ValueFacts, variables
from jax_dist.global_view.mesh_axes import Shard
from jax_dist.global_view.placement import Setting


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class IterationSum:
    """A scattered psum of what a scan stacks, such as the gradients of its layers.

    Each iteration of the scan sums its own part, so that no device has the gradients of all layers.
    """

    total: Var  # the result of the psum
    between: tuple[JaxprEqn, ...]  # elementwise, from the scan to the psum


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Equations that run in one `shard_map`, manual over the mapped axis."""

    body: Jaxpr  # of these equations; its inputs and results are values of the step
    scatters: Mapping[Var, Shard]  # results of a psum that are wanted sharded: psum_scatter
    iteration_sums: Mapping[Var, IterationSum]  # of these, the ones taken in a scan, by its result
    shards: Mapping[Var, Shard]  # inputs that come in as shards, and are gathered when read


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class EnteredEquation:
    """A loop or branch on global arrays, with a plan for each of its bodies."""

    eqn: JaxprEqn
    plans: "list[BodyPlan]"
    uniform_ins: list[bool]  # whether each operand is uniform
    uniform_outs: list[bool]  # whether each result is
    in_specs: list[P | None]  # how each operand is wanted sharded in the bodies
    out_specs: list[P | None]  # how each result is wanted sharded


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class BodyPlan:
    """A body as equations on global arrays, and regions between."""

    closed: ClosedJaxpr
    uniform_ins: list[bool]  # whether each input is uniform
    facts: ValueFacts
    steps: list[JaxprEqn | EnteredEquation | Region]

    @property
    def body(self) -> Jaxpr:
        return self.closed.jaxpr

    @property
    def uniform_outs(self) -> list[bool]:
        return [self.facts.is_uniform(atom) for atom in self.body.outvars]

    def regions(self) -> Iterator[Region]:
        """Yield all regions, those of entered bodies first."""
        for step in self.steps:
            for plan in step.plans if isinstance(step, EnteredEquation) else ():
                yield from plan.regions()
            if isinstance(step, Region):
                yield step


@dataclasses.dataclass(frozen=True, slots=True)
class Planner:
    """Puts each equation of a step into a stage of its body.

    Stage k is what runs outside when the regions before k have run, and then region k. So what a
    region makes can be read in it, and outside from the next stage on.
    """

    analysis: AxisAnalysis
    setting: Setting
    single_region: bool  # nothing is sharded, so all is one region: pmap's program, to the bit

    def plan(self, jaxpr: Any, ins: Sequence[bool], result_specs: Sequence[P | None]) -> BodyPlan:
        """Return the plan of a body, given for each input whether it is uniform.

        `result_specs` says how each result is wanted sharded, if at all.
        """
        closed = jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())
        # An equation is put as a whole: a jit around the step would be one region with its update.
        is_call = lambda eqn: record_of(eqn).call == "inline"
        closed = interpreter.inline_calls(closed, is_call)
        uniform = self.analysis.uniform_values(closed, ins)
        facts = ValueFacts(uniform, analysis.wanted_specs(closed.jaxpr, result_specs, uniform))
        return BodyPlan(closed, [*ins], facts, self._steps(closed.jaxpr, facts))

    def _steps(self, body: Jaxpr, facts: ValueFacts) -> list[JaxprEqn | EnteredEquation | Region]:
        """Return the equations of a body by stages, in each the global ones before its region.

        Time 2k is stage k outside of regions, and time 2k + 1 its region. Gradients, which vary,
        and their psum have time 1; the update by that psum, which is uniform, has time 2.
        """
        steps: dict[int, list[Any]] = defaultdict(list)  # by time
        time_of: dict[Var, int] = {}  # when a value is computed
        last_effect = 0  # the time of the last side effect
        for eqn in body.eqns:
            entered = self._enter(eqn, facts)
            is_in_region = entered is None and self._runs_in_region(eqn, facts)
            time = max((time_of.get(var, 0) for var in variables(eqn.invars)), default=0)
            has_effect = _compat.has_side_effects(eqn)
            if has_effect:  # they keep the order of the program
                time = max(time, last_effect)
            if (time % 2 == 1) != is_in_region:
                time += 1  # the next one of its kind
            if has_effect:
                last_effect = time
            time_of.update((var, time) for var in eqn.outvars)
            steps[time].append(entered or eqn)
        reads = Counter([*_operands(body.eqns), *variables(body.outvars)])
        region_times = [time for time in steps if time % 2 == 1]
        region_reads = {var for time in region_times for var in _operands(steps[time])}
        for time in region_times:
            region_body = _jaxpr_of(steps[time], body, reads)
            steps[time] = [self._region(region_body, facts, region_reads)]
        return [step for time in sorted(steps) for step in steps[time]]

    def _runs_in_region(self, eqn: JaxprEqn, facts: ValueFacts) -> bool:
        """Return whether an equation runs in a region: it varies, communicates or has effects."""
        return (
            self.single_region
            or not all(map(facts.is_uniform, [*eqn.invars, *eqn.outvars]))
            or _compat.has_side_effects(eqn)
            or self.analysis.is_used_by(eqn)
        )

    def _enter(self, eqn: JaxprEqn, facts: ValueFacts) -> EnteredEquation | None:
        """Return the plan of a loop or branch that runs on global arrays; None for all else.

        It runs so, with regions in its bodies, if a result is uniform, and wanted sharded or made
        uniform inside. Its condition is then uniform, or no result would be.
        """
        if self.single_region or record_of(eqn).kind not in ("loop", "branch"):
            return None
        uniform_ins = [facts.is_uniform(atom) for atom in eqn.invars]
        uniform_outs = [facts.is_uniform(var) for var in eqn.outvars]
        out_specs = [facts.spec_of(var) for var in eqn.outvars]
        is_sharded = any(spec is not None for spec in out_specs)
        if not any(uniform_outs) or not (is_sharded or self.analysis.is_unified_by(eqn)):
            return None
        # Under vmap a condition has many elements, and lax.while_loop takes one.
        if _compat.name_of(eqn) == "while" and eqn.params["cond_jaxpr"].out_avals[0].shape != ():
            return None
        ins_of_bodies = self.analysis.uniform_in_bodies(eqn, uniform_ins)
        specs_of_bodies = analysis.wanted_in_bodies(eqn, out_specs)
        plans = list(map(self.plan, interpreter.bodies(eqn), ins_of_bodies, specs_of_bodies))
        in_specs = analysis.operand_specs(eqn, out_specs)
        return EnteredEquation(eqn, plans, uniform_ins, uniform_outs, in_specs, out_specs)

    def _region(self, body: Jaxpr, facts: ValueFacts, region_reads: set[Var]) -> Region:
        """Return the region that evaluates `body` on each device, in one `shard_map`.

        A psum becomes a psum_scatter if its result is wanted sharded and no region reads it whole:
        `region_reads` are the values that any region reads.
        """
        axes = (self.analysis.name,)
        is_psum = lambda eqn: _compat.name_of(eqn) == "psum" and tuple(eqn.params["axes"]) == axes
        psums = list(filter(is_psum, body.eqns)) if self.setting.reorders else []
        totals = [var for eqn in psums for var in eqn.outvars if var not in region_reads]
        scatters = self._shards(totals, facts)
        # Each device adds to all shards of a scattered sum, so its operands come in whole.
        whole = _operands([eqn for eqn in psums if not scatters.keys().isdisjoint(eqn.outvars)])
        may_be_shards = [var for var in body.invars if self.setting.regathers and var not in whole]
        shards = self._shards(may_be_shards, facts)
        return Region(body, scatters, dict(_scan_sums(body, scatters)), shards)

    def _shards(self, candidates: Iterable[Var], facts: ValueFacts) -> dict[Var, Shard]:
        """Return the shards of the values that are wanted sharded over the mapped axis alone."""
        shards = {var: self.setting.axes.shard_of(facts.spec_of(var)) for var in candidates}
        return {var: shard for var, shard in shards.items() if shard is not None}


def _jaxpr_of(eqns: list[JaxprEqn], source: Jaxpr, reads: Counter[Var]) -> Jaxpr:
    """Return some equations of `source` as a jaxpr, whose results are what others read.

    `reads` counts how often the equations and results of `source` read a value.
    """
    reads_here = Counter(_operands(eqns))
    # In program order: a set of variables has another order in each process.
    computed = dict.fromkeys(var for eqn in eqns for var in eqn.outvars)
    inputs = [var for var in reads_here if var not in computed]
    results = [var for var in computed if reads[var] > reads_here[var]]
    effects = frozenset().union(*[eqn.effects for eqn in eqns])
    debug_info = source.debug_info._replace(arg_names=None, result_paths=None)
    return Jaxpr((), inputs, results, eqns, effects, debug_info)


def _scan_sums(body: Jaxpr, scatters: Mapping[Var, Shard]) -> Iterator[tuple[Var, IterationSum]]:
    """Yield what scans stack, such as gradients `[layers, *s]`, if each iteration can sum its part.

    As in `c, ys = scan ..; g = mul ys 0.1; t = psum g`, where nothing else reads ys and g: between
    are elementwise equations, and `scatters` has t, scattered over another dimension than 0.
    """
    reads = Counter([*_operands(body.eqns), *variables(body.outvars)])
    readers = ((var, eqn) for eqn in body.eqns for var in variables(eqn.invars))
    only_reader = {var: eqn for var, eqn in readers if reads[var] == 1}
    scans = (eqn for eqn in body.eqns if _compat.name_of(eqn) == "scan")
    for stacked in [y for eqn in scans for y in eqn.outvars[loop_counts(eqn).carries :]]:
        var, between = stacked, []
        while (eqn := only_reader.get(var)) is not None:  # follow the chain
            if _compat.name_of(eqn) == "psum":
                total = eqn.outvars[eqn.invars.index(var)]
                if total in scatters and scatters[total].dim != 0:
                    yield stacked, IterationSum(total, tuple(between))
                break
            # An equation of two variables, as a sum with weight decay, cannot run in an iteration.
            if not record_of(eqn).elementwise or len(variables(eqn.invars)) > 1:
                break
            between.append(eqn)
            (var,) = eqn.outvars


def _operands(eqns: Iterable[JaxprEqn]) -> list[Var]:
    return [var for eqn in eqns for var in variables(eqn.invars)]
