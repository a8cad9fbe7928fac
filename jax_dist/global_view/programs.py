"""A step in the global view, for arguments of given types: planned, and jitted."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist._pmap import axes
from jax_dist._pmap.body import Call, type_of
from jax_dist._pmap.options import Options
from jax_dist._pmap.placement import put_as_jit_would
from jax_dist._rewrite import interpreter
from jax_dist._rewrite.constants import put_copy
from jax_dist._rewrite.programs import Lowered
from jax_dist._rewrite.uniformity import cut_along
from jax_dist.errors import ArgumentError
from jax_dist.global_view import placement
from jax_dist.global_view.emission import Emitter
from jax_dist.global_view.mesh_axes import MeshAxes, axes_of_constraint
from jax_dist.global_view.placement import Shardings
from jax_dist.global_view.regions import BodyPlan
from jax_dist.global_view.report import GlobalViewReport, Leaf
from jax_dist.global_view.trace import TracedFunction


@dataclasses.dataclass(frozen=True, eq=False)
class Setting:
    """Validated options of `global_view`; it asks for devices when its mesh is first read."""

    options: Options  # as for pmap
    mesh_axes: tuple[Any, ...]  # that the mapped axis is, outermost first
    state: tuple[int, ...]  # positions
    user_mesh: Mesh | None
    shardings: Shardings
    gradients: str  # "scatter" or "reduce"
    regathers: bool

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The mesh with Auto axes: on others, shardings are types, and a step has none."""
        if self.user_mesh is None:
            return _compat.auto_mesh(np.array(jax.devices()), self.mesh_axes)
        return _compat.auto_mesh(self.user_mesh.devices, self.user_mesh.axis_names)

    @functools.cached_property
    def axes(self) -> MeshAxes:
        sizes = {name: self.mesh.shape[name] for name in self.mesh_axes}
        platform = self.mesh.devices.flat[0].platform
        return MeshAxes(self.options.axis_name, sizes, platform=platform)

    @property
    def size(self) -> int:
        return math.prod(self.axes.sizes.values())

    @property
    def model_axes(self) -> dict[Any, int]:
        """The axes of the mesh that the mapped axis is not, with sizes."""
        shape = self.mesh.shape
        return {name: shape[name] for name in shape if name not in self.mesh_axes}

    @property
    def by_device(self) -> NamedSharding:
        """The sharding of `[N, *s]`."""
        return NamedSharding(self.mesh, P(self.axes.part))


