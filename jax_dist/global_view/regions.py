"""Plans of a step's body: equations on global arrays, and manual regions between.

What varies, and every collective over the axis, runs in a region, a `shard_map`; all else on global
arrays. A region takes all that can run at its time, wherever it stands in the program: so a step of
one all-reduce has one region, however many leaves its gradients have.
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
class ScanSum:
    """A psum of what a scan stacks, as the gradients of layers, taken in each of its iterations."""

    total: Var  # the result of the psum
    between: tuple[JaxprEqn, ...]  # elementwise, from the scan to the psum


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Equations that run in one `shard_map`, manual over the mapped axis."""

    body: Jaxpr  # of these equations; its inputs and results are values of the step
    scattered_sums: Mapping[Var, Shard]  # results of psums that become psum_scatters
    scan_sums: Mapping[Var, ScanSum]  # of these sums, those taken in a scan, by its result
    sharded_inputs: Mapping[Var, Shard]  # come in as shards, and are gathered when read


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ControlFlow:
    """A loop or branch on global arrays, with a plan for each of its bodies."""

    eqn: JaxprEqn
    plans: "list[BodyPlan]"
    uniform_operands: list[bool]  # whether each operand is uniform
    uniform_results: list[bool]  # whether each result is
    operand_specs: list[P | None]  # how each operand is wanted sharded in the bodies
    result_specs: list[P | None]  # how each result is wanted sharded


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class BodyPlan:
    """A body as equations on global arrays, and regions between."""

    closed: ClosedJaxpr
    uniform_inputs: list[bool]  # whether each input is uniform
    facts: ValueFacts
    parts: list[JaxprEqn | ControlFlow | Region]  # in the order in which they run

    @property
    def uniform_results(self) -> list[bool]:
        return [self.facts.is_uniform(atom) for atom in self.closed.jaxpr.outvars]

    def regions(self) -> Iterator[Region]:
        """Yield all regions, those in loops and branches first."""
        for part in self.parts:
            for plan in part.plans if isinstance(part, ControlFlow) else ():
                yield from plan.regions()
            if isinstance(part, Region):
                yield part


