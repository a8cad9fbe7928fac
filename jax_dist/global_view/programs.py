"""A step in the global view, for arguments of given types: planned, and jitted."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist._pmap import axes
from jax_dist._pmap.body import Call, type_of
from jax_dist._pmap.placement import put_as_jit_would
from jax_dist._rewrite.constants import put_copy
from jax_dist._rewrite.programs import Lowered
from jax_dist._rewrite.uniformity import cut_along
from jax_dist.errors import ArgumentError
from jax_dist.global_view import placement
from jax_dist.global_view.analysis import AxisAnalysis, VaryingOrigin
from jax_dist.global_view.emission import Emitter
from jax_dist.global_view.placement import StateType
from jax_dist.global_view.regions import BodyPlan, PlanOptions, plan
from jax_dist.global_view.report import GlobalViewReport, Leaf
from jax_dist.global_view.setting import Setting
from jax_dist.global_view.traced_steps import TracedStep, trace_step


@dataclasses.dataclass(frozen=True, eq=False)
class StepProgram:
    """The plan of one signature, and its jit object."""

    setting: Setting
    traced: TracedStep
    plan: BodyPlan
    in_axes: list[Any]  # of each argument leaf; of the state, None where it is uniform
    in_shardings: list[NamedSharding]

    @classmethod
    def build(
        cls,
        setting: Setting,
        call: Call,
        state: dict[int, StateType],
        varying: Mapping[int, VaryingOrigin],
    ) -> "StepProgram":
        """Trace and plan a step for a call of types; see `trace_step`."""
        analysis = AxisAnalysis(setting.options.axis_name, setting.axes.sizes)
        traced = trace_step(setting, analysis, call, state, varying)
        wanted: list[P | None] = [None] * len(traced.out_axes)
        for result, place in traced.results.items():
            leaf = traced.leaves[place]
            wanted[result] = leaf.sharding.spec if leaf.uniform and leaf.is_sharded else None
        options = PlanOptions(
            scatters=setting.reorders,
            regathers=setting.regathers,
            in_one=not setting.model_axes and not any(wanted),
        )
        body_plan = plan(analysis, traced.jaxpr, traced.ins, wanted, options)
        in_axes, in_shardings = [], []
        for place, (kind, axis) in enumerate(zip(call.leaves, call.axes, strict=True)):
            leaf = traced.leaves.get(place)
            spec = axes.spec_of_axis(axis, len(kind.shape), setting.axes.part)
            in_axes.append(None if leaf and leaf.uniform else axis)
            in_shardings.append(leaf.sharding if leaf else NamedSharding(setting.mesh, spec))
        return cls(setting, traced, body_plan, in_axes, in_shardings)

    @property
    def leaves(self) -> dict[int, Leaf]:
        """The leaves of the state, by place among the argument leaves."""
        return self.traced.leaves

    @functools.cached_property
    def captured(self) -> tuple[tuple[jax.Array, ...], ...]:
        """The captured arrays, on all devices: the first argument of the jit object, if any."""
        replicated = NamedSharding(self.setting.mesh, P())
        with jax.ensure_compile_time_eval():  # it outlives a trace around the first call
            values = tuple(put_copy(value, replicated) for value in self.traced.lifted.values)
        return (values,) if values else ()

    @property
    def report(self) -> GlobalViewReport:
        regions = list(self.plan.regions())
        scattered = sum(len(region.scatters) for region in regions)
        leaves, name = tuple(self.leaves.values()), self.setting.options.fun_name
        return GlobalViewReport(name, self.setting.size, leaves, len(regions), scattered)

    @functools.cached_property
    def emitter(self) -> Emitter:
        setting = self.setting
        sharded = {name for leaf in self.leaves.values() for name in cut_along(leaf.sharding.spec)}
        # Sums over what is sharded have another order.
        is_tensor_parallel = setting.reorders and not sharded.isdisjoint(setting.model_axes)
        model = setting.model_axes if is_tensor_parallel else frozenset()
        mesh_axes = dataclasses.replace(setting.axes, model=model)
        return Emitter(
            setting.mesh,
            mesh_axes,
            shards_state=any(leaf.is_sharded for leaf in self.leaves.values()),
            reorders=setting.reorders,
        )

    @functools.cached_property
    def jitted(self) -> Any:
        """The jit object.

        It takes the captured arrays as one argument, if there are any, then the arguments that are
        not static, as they are kept, and keywords as a dict.
        """
        traced, options, mesh = self.traced, self.setting.options, self.setting.mesh

        def step(*args: Any) -> Any:
            return jax.tree.unflatten(traced.out_tree, self._run(jax.tree.leaves(args)))

        step.__name__ = step.__qualname__ = options.fun_name
        first = len(self.captured)
        out_shardings = []
        for place, axis in enumerate(traced.out_axes):
            if place in traced.results:
                out_shardings.append(self.leaves[traced.results[place]].sharding)
            else:
                rank = traced.jaxpr.out_avals[place].ndim + 1
                spec = axes.spec_of_axis(axis, rank, self.setting.axes.part)
                out_shardings.append(NamedSharding(mesh, spec))
        static = options.static
        donated = (n - sum(m < n for m in static) for n in options.donated if n not in static)
        replicated = (NamedSharding(mesh, P()),) * len(traced.lifted.captures)
        return jax.jit(
            step,
            in_shardings=(*[replicated] * first, *self._arguments(self.in_shardings)),
            out_shardings=jax.tree.unflatten(traced.out_tree, out_shardings),
            donate_argnums=tuple(number + first for number in donated),
        )

    def call(self, leaves: Sequence[Any]) -> Any:
        """Run the step for leaves that are placed."""
        return self.jitted(*self.captured, *self._arguments(leaves))

    def lower(self, leaves: Sequence[Any]) -> jax.stages.Lowered:
        """Lower the step for such leaves, without what is captured among its arguments."""
        state = self.leaves
        types = [state[n].whole if n in state else type_of(x) for n, x in enumerate(leaves)]
        lowered = self.jitted.lower(*self.captured, *self._arguments(types))
        return Lowered(lowered, self.captured[0]) if self.captured else lowered

    def place(self, call: Call) -> list[Any]:
        """Return the leaves of a call where the program wants them.

        Raises:
          ArgumentError: a leaf of the state is sharded otherwise, or an argument is of this process
            alone.
        """
        placed = list(call.leaves)
        for place, target in enumerate(self.in_shardings):
            leaf, value = self.leaves.get(place), placed[place]
            # One value `[*s]` of a leaf that varies: every device gets a copy of it.
            if leaf and not leaf.uniform and jnp.shape(value) == leaf.type.shape:
                placed[place] = placement.for_each_device(value, target)
                continue
            if isinstance(value, Tracer):
                continue
            is_array = isinstance(value, jax.Array)
            is_global = is_array and not value.is_fully_addressable
            is_split = not (target.is_fully_addressable or target.is_fully_replicated)
            if is_split and not is_global:
                raise ArgumentError(
                    f"{call.paths()[place]} of shape {tuple(jnp.shape(value))} is of this process "
                    "alone, and is to be sharded over all processes. Place it first, by "
                    "view.place_batch(batch) or view.place(state)."
                )
            # jit itself places host arrays and uncommitted ones.
            if not is_array or value.sharding == target or not value.committed:
                continue
            if leaf and not value.sharding.is_equivalent_to(target, value.ndim):
                raise ArgumentError(
                    f"{leaf.path} is sharded as {value.sharding}, and the global view keeps it as "
                    f"{target}. Place the state once, by state = view.place(state)."
                )
            placed[place] = put_as_jit_would(value, target)
        return placed

    def _arguments(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Return the leaves of a call as the arguments of the jit object."""
        args, kwargs = jax.tree.unflatten(self.traced.structure, leaves)
        return (*args, kwargs) if kwargs else args

    def _run(self, leaves: Sequence[jax.Array]) -> list[Any]:
        """Run the plan on traced captures and argument leaves; return leaves laid by out_axes."""
        emitter, traced = self.emitter, self.traced
        n_captured = len(traced.lifted.captures)
        args = [*leaves[:n_captured]]
        for place, (value, axis) in enumerate(zip(leaves[n_captured:], self.in_axes, strict=True)):
            leaf = self.leaves.get(place)
            spec = P() if axis is None else P(emitter.axes.part)
            stacked = value if axis is None else jnp.moveaxis(value, axis, 0)
            args.append(emitter.constrain(stacked, leaf.sharding.spec if leaf else spec))
        results = []
        outs = emitter.run(self.plan, args)
        for place, (out, is_uniform) in enumerate(zip(outs, self.plan.outs, strict=True)):
            axis, leaf = traced.out_axes[place], self.leaves.get(traced.results.get(place, -1))
            if leaf:
                axis = None if leaf.uniform else 0
            if axis is not None:
                out = jnp.moveaxis(emitter.stack(out) if is_uniform else out, 0, axis)
            results.append(out)
        return results