@dataclasses.dataclass(frozen=True, eq=False)
class StepProgram:
    """The plan of one signature, and its jit object."""

    setting: Setting
    traced: TracedFunction
    plan: BodyPlan
    leaves: dict[int, Leaf]  # of the state, by place among the argument leaves
    results: dict[int, int]  # of the state, by place among the result leaves: that of its argument
    in_axes: list[Any]  # of each argument leaf; of the state, None where it is uniform
    in_shardings: list[NamedSharding]
    structure: Any  # of the arguments that are not static
    meshes: set[AbstractMesh]  # that the types in the jaxpr name

    @functools.cached_property
    def captured(self) -> tuple[jax.Array, ...]:
        """The captured arrays, on all devices: the first argument of the jit object."""
        replicated = NamedSharding(self.setting.mesh, P())
        only_compiles = _compat.is_compile_only(self.setting.mesh.devices.flat[0])
        put = put_copy if only_compiles else placement.put
        with jax.ensure_compile_time_eval():  # it outlives a trace around the first call
            return tuple(put(value, replicated) for value in self.traced.lifted.values)

    @property
    def report(self) -> GlobalViewReport:
        regions = list(self.plan.regions())
        scattered = sum(len(region.scatters) for region in regions)
        leaves, name = tuple(self.leaves.values()), self.setting.options.fun_name
        return GlobalViewReport(name, self.setting.size, leaves, len(regions), scattered)

    @property
    def is_cacheable(self) -> bool:
        """True if it holds nothing of a trace outside."""
        return not any(isinstance(value, Tracer) for value in self.plan.consts)

    @functools.cached_property
    def emitter(self) -> Emitter:
        setting, mesh = self.setting, self.setting.mesh.abstract_mesh
        sharded = {n for leaf in self.leaves.values() for n in cut_along(leaf.sharding.spec)}
        for eqn in interpreter.equations(self.traced.jaxpr):
            sharded |= axes_of_constraint(eqn)
        # Sums over what is sharded have another order.
        reorders = setting.gradients != "reduce"
        is_tensor_parallel = reorders and not sharded.isdisjoint(setting.model_axes)
        model = frozenset(setting.model_axes) if is_tensor_parallel else frozenset()
        mesh_axes = dataclasses.replace(setting.axes, model=model)
        manual = dict.fromkeys(frozenset(mesh.axis_names) - model, AxisType.Manual)
        return Emitter(
            setting.mesh,
            mesh_axes,
            shards_state=any(leaf.is_sharded for leaf in self.leaves.values()),
            reorders=reorders,
            rebinds=bool(self.meshes),
            rebinds_inside=bool(self.meshes - {mesh.update_axis_types(manual)})
            or interpreter.contains(self.traced.jaxpr, mesh_axes.changes),
        )

    @functools.cached_property
    def jitted(self) -> Any:
        """The jit object.

        It takes the captured arrays as one argument, if there are any, then the arguments that are
        not static, as they are kept, and keywords as a dict.
        """

        def step(*args: Any) -> Any:
            return jax.tree.unflatten(self.traced.out_tree, self._run(jax.tree.leaves(args)))

        options, mesh = self.setting.options, self.setting.mesh
        step.__name__ = step.__qualname__ = options.fun_name
        captured = (NamedSharding(mesh, P()),) * self._hidden
        first = (captured,) if captured else ()
        out_shardings = []
        for place, axis in enumerate(self.traced.out_axes):
            if place in self.results:
                out_shardings.append(self.leaves[self.results[place]].sharding)
            else:
                rank = self.traced.jaxpr.out_avals[place].ndim + 1
                spec = axes.spec_of_axis(axis, rank, self.setting.axes.part)
                out_shardings.append(NamedSharding(mesh, spec))
        donated = (n - sum(number < n for number in options.static) for n in options.donated)
        return jax.jit(
            step,
            in_shardings=(*first, *self._arguments(self.in_shardings)),
            out_shardings=jax.tree.unflatten(self.traced.out_tree, out_shardings),
            donate_argnums=tuple(number + len(first) for number in donated),
        )

    def call(self, leaves: Sequence[Any]) -> Any:
        """Run the step for leaves that are placed."""
        first = (self.captured,) if self._hidden else ()
        return self.jitted(*first, *self._arguments(leaves))

    def lower(self, leaves: Sequence[Any]) -> jax.stages.Lowered:
        """Lower the step for such leaves, without what is captured among its arguments."""
        state = self.leaves
        types = [state[n].whole if n in state else type_of(x) for n, x in enumerate(leaves)]
        args = self._arguments(types)
        if not self._hidden:
            return self.jitted.lower(*args)
        return Lowered(self.jitted.lower(self.captured, *args), self.captured)

    def place(self, call: Call) -> list[Any]:
        """Return the leaves of a call where the program wants them.

        Raises:
          ArgumentError: a leaf of the state is sharded otherwise, or an argument is of this process
            alone.
        """
        placed = list(call.leaves)
        for place, target in enumerate(self.in_shardings):
            leaf, value = self.leaves.get(place), placed[place]
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
        args, kwargs = jax.tree.unflatten(self.structure, leaves)
        return (*args, kwargs) if kwargs else args

    @property
    def _hidden(self) -> int:
        return len(self.traced.lifted.captures)

    def _run(self, leaves: Sequence[jax.Array]) -> list[Any]:
        emitter, args = self.emitter, [*leaves[: self._hidden]]
        for place, (value, axis) in enumerate(
            zip(leaves[self._hidden :], self.in_axes, strict=True)
        ):
            leaf = self.leaves.get(place)
            spec = P() if axis is None else P(emitter.axes.part)
            first = value if axis is None else jnp.moveaxis(value, axis, 0)
            args.append(emitter.constrain(first, leaf.sharding.spec if leaf else spec))
        results = []
        outs = emitter.run(self.plan, args)
        for place, (out, is_uniform) in enumerate(zip(outs, self.plan.outs, strict=True)):
            axis, leaf = self.traced.out_axes[place], self.leaves.get(self.results.get(place, -1))
            if leaf:
                axis = None if leaf.uniform else 0
            if axis is not None:
                out = jnp.moveaxis(emitter.stack(out) if is_uniform else out, 0, axis)
            results.append(out)
        return results
