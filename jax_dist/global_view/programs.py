"""A step in the global view, for arguments of given types: settled, planned, and jitted."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist._pmap import axes, placement
from jax_dist._pmap.axes import AxisPrefix
from jax_dist._pmap.body import Call, Options, type_of
from jax_dist._rewrite import interpreter
from jax_dist._rewrite.captures import Captures
from jax_dist._rewrite.constants import put_copy
from jax_dist._rewrite.programs import Lowered
from jax_dist._rewrite.uniformity import cut_along
from jax_dist.errors import ArgumentError
from jax_dist.global_view import copies
from jax_dist.global_view.body import Body
from jax_dist.global_view.emission import Emitter
from jax_dist.global_view.islands import BodyPlan
from jax_dist.global_view.mesh_axes import MeshAxes, names_of_constraint
from jax_dist.global_view.report import GlobalViewReport, Leaf
from jax_dist.global_view.state_placement import Shardings

StateLeaves: TypeAlias = dict[int, jax.ShapeDtypeStruct]  # by place, the types on one device


@dataclasses.dataclass(frozen=True, eq=False)
class Setting:
    """What was said to `global_view`, checked; it asks for devices when its mesh is first read."""

    fun_name: str
    name: Any  # of the mapped axis
    mesh_axes: tuple[Any, ...]  # that it is, outermost first
    in_axes: AxisPrefix
    out_axes: AxisPrefix
    state: tuple[int, ...]  # positions, as those below
    static: tuple[int, ...]
    donated: tuple[int, ...]
    given_mesh: Mesh | None
    shardings: Shardings
    gradients: str  # "scatter" or "reduce"
    regathers: bool
    captures: Captures

    @functools.cached_property
    def mesh(self) -> Mesh:
        """With Auto axes: on others, shardings are types, and a step has none."""
        if self.given_mesh is None:
            return _compat.auto_mesh(np.array(jax.devices()), self.mesh_axes)
        return _compat.auto_mesh(self.given_mesh.devices, self.given_mesh.axis_names)

    @property
    def size(self) -> int:
        return math.prod(self.axes.sizes.values())

    @functools.cached_property
    def axes(self) -> MeshAxes:
        return MeshAxes(self.name, {name: self.mesh.shape[name] for name in self.mesh_axes})

    @property
    def further(self) -> frozenset[Any]:
        """The axes of the mesh that the mapped axis is not."""
        return frozenset(self.mesh.axis_names) - {*self.mesh_axes}

    @property
    def by_device(self) -> NamedSharding:
        """Of `[N, *s]`."""
        return NamedSharding(self.mesh, P(self.axes.part))

    @functools.cached_property
    def options(self) -> Options:
        """As for pmap."""
        own = [self.mesh.axis_names.index(name) for name in self.mesh_axes]
        devices = np.moveaxis(self.mesh.devices, own, range(len(own)))
        return Options(
            fun_name=self.fun_name,
            axis_name=self.name,
            in_axes=self.in_axes,
            out_axes=self.out_axes,
            static=self.static,
            donated=self.donated,
            devices=tuple(row[0] for row in devices.reshape(self.size, -1)),
            arrays="global",
            captures=self.captures,
            gathers="keep",
            other_axes=tuple((n, self.mesh.shape[n]) for n in sorted(self.further, key=str)),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class StepProgram:
    """For one signature: what is found of its state, and the jit object."""

    setting: Setting
    body: Body
    plan: BodyPlan
    leaves: dict[int, Leaf]  # by the place of the argument leaf
    results: dict[int, int]  # the place of each result leaf that is of the state -> of its argument
    in_axes: list[Any]  # of each argument leaf; of the state, None where it is shared
    in_shardings: list[NamedSharding]
    structure: Any  # of the arguments that are not static
    meshes: set[AbstractMesh]  # that the types in the body name

    @functools.cached_property
    def captured(self) -> tuple[jax.Array, ...]:
        """What the function captures, on all devices: the first argument of the jit object."""
        whole = NamedSharding(self.setting.mesh, P())
        no_devices = _compat.is_compile_only(self.setting.mesh.devices.flat[0])
        put = put_copy if no_devices else copies.put_whole
        with jax.ensure_compile_time_eval():  # it outlives a trace around the first call
            return tuple(put(value, whole) for value in self.body.lifted.values)

    @property
    def report(self) -> GlobalViewReport:
        islands = list(self.plan.islands())
        scattered = sum(len(island.scatters) for island in islands)
        return GlobalViewReport(
            self.setting.fun_name,
            self.setting.size,
            tuple(self.leaves.values()),
            len(islands),
            scattered if self.emitter.cuts_state else 0,
        )

    @property
    def cacheable(self) -> bool:
        """Whether it holds nothing of a trace outside."""
        return not any(isinstance(value, Tracer) for value in self.plan.consts)

    @functools.cached_property
    def emitter(self) -> Emitter:
        setting, mesh = self.setting, self.setting.mesh.abstract_mesh
        cut_over = {n for leaf in self.leaves.values() for n in cut_along(leaf.sharding.spec)}
        for eqn in interpreter.equations(self.body.jaxpr):
            cut_over |= names_of_constraint(eqn)
        # Sums over what is cut have another order.
        reorders = setting.gradients != "reduce"
        free = setting.further if reorders and setting.further & cut_over else frozenset()
        platform = setting.mesh.devices.flat[0].platform
        special = {"widens": bool(free) and platform == "cpu", "is_tpu": platform == "tpu"}
        mesh_axes = dataclasses.replace(setting.axes, free=free, **special)
        # As a shard_map over these axes shows it.
        manual = dict.fromkeys(frozenset(mesh.axis_names) - free, AxisType.Manual)
        inside = mesh.update_axis_types(manual)
        return Emitter(
            setting.mesh,
            mesh_axes,
            cuts_state=any(leaf.is_cut for leaf in self.leaves.values()),
            reorders=reorders,
            anew=bool(self.meshes),
            anew_inside=bool(self.meshes - {inside})
            or interpreter.contains(self.body.jaxpr, mesh_axes.changes),
            # XLA for TPU gathers late by itself, and does not fuse what is tied.
            ties=platform != "tpu",
        )

    @functools.cached_property
    def jitted(self) -> Any:
        """Takes the arguments that are not static, as they are kept; and keywords as a dict.

        What is captured comes before them, as one argument, if there is any.
        """

        def step(*args: Any) -> Any:
            return jax.tree.unflatten(self.body.out_tree, self._run(jax.tree.leaves(args)))

        step.__name__ = step.__qualname__ = self.setting.fun_name
        whole = NamedSharding(self.setting.mesh, P())
        first = ((whole,) * self._hidden,) if self._hidden else ()
        out_shardings = []
        for place, axis in enumerate(self.body.out_axes):
            if place in self.results:
                out_shardings.append(self.leaves[self.results[place]].sharding)
            else:
                rank = self.body.jaxpr.out_avals[place].ndim + 1
                spec = axes.spec_of_axis(axis, rank, self.setting.axes.part)
                out_shardings.append(NamedSharding(self.setting.mesh, spec))
        static, donated = self.setting.static, self.setting.donated
        own = (n - sum(each < n for each in static) for n in donated if n not in static)
        return jax.jit(
            step,
            in_shardings=(*first, *self._arguments(self.in_shardings)),
            out_shardings=jax.tree.unflatten(self.body.out_tree, out_shardings),
            donate_argnums=tuple(number + len(first) for number in own),
        )

    def call(self, leaves: Sequence[Any]) -> Any:
        """Runs it for leaves that lie where it takes them."""
        first = (self.captured,) if self._hidden else ()
        return self.jitted(*first, *self._arguments(leaves))

    def lower(self, leaves: Sequence[Any]) -> jax.stages.Lowered:
        """The program for such leaves, without what is captured among its arguments."""
        own = self.leaves
        types = [own[n].whole if n in own else type_of(leaf) for n, leaf in enumerate(leaves)]
        args = self._arguments(types)
        if not self._hidden:
            return self.jitted.lower(*args)
        return Lowered(self.jitted.lower(self.captured, *args), self.captured)

    def _arguments(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Leaves as arguments of the step."""
        args, kwargs = jax.tree.unflatten(self.structure, leaves)
        return (*args, kwargs) if kwargs else args

    @property
    def _hidden(self) -> int:
        return len(self.body.lifted.captures)

    def _run(self, leaves: Sequence[jax.Array]) -> list[Any]:
        run, given = self.emitter, []
        captured, leaves = leaves[: self._hidden], leaves[self._hidden :]
        for place, (leaf, axis) in enumerate(zip(leaves, self.in_axes, strict=True)):
            own = self.leaves.get(place)
            first = leaf if axis is None else jnp.moveaxis(leaf, axis, 0)
            spec = P() if axis is None else P(run.axes.part)
            given.append(run.laid(first, own.sharding.spec if own else spec))
        outs = run.run(self.plan, [*captured, *given])
        results = []
        for place, (out, is_shared) in enumerate(zip(outs, self.plan.outs, strict=True)):
            axis, own = self.body.out_axes[place], self.leaves.get(self.results.get(place, -1))
            if own:
                axis = None if own.shared else 0
            if axis is not None:
                out = jnp.moveaxis(run.for_each_device(out) if is_shared else out, 0, axis)
            results.append(out)
        return results