@dataclasses.dataclass(frozen=True, slots=True)
class Planner:
    """Plans the bodies of a step: what runs in regions, and what before, between and after them."""

    analysis: AxisAnalysis
    setting: Setting
    single_region: bool  # nothing is sharded, so all is one region: pmap's program, to the bit

    def plan(self, jaxpr: Any, ins: Sequence[bool], result_specs: Sequence[P | None]) -> BodyPlan:
        """Return the plan of a body: what runs in regions, what on global arrays, in which order.

        `ins` says for each input whether it is the same on all devices ("uniform"), `result_specs`
        how each result should be sharded, None for one that is left open.
        """
        closed = jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())
        # A jit is replaced by its equations. One around the whole step would be one region, in
        # which also the update of the parameters runs.
        is_call = lambda eqn: record_of(eqn).call == "inline"
        closed = interpreter.inline_calls(closed, is_call)
        uniform = self.analysis.uniform_values(closed, ins)
        facts = ValueFacts(uniform, analysis.infer_specs(closed.jaxpr, result_specs, uniform))
        return BodyPlan(closed, [*ins], facts, self._order_by_time(closed.jaxpr, facts))

    def _order_by_time(self, body: Jaxpr, facts: ValueFacts) -> list[Any]:
        """Return the parts of a plan: equations by the time they run, those of a region as one.

        Each runs when its operands are there, at an even time on global arrays, at an odd one in a
        region. Gradients, which differ between devices, and their psum have time 1, so they are one
        region; the update of the parameters by that psum has time 2.
        """
        parts: dict[int, list[Any]] = defaultdict(list)  # by time
        time_of: dict[Any, int] = {}  # when a variable is computed, or the last side effect is done
        for eqn in body.eqns:
            control_flow = self._plan_control_flow(eqn, facts)  # None if it is no such equation
            is_in_region = control_flow is None and self._runs_in_region(eqn, facts)
            effect = ["effect"] if _compat.has_side_effects(eqn) else []  # these keep their order
            dependencies = [*variables(eqn.invars), *effect]
            time = max([time_of.get(dependency, 0) for dependency in dependencies], default=0)
            if (time % 2 == 1) != is_in_region:
                time += 1  # the next one of its kind
            time_of.update((result, time) for result in [*eqn.outvars, *effect])
            parts[time].append(control_flow or eqn)
        reads = Counter([*_operands(body.eqns), *variables(body.outvars)])
        region_times = [time for time in parts if time % 2 == 1]
        region_reads = {var for time in region_times for var in _operands(parts[time])}
        for time in region_times:
            region_body = _jaxpr_of(parts[time], body, reads)
            parts[time] = [self._make_region(region_body, facts, region_reads)]
        return [part for time in sorted(parts) for part in parts[time]]

    def _runs_in_region(self, eqn: JaxprEqn, facts: ValueFacts) -> bool:
        """Return whether an equation runs in a region: it varies, communicates or has effects."""
        return (
            self.single_region
            or not all(map(facts.is_uniform, [*eqn.invars, *eqn.outvars]))
            or _compat.has_side_effects(eqn)
            or self.analysis.is_used_by(eqn)
        )

    def _plan_control_flow(self, eqn: JaxprEqn, facts: ValueFacts) -> ControlFlow | None:
        """Return the plan of a loop or branch that runs on global arrays; None for all else.

        It runs so if a result is the same on all devices ("uniform"), and either is kept sharded,
        or comes from a collective in a body, such as a psum.
        """
        if self.single_region or record_of(eqn).kind not in ("loop", "branch"):
            return None
        uniform_operands = [facts.is_uniform(atom) for atom in eqn.invars]
        uniform_results = [facts.is_uniform(var) for var in eqn.outvars]
        result_specs = [facts.spec_of(var) for var in eqn.outvars]
        is_sharded = any(spec is not None for spec in result_specs)
        if not any(uniform_results) or not (is_sharded or self.analysis.is_unified_by(eqn)):
            return None
        # Under vmap a condition has many elements, and lax.while_loop takes one.
        if _compat.name_of(eqn) == "while" and eqn.params["cond_jaxpr"].out_avals[0].shape != ():
            return None
        inputs_of_bodies = self.analysis.uniform_in_bodies(eqn, uniform_operands)
        specs_of_bodies = analysis.body_result_specs(eqn, result_specs)
        plans = list(map(self.plan, interpreter.bodies(eqn), inputs_of_bodies, specs_of_bodies))
        specs = analysis.operand_specs(eqn, result_specs), result_specs
        return ControlFlow(eqn, plans, uniform_operands, uniform_results, *specs)

    def _make_region(self, body: Jaxpr, facts: ValueFacts, region_reads: set[Var]) -> Region:
        """Return the region that evaluates `body` on each device, in one `shard_map`.

        A psum becomes a psum_scatter if its result is kept sharded, and no region reads the whole
        of it: `region_reads` are the values that any region reads.
        """
        axes = (self.analysis.name,)
        is_psum = lambda eqn: _compat.name_of(eqn) == "psum" and tuple(eqn.params["axes"]) == axes
        psums = list(filter(is_psum, body.eqns)) if self.setting.reorders_sums else []
        sums_to_scatter = [var for eqn in psums for var in eqn.outvars if var not in region_reads]
        scattered = self._shards(sums_to_scatter, facts)
        # Each device adds to all shards of a scattered sum, so its operands come in whole.
        whole = _operands([eqn for eqn in psums if not scattered.keys().isdisjoint(eqn.outvars)])
        # With `regather`, other inputs come in as shards, and are gathered where they are read.
        may_be_shards = [var for var in body.invars if self.setting.regathers and var not in whole]
        sharded_inputs = self._shards(may_be_shards, facts)
        return Region(body, scattered, dict(_find_scan_sums(body, scattered)), sharded_inputs)

    def _shards(self, candidates: Iterable[Var], facts: ValueFacts) -> dict[Var, Shard]:
        """Return the shards of the values that are wanted sharded over the mapped axis alone."""
        shards = {var: self.setting.axes.shard_of(facts.spec_of(var)) for var in candidates}
        return {var: shard for var, shard in shards.items() if shard is not None}


def _jaxpr_of(eqns: list[JaxprEqn], source: Jaxpr, reads: Counter[Var]) -> Jaxpr:
    """Return some equations of `source` as a jaxpr, whose results are what others read."""
    reads_here = Counter(_operands(eqns))  # as `reads` counts all readers in `source`
    # In program order: a set of variables has another order in each process.
    computed = dict.fromkeys(var for eqn in eqns for var in eqn.outvars)
    inputs = [var for var in reads_here if var not in computed]
    results = [var for var in computed if reads[var] > reads_here[var]]
    effects = frozenset().union(*[eqn.effects for eqn in eqns])
    debug_info = source.debug_info._replace(arg_names=None, result_paths=None)
    return Jaxpr((), inputs, results, eqns, effects, debug_info)


def _find_scan_sums(body: Jaxpr, scattered: Mapping[Var, Shard]) -> Iterator[tuple[Var, ScanSum]]:
    """Yield the results of scans, stacked over iterations, that only a scattered psum reads.

    Such are gradients `[layers, *s]`, the `stacked` in `_, stacked = scan ..; scaled = mul stacked
    0.1; total = psum scaled`. The psum may not be scattered over dimension 0, the layers, for each
    iteration is to take its own part of the sum.
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
                if total in scattered and scattered[total].dim != 0:
                    yield stacked, ScanSum(total, tuple(between))
                break
            # An equation of two variables, as a sum with weight decay, cannot run in an iteration.
            if not record_of(eqn).elementwise or len(variables(eqn.invars)) > 1:
                break
            between.append(eqn)
            (var,) = eqn.outvars


def _operands(eqns: Iterable[JaxprEqn]) -> list[Var]:
    return [var for eqn in eqns for var in variables(eqn.invars)]