@dataclasses.dataclass(frozen=True, slots=True)
class Ready:
    """What to do with calls of the same types."""

    program: StepProgram
    lifted: tuple[int, ...]  # leaves of the state that vary, and come as if they were shared

    def given(self, call: Call) -> list[Any]:
        """The leaves where the program wants them."""
        placed, own = list(call.leaves), self.program.leaves
        for place in self.lifted:
            if isinstance(placed[place], Tracer):
                raise _kept_otherwise(own[place])
            placed[place] = copies.for_each_device(placed[place], own[place].sharding)
        for place, target in enumerate(self.program.in_shardings):
            leaf = placed[place]
            if isinstance(leaf, Tracer):
                continue
            if not (target.is_fully_addressable or target.is_fully_replicated):
                self._check_is_of_all(call, place)
            if not isinstance(leaf, jax.Array) or leaf.sharding == target or not leaf.committed:
                continue
            if place in own and not leaf.sharding.is_equivalent_to(target, leaf.ndim):
                raise ArgumentError(
                    f"{own[place].path} is sharded as {leaf.sharding}, and the global view keeps "
                    f"it as {target}. Place the state once, by state = view.place(state)."
                )
            placed[place] = placement.put_as_jit_would(leaf, target)
        return placed

    def _check_is_of_all(self, call: Call, place: int) -> None:
        """Raise ArgumentError for what is to be cut over processes, and is of this one alone."""
        leaf = call.leaves[place]
        if place in self.lifted or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable):
            return
        kind = f"{type(leaf).__module__}.{type(leaf).__name__}"
        if isinstance(leaf, jax.Array):
            kind = "jax.Array on devices of this process"
        raise ArgumentError(
            f"{call.paths()[place]} of shape {tuple(jnp.shape(leaf))} is a {kind}, and is to be "
            f"sharded over devices of all {jax.process_count()} processes. Place it first, by "
            "view.place_batch(batch) or view.place(state)."
        )


def _kept_otherwise(leaf: Leaf) -> ArgumentError:
    return ArgumentError(
        f"{leaf.path} begins to vary at {leaf.origin}, so it is kept as {leaf.whole.shape}, and a "
        "traced function got one value of it. Place the state before, by "
        "state = view.place(state, *other arguments)."
    )
